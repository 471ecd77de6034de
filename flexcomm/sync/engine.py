"""The engine: drives the buckets of all calls of a world.

Collectives start in an order that follows from the order of calls and from nothing else, so any number of buckets and
of calls can be under way at once. A call advances when it is started and when it, or a later call, is waited for.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from flexcomm.bootstrap.hang_report import explain_timeout
from flexcomm.codec import check_numbers
from flexcomm.errors import DeadlineExceededError, FlexcommError, NonFiniteError, TransportError
from flexcomm.kernels import LARGEST_MAGNITUDE, Momentum
from flexcomm.stats import SyncRecord
from flexcomm.sync.bucket import VERIFIED, BucketContext, sync_bucket
from flexcomm.transport import LoopbackTransport

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from flexcomm.sync.algorithms import Collective
    from flexcomm.sync.buffers import Buffers
    from flexcomm.sync.plan import BucketPlan, SyncPlan
    from flexcomm.sync.residuals import Residuals
    from flexcomm.transport import Handle, Transport
    from flexcomm.world import World

__all__ = ["BucketTask", "Engine", "SyncCall", "engine_of"]

MOST_PLANS = 256


class PlanCache(dict["Hashable", "SyncPlan"]):
    """Plans of calls that were made before, with their buffers; where shapes keep changing, the oldest are forgotten.

    What was agreed stays agreed, so ranks need not forget the same ones.
    """

    def __setitem__(self, key: Hashable, plan: SyncPlan) -> None:
        if len(self) >= MOST_PLANS:
            del self[next(iter(self))]
        super().__setitem__(key, plan)


@dataclass(eq=False)
class Engine:
    """What the calls of one world share. It does not hold the world, which would then never end."""

    node_of_one: Transport
    """Stands for the ranks of a node where only the inter-node leg is asked for."""
    under_way: deque[SyncCall] = field(default_factory=deque)
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
            agree = world.agree if plan.all_ranks else world.agree_inter
            try:
                agree(plan.settings.fields() | {"call": verb, "call before": before})
            except DeadlineExceededError as error:
                raise explain_timeout(world, error, self.sequence) from error
            plan.agreed_after.add(number)
        self.previous = plan
        if plan.all_ranks:
            self.previous_of_all_ranks = plan

    def finish_up_to(self, call: SyncCall) -> None:
        """Finish calls in the order they were started: their collectives must start in one order on all ranks."""
        while call in self.under_way:
            self.under_way.popleft().finish()


_engines: WeakKeyDictionary[World, Engine] = WeakKeyDictionary()


def engine_of(world: World) -> Engine:
    """Return the engine of a world."""
    engine = _engines.get(world)
    if engine is None:
        engine = _engines[world] = Engine(LoopbackTransport(world.inter.timeout_s))
    return engine


class BucketTask:
    """One bucket of a call under way, and the collective it waits for.

    A task that fails keeps the reason. The other tasks of its call still go to their ends, where ranks that did not
    fail would wait for this one. Only a failure of a transport ends all of them.
    """

    def __init__(self, ctx: BucketContext) -> None:
        self.ctx = ctx
        self.failure: FlexcommError | None = None
        self._steps = sync_bucket(ctx)
        self._collective: Collective | None = None
        self._handle: Handle[Any] | None = None
        self._started_s = 0.0

    def start(self) -> None:
        """Start the first collective."""
        self._resume(None)

    def advance(self) -> bool:
        """Wait for the collective under way and start the next; return whether there is one."""
        if self._handle is None or self._collective is None:
            return False
        record = self.ctx.record
        with record.time("waiting"):
            result = self._handle.wait()
        record.add_seconds(self._collective.level, time.perf_counter() - self._started_s)
        self._resume(result)
        return self._handle is not None

    def write_outputs(self) -> None:
        """Decode what was received and verified."""
        next(self._steps, None)

    @property
    def is_exchanging(self) -> bool:
        """Whether the bucket is on its way between nodes, or further: the caller may go on computing."""
        return self._collective is None or self._collective.leg == "exchange"

    @property
    def has_arrived(self) -> bool:
        """Whether nothing is under way any more."""
        return self._handle is None or self._handle.done()

    def _resume(self, result: Any) -> None:
        """Take the bucket to its next collective and start it, or to where everything is verified."""
        self._collective = self._handle = None
        try:
            wanted = self._steps.send(result)
        except TransportError:
            raise
        except FlexcommError as failure:
            self.failure = failure
            return
        if wanted is VERIFIED:
            return
        self._collective, self._started_s = wanted, time.perf_counter()
        self._handle = wanted.start()
        self.ctx.record.count(wanted.level, wanted.sent_bytes, wanted.received_bytes)


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
        self.record = SyncRecord(syncs=1)
        self._world, self._plan, self._residuals = world, plan, residuals
        self._intra = world.intra if plan.all_ranks else self.engine.node_of_one
        self._step = self.engine.calls if step is None else step
        check_numbers(self._step, self.engine.sequence)
        self._outputs = [x.detach() for x in outputs]
        self._tensors = [x.detach() for x in tensors]
        if plan.settings.nonfinite == "zero":
            self._tensors = [torch.where(x.abs() < LARGEST_MAGNITUDE, x, 0.0) for x in self._tensors]
        self._lent: list[str] = []
        self._tasks: list[BucketTask] = []
        self._refusal: FlexcommError | None = None
        self._error: BaseException | None = None
        self._committed = False

    def start(self) -> None:
        """Take every bucket to where it is between nodes; the next one is encoded while one is on the wire."""
        engine, plan = self.engine, self._plan
        engine.agree(self._world, plan)
        engine.calls += 1
        if self._residuals is not None:
            self._residuals.claim(plan.names)
        try:
            # All numbers at once: a rank whose bucket gets stuck must stay in step with those that do not.
            first, engine.sequence = engine.sequence + 1, engine.sequence + len(plan.buckets)
            self.record.dense_bytes = plan.dense_bytes
            self._tasks = [
                BucketTask(self._make_context(bucket, pool.take(), sequence))
                for sequence, (bucket, pool) in enumerate(zip(plan.buckets, plan.pools, strict=True), first)
            ]
            for task in self._tasks:
                task.start()
            for task in self._tasks:
                while not task.is_exchanging:
                    task.advance()
        except DeadlineExceededError as error:
            explained = explain_timeout(self._world, error, engine.sequence)
            self._cancel(explained)
            raise explained from error
        except BaseException as error:
            self._cancel(error)
            raise
        engine.under_way.append(self)

    def finish(self) -> None:
        """Take every bucket to its end. What goes wrong is kept for those who ask for the result."""
        try:
            while sum(task.advance() for task in self._tasks):
                pass
            failures = [failure for failure in (self._refusal, *(task.failure for task in self._tasks)) if failure]
            if failures:
                raise failures[0]
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

    def _make_context(self, bucket: BucketPlan, buffers: Buffers, sequence: int) -> BucketContext:
        states, nonfinite = [Momentum(gain=1.0 / self._intra.size)] * len(bucket.shards[self._intra.rank]), ""
        if self._residuals is not None:
            try:
                states = self._borrow_states(bucket, self._residuals)
            except FlexcommError as refusal:
                # Other ranks may hold no state here and would wait: so this rank goes along, with nothing to send.
                self._refusal, nonfinite = self._refusal or refusal, str(refusal)
        return BucketContext(
            plan=bucket,
            tensors=self._tensors,
            outputs=self._outputs,
            states=states,
            step=self._step,
            sequence=sequence,
            average=self._plan.settings.average,
            kernels=self._plan.kernels,
            intra=self._intra,
            inter=self._world.inter,
            rank_names=self._plan.rank_names,
            buffers=buffers,
            record=self.record,
            nonfinite=nonfinite,
        )

    def _borrow_states(self, bucket: BucketPlan, residuals: Residuals) -> list[Momentum]:
        states, share = [], 1.0 / self._intra.size
        for shard in bucket.shards[self._intra.rank]:
            states.append(residuals.lend(shard.spec.name, shard.plan, self._plan.device, share))
            self._lent.append(shard.spec.name)
        return states

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
            self.record.skipped = 1
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
