"""The engine: drives the buckets of all calls of a world, synchronisations and mixes (``flexcomm/gossip``) alike.

Collectives start in an order that follows from the order of calls and from nothing else, so any number of buckets and
of calls can be under way at once. A synchronisation is driven in one of two ways, which its plan says, on process
groups that the other does not use: by the caller, when it is started and when it or a later call is waited for; or in
the background, by comm threads (``workers.py``). A mix is driven by the comm thread of its communicator.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flexcomm.bootstrap.consistency import explain_timeout
from flexcomm.codec import check_numbers
from flexcomm.errors import DeadlineExceededError, FlexcommError, NonFiniteError, TransportError
from flexcomm.kernels import LARGEST_MAGNITUDE, StateUpdate
from flexcomm.stats import SyncRecord, Timed
from flexcomm.sync.algorithms import LEGS, LEVELS, Collective, Leg
from flexcomm.sync.bucket import VERIFIED, BucketContext, Verified, sync_bucket
from flexcomm.sync.buffers import Buffers
from flexcomm.sync.plan import BucketPlan, SyncPlan
from flexcomm.sync.residuals import Residuals
from flexcomm.sync.workers import CommThreads
from flexcomm.transport import Handle, LoopbackTransport, Transport
from flexcomm.world import World

MOST_PLANS = 256


# Any: a plan is a SyncPlan, or gossip's MixPlan, and its key says which.
class PlanCache(dict["Hashable", Any]):
    """Plans of calls that were made before, with their buffers; where shapes keep changing, the oldest are forgotten.

    What was agreed stays agreed, so ranks need not forget the same ones.
    """

    def __setitem__(self, key: Hashable, plan: Any) -> None:
        if len(self) >= MOST_PLANS:
            del self[next(iter(self))]
        super().__setitem__(key, plan)


@dataclass(eq=False)
class Engine:
    """What the calls of one world share. It does not hold the world, which would then never end."""

    node_of_one: Transport
    """Stands for the ranks of a node where only the inter-node leg is asked for."""
    under_way: deque[SyncCall] = field(default_factory=deque)
    """Calls that the caller drives."""
    threads: CommThreads | None = None
    communicators: dict[str, CommThreads] = field(default_factory=dict)
    """Drive mixes, by the name of their communicator."""
    sequence: int = 0
    calls: int = 0
    plans: PlanCache = field(default_factory=PlanCache)
    previous: SyncPlan | None = None
    previous_of_all_ranks: SyncPlan | None = None

    def agree(self, world: World, plan: SyncPlan) -> None:
        """Return when all ranks concerned use the same plan, and used the same one before."""
        # The ranks of a node may exchange different shards: those are no business of all ranks.
        previous = self.previous_of_all_ranks if plan.all_ranks else self.previous
        number = 0 if previous is None else previous.number
        if number not in plan.agreed_after:
            before = "none" if previous is None else str(previous.settings.fields())
            verb = "start_sync" if plan.all_ranks else "start_exchange"
            driver = "in the background" if plan.in_background else "by the caller"
            agree = world.agree if plan.all_ranks else world.agree_inter
            try:
                agree(plan.settings.fields() | {"call": verb, "driven": driver, "call before": before})
            except DeadlineExceededError as error:
                raise explain_timeout(world, error, self.sequence) from error
            plan.agreed_after.add(number)
        self.previous = plan
        if plan.all_ranks:
            self.previous_of_all_ranks = plan

    def comm_threads(self, world: World, device: torch.device) -> CommThreads:
        """Return the threads that drive synchronisations in the background, made on first use by all ranks together."""
        if self.threads is None:
            first, second = world.clone_groups(), world.clone_groups()
            transports: dict[Leg, Transport] = {
                "reduce_inside": first.intra,
                "exchange": first.inter,
                "second_exchange": second.inter,
                "gather_inside": second.intra,
            }
            self.threads = CommThreads(world, transports, {leg: (leg,) for leg in LEGS}, device)
        return self.threads

    def finish_up_to(self, call: SyncCall) -> None:
        """Finish calls in the order they were started: their collectives must start in one order on all ranks."""
        if call.in_background:
            call.finish()
        while call in self.under_way:
            self.under_way.popleft().finish()


_engines: WeakKeyDictionary[World, Engine] = WeakKeyDictionary()


def engine_of(world: World) -> Engine:
    """Return the engine of a world."""
    engine = _engines.get(world)
    if engine is None:
        engine = _engines[world] = Engine(LoopbackTransport(world.inter.timeout_s))
    return engine


class Context(Protocol):
    """Everything that the path of a bucket needs; the engine itself needs only its record."""

    record: SyncRecord


C = TypeVar("C", bound=Context)


class BucketTask(Generic[C]):
    """One bucket of a call under way: where it is on its path.

    ``steps`` is the path, such as ``sync_bucket(ctx)``: a generator that yields the collectives it needs, then
    ``VERIFIED``; resumed after that, it writes outputs.

    One thread at a time drives it. A bucket that fails keeps the reason, and the other buckets of its call still go to
    their ends, where ranks that did not fail would wait for this one; only a failure of a transport ends all of them.
    """

    def __init__(
        self, ctx: C, steps: Generator[Collective | Verified, Any, None], done: threading.Event | None = None
    ) -> None:
        self.ctx = ctx
        self.failure: BaseException | None = None
        self.is_done = False
        """Whether nothing is under way any more: what came is verified, or the bucket failed."""
        self.ready: torch.Event | None = None
        """When the device has computed the bucket's tensors."""
        self._steps = steps
        self._collective: Collective | None = None
        self._handle: Handle[Any] | None = None
        self._started_s = 0.0
        self._done = done

    def wait(self) -> Any:
        """Return the result of the collective under way; None if there is none."""
        if self._handle is None or self._collective is None:
            return None
        result = self._handle.wait()
        self.ctx.record.add_seconds(LEVELS[self._collective.leg], time.perf_counter() - self._started_s)
        return result

    def resume(self, result: Any) -> None:
        """Go on until the bucket wants the next collective, or everything it received is verified."""
        self._collective = self._handle = None
        try:
            wanted = self._steps.send(result)
        except TransportError:
            raise
        except FlexcommError as failure:
            self.fail(failure)
            return
        if wanted is VERIFIED:
            self._end()
        else:
            self._collective = wanted

    def start(self, transport: Transport) -> None:
        """Start the collective that the bucket wants."""
        assert self._collective is not None  # noqa: S101  (our own invariant)
        self._started_s = time.perf_counter()
        self._handle = self._collective.start(transport)
        record, wanted = self.ctx.record, self._collective
        record.count(LEVELS[wanted.leg], wanted.sent_bytes, wanted.received_bytes)

    @property
    def wanted_leg(self) -> Leg | None:
        """The leg of the collective that is to be started."""
        return self._collective.leg if self._collective is not None and self._handle is None else None

    def is_under_way(self, legs: Collection[Leg]) -> bool:
        """Return whether a collective of one of these legs was started."""
        return self._handle is not None and self._collective is not None and self._collective.leg in legs

    def advance(self, transports: Mapping[Leg, Transport]) -> bool:
        """Wait for the collective under way in the caller's thread and start the next; return whether there is one."""
        if self.is_done:
            return False
        with Timed(self.ctx.record, "waiting"):
            result = self.wait()
        self.resume(result)
        if self._collective is None:
            return False
        self.start(transports[self._collective.leg])
        return True

    def fail(self, failure: BaseException) -> None:
        """Keep the reason; nothing of the bucket is under way any more."""
        self.failure = failure
        self._end()

    def wait_done(self) -> None:
        """Return when comm threads are done with the bucket."""
        if self._done is not None:
            self._done.wait()

    def write_outputs(self) -> None:
        """Decode what was received and verified."""
        next(self._steps, None)

    @property
    def is_exchanging(self) -> bool:
        """Whether the bucket is on its way between nodes, or further: the caller may go on computing."""
        wanted = self._collective
        return wanted is None or (LEVELS[wanted.leg] == "inter" and not wanted.is_short)

    @property
    def has_arrived(self) -> bool:
        """Whether the caller would not block on it."""
        return self.is_done or (self._handle is not None and self._handle.done())

    def _end(self) -> None:
        self.is_done = True
        if self._done is not None:
            self._done.set()


class SyncCall:
    """One call under way: its buckets, and what becomes of its residuals.

    ``outputs`` are contiguous. Beside them, a call writes only the spare memory of its residuals.
    """

    def __init__(
        self,
        world: World,
        plan: SyncPlan,
        tensors: list[Tensor],
        outputs: list[Tensor],
        residuals: Residuals | None,
        step: int | None,
    ) -> None:
        self.engine = engine_of(world)
        self.in_background = plan.in_background
        self._world, self._plan, self._residuals = world, plan, residuals
        self._step = self.engine.calls if step is None else step
        check_numbers(self._step, self.engine.sequence)
        self._outputs = [x.detach() for x in outputs]
        self._tensors = [x.detach() for x in tensors]
        if plan.settings.nonfinite == "zero":
            self._tensors = [torch.where(x.abs() < LARGEST_MAGNITUDE, x, 0.0) for x in self._tensors]
        self._transports: Mapping[Leg, Transport] = {
            "reduce_inside": world.intra,
            "exchange": world.inter,
            "second_exchange": world.inter,
            "gather_inside": world.intra,
        }
        self._waited_s = 0.0
        self._lent: list[str] = []
        self._tasks: list[BucketTask[BucketContext]] = []
        self._refusal: FlexcommError | None = None
        self._error: BaseException | None = None
        self._committed = self._skipped = self._is_finished = False

    def start(self) -> None:
        """Start all buckets.

        Driven by the caller, every bucket is on its way between nodes when this returns; the next one is encoded while
        one is on the wire.
        """
        engine, plan = self.engine, self._plan
        engine.agree(self._world, plan)
        engine.calls += 1
        if self._residuals is not None:
            self._residuals.claim(plan.names)
        try:
            # All numbers at once: a rank whose bucket gets stuck must stay in step with those that do not.
            first, engine.sequence = engine.sequence + 1, engine.sequence + len(plan.buckets)
            for sequence, (bucket, pool) in enumerate(zip(plan.buckets, plan.pools, strict=True), first):
                ctx = self._make_context(bucket, pool.take(), sequence)
                done = threading.Event() if self.in_background else None
                self._tasks.append(BucketTask(ctx, sync_bucket(ctx), done))
            if self.in_background:
                threads = engine.comm_threads(self._world, plan.device)
                for task in self._tasks:
                    threads.submit(task)
                return
            for task in self._tasks:
                task.advance(self._transports)
            for task in self._tasks:
                while not task.is_exchanging:
                    task.advance(self._transports)
        except DeadlineExceededError as error:
            explained = explain_timeout(self._world, error, engine.sequence)
            self._cancel(explained)
            raise explained from error
        except BaseException as error:
            self._cancel(error)
            raise
        engine.under_way.append(self)

    def finish(self) -> None:
        """Take every bucket to its end, once. What goes wrong is kept for those who ask for the result."""
        if self._is_finished:
            return
        self._is_finished = True
        try:
            if self.in_background:
                begin_s = time.perf_counter()
                for task in self._tasks:
                    task.wait_done()
                self._waited_s = time.perf_counter() - begin_s
            else:
                under_way = self._tasks
                while under_way:
                    under_way = [task for task in under_way if task.advance(self._transports)]
            failures: list[BaseException] = [] if self._refusal is None else [self._refusal]
            failures += [task.failure for task in self._tasks if task.failure is not None]
            if failures:
                # Of several, that of a transport: all others follow from it.
                raise next((one for one in failures if isinstance(one, TransportError)), failures[0])
            self._write_outputs([sender for task in self._tasks for sender in task.ctx.nonfinite_senders])
        except DeadlineExceededError as error:
            self._cancel(explain_timeout(self._world, error, self.engine.sequence))
        except BaseException as error:
            self._cancel(error)
            if not isinstance(error, Exception):
                raise

    def check(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error

    def rollback(self) -> None:
        """Give the residuals back what this call took out of them, and take what it added; once, and if it changed any.

        For those who find, after a call succeeded, that what it belongs to did not.
        """
        if self._residuals is not None and self._committed:
            self._committed = False
            self._residuals.rollback(self._lent)

    def has_arrived(self) -> bool:
        return all(task.has_arrived for task in self._tasks)

    @property
    def record(self) -> SyncRecord:
        """What it cost so far: the sum over its buckets, each of which is driven by one thread at a time."""
        total = SyncRecord(
            syncs=1, dense_bytes=self._plan.dense_bytes, waiting_s=self._waited_s, skipped=int(self._skipped)
        )
        for task in self._tasks:
            total.add(task.ctx.record)
        return total

    def _make_context(self, bucket: BucketPlan, buffers: Buffers, sequence: int) -> BucketContext:
        states, states_out, update, nonfinite = None, None, StateUpdate(gain=1.0 / self._plan.ranks), ""
        if self._residuals is not None:
            update = self._residuals.update(1.0 / self._plan.ranks)
            try:
                states, states_out = self._borrow_states(bucket, self._residuals)
            except FlexcommError as refusal:
                # Other ranks may hold no state here and would wait: so this rank goes along, with nothing to send.
                self._refusal, nonfinite = self._refusal or refusal, str(refusal)
        return BucketContext(
            plan=bucket,
            tensors=self._tensors,
            outputs=self._outputs,
            states=states,
            states_out=states_out,
            update=update,
            step=self._step,
            sequence=sequence,
            average=self._plan.settings.average,
            kernels=self._plan.kernels,
            local_rank=self._plan.rank,
            local_size=self._plan.ranks,
            node=self._world.inter.rank,
            nodes=self._plan.nodes,
            rank_names=self._plan.rank_names,
            buffers=buffers,
            record=SyncRecord(),
            nonfinite=nonfinite,
        )

    def _borrow_states(self, bucket: BucketPlan, residuals: Residuals) -> tuple[list[Tensor], list[Tensor]]:
        states, states_out = [], []
        for shard in bucket.shards[self._plan.rank]:
            lent = residuals.lend(shard.spec.name, shard.plan, self._plan.device)
            states.append(lent.state)
            states_out.append(lent.spare)
            self._lent.append(shard.spec.name)
        return states, states_out

    def _write_outputs(self, nonfinite_senders: list[str]) -> None:
        """Write all outputs or, if a rank had nonfinite values, do what the call asked for then."""
        if nonfinite_senders and self._plan.settings.nonfinite == "raise":
            raise NonFiniteError(
                f"{', '.join(dict.fromkeys(nonfinite_senders))} had NaN, infinity or a magnitude of 2**100 or more to "
                f"send, or residuals that do not fit (then its own error says so), and nothing was changed on any "
                f"rank. Skip this step; if that happens often, lower the learning rate or the loss scale, clip, or "
                f"pass nonfinite='skip'."
            )
        if nonfinite_senders:
            for out in self._outputs:
                out.zero_()
            self._skipped = True
        else:
            for task in self._tasks:
                task.write_outputs()
        if self._residuals is not None:
            (self._residuals.cancel if nonfinite_senders else self._residuals.commit)(self._lent)
            self._committed = not nonfinite_senders
            self._residuals.unclaim(self._plan.names)
        for task, pool in zip(self._tasks, self._plan.pools, strict=True):
            pool.give_back(task.ctx.buffers)
        self._world.add_stats(self.record, sequence=self.engine.sequence, step=self._step)

    def _cancel(self, error: BaseException) -> None:
        """Leave everything as it was. Buffers are not used again: a transport may still write into them."""
        self._error = error
        if self._residuals is not None:
            self._residuals.cancel(self._lent)
            self._residuals.unclaim(self._plan.names)
