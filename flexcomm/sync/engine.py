"""The engine: drives the buckets of all calls of a world, synchronisations and mixes (``flexcomm/gossip``) alike.

Collectives start in an order that follows from the order of calls and from nothing else, so any number of buckets and
of calls can be under way at once. A synchronisation is driven by the caller, when it is started and when it or a later
call is waited for; or, as its plan says, by comm threads, on process groups that nobody else uses. A mix is driven by
the comm thread of its communicator.

[Note: order of collectives] Ranks must start the collectives of one process group in one order, whatever the timing of
each rank. A synchronisation has one thread and one process group for each leg: every bucket passes through all threads
in the order in which calls were made, also through those of legs it does not have, and one thread alone starts the
collectives on a group: that of the leg before, as soon as a bucket gets there, so that the next bucket's collective is
under way while this one's is waited for. So ``flexcomm-wait-reduce_inside`` starts the first leg, waits for it, encodes
and starts the exchange; ``flexcomm-wait-exchange`` waits for that and starts what is next, and so on. A mix has several
collectives between nodes: one thread drives all legs of a bucket, and then those of the next.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch

from flexcomm.bootstrap.consistency import explain_timeout
from flexcomm.device import make_stream, record_event, use_stream, wait_stream
from flexcomm.errors import DeadlineExceededError, FlexcommError, TransportError
from flexcomm.stats import Timed
from flexcomm.sync.algorithms import LEGS, LEVELS, Collective, Leg
from flexcomm.sync.bucket import VERIFIED, Verified
from flexcomm.sync.plan import SyncPlan
from flexcomm.transport import Handle, Transport
from flexcomm.transport.mpi import threads_are_free
from flexcomm.world import World

MOST_PLANS = 256
_END_S = 1.0  # how long an interpreter that ends waits for a collective that does not


# Any: a plan is a SyncPlan, or gossip's MixPlan, and its key says which.
class PlanCache(dict["Hashable", Any]):
    """Plans of earlier calls, with their buffers; the oldest are forgotten. What was agreed stays agreed."""

    def __setitem__(self, key: Hashable, plan: Any) -> None:
        if len(self) >= MOST_PLANS:
            del self[next(iter(self))]
        super().__setitem__(key, plan)


@dataclass(eq=False)
class Engine:
    """What the calls of one world share. It does not hold the world, which would then never end."""

    under_way: deque[Callable[[], None]] = field(default_factory=deque)  # finish the calls that the caller drives
    threads: CommThreads | None = None
    communicators: dict[str, CommThreads] = field(default_factory=dict)  # drive mixes
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
            fields = plan.settings.fields() | {
                "call": "start_sync" if plan.all_ranks else "start_exchange",
                "device": plan.device.type,
                "driven": "in the background" if plan.in_background else "by the caller",
                "call before": "none" if previous is None else str(previous.settings.fields()),
            }
            try:
                (world.agree if plan.all_ranks else world.agree_inter)(fields)
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
            groups = zip(LEGS, (first.intra, first.inter, second.inter, second.intra), strict=True)
            self.threads = CommThreads(world, dict(groups), {f"wait-{leg}": (leg,) for leg in LEGS}, device)
        return self.threads


_engines: WeakKeyDictionary[World, Engine] = WeakKeyDictionary()


def engine_of(world: World) -> Engine:
    return _engines.setdefault(world, Engine())


# Any: a BucketContext, or gossip's MixContext. The engine itself needs only its record.
C = TypeVar("C", bound=Any)


class BucketTask(Generic[C]):
    """One bucket of a call under way: where it is on its path.

    ``steps`` is the path, such as ``sync_bucket(ctx)``. One thread at a time drives it. A bucket that fails keeps the
    reason, and the other buckets of its call still go to their ends, where ranks that did not fail would wait for this
    one; only a failure of a transport ends all of them.
    """

    def __init__(
        self, ctx: C, steps: Generator[Collective | Verified, Any, None], done: threading.Event | None = None
    ) -> None:
        self.ctx = ctx
        self.failure: BaseException | None = None
        self.is_done = False  # what came is verified, or the bucket failed
        self.ready: torch.Event | None = None  # when the device has computed the bucket's tensors
        self.wanted: Collective | None = None  # what is to be started next
        self.under_way: Collective | None = None
        self._steps, self._done = steps, done
        self._handle: Handle[Any] | None = None
        self._started_s = 0.0

    def advance(self, groups: World) -> bool:
        """Wait for the collective under way in the caller's thread and start the next; return whether there is one."""
        if self.is_done:
            return False
        with Timed(self.ctx.record, "waiting"):
            result = self.wait()
        self.resume(result)
        if self.wanted is not None:
            self.start(getattr(groups, LEVELS[self.wanted.leg]))
        return not self.is_done

    def resume(self, result: Any) -> None:
        """Go on until the bucket wants the next collective, or everything it received is verified."""
        try:
            wanted = self._steps.send(result)
        except TransportError:
            raise
        except FlexcommError as failure:
            self.end(failure)
            return
        if wanted == VERIFIED:
            self.end()
        else:
            self.wanted = wanted

    def start(self, transport: Transport) -> None:
        wanted = self.wanted
        assert wanted is not None  # noqa: S101  (our own invariant)
        self._started_s = time.perf_counter()
        self._handle = wanted.start(transport)
        self.wanted, self.under_way = None, wanted
        self.ctx.record.count(LEVELS[wanted.leg], wanted.sent_bytes, wanted.received_bytes)

    def wait(self) -> Any:
        """Return the result of the collective under way; None if there is none."""
        if self._handle is None or self.under_way is None:
            return None
        result = self._handle.wait()
        self.ctx.record.add_seconds(LEVELS[self.under_way.leg], time.perf_counter() - self._started_s)
        self.under_way = self._handle = None
        return result

    def end(self, failure: BaseException | None = None) -> None:
        """Have nothing under way any more; if the bucket failed, keep the reason."""
        self.failure, self.is_done = failure, True
        if self._done is not None:
            self._done.set()

    def wait_done(self) -> None:
        if self._done is not None:
            self._done.wait()

    def write_outputs(self) -> None:
        next(self._steps, None)

    def has_arrived(self) -> bool:
        handle = self._handle  # a comm thread may take it away
        return self.is_done or (handle is not None and handle.done())


def can_run_in_background(world: World, device: torch.device) -> bool:
    # On a GPU the model's own thread enqueues everything, in one order with FSDP's collectives.
    return device.type == "cpu" and world.topology.size > 1 and world.can_clone_groups and _may_use_threads(world)


def _may_use_threads(world: World) -> bool:
    return all("mpi" not in transport.name or threads_are_free() for transport in (world.intra, world.inter))


class CommThreads:
    """Threads that drive buckets on process groups that only they use. All ranks of the world make them together.

    A thread waits for its own legs, and starts its own and the next thread's: see [Note: order of collectives].
    ``legs`` are those of each thread, by its name; only the first may have several. After a transport failed, all later
    buckets fail with the same error: ranks no longer agree on which is next. If MPI serves one thread at a time, there
    are none, and :meth:`submit` drives a bucket to its end.
    """

    def __init__(
        self,
        world: World,
        transports: Mapping[Leg, Transport],
        legs: Mapping[str, tuple[Leg, ...]],
        device: torch.device,
    ) -> None:
        self._sequence = 0
        self.transports, self._legs = transports, [*legs.values(), ()]
        self._device, self._stream = device, make_stream(device)
        self._broken: TransportError | None = None
        self._ended = False
        names = legs if _may_use_threads(world) else ()
        self._queues: list[SimpleQueue[BucketTask[Any] | None]] = [SimpleQueue() for _ in names]
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"flexcomm-{name}", daemon=True)
            for number, name in enumerate(names)
        ]
        for thread in self._threads:
            thread.start()
        # A world that is closed with buckets under way lets them arrive: its peers wait for them.
        world.at_close(self.join)
        finalize(world, self._end)
        atexit.register(self.join, _END_S)

    def next_sequence(self) -> int:
        """Return the number of a call, counted on all ranks alike, for headers that carry it."""
        self._sequence += 1
        return self._sequence

    def submit(self, task: BucketTask[Any]) -> None:
        """Have a bucket driven after all those before it, and after what the device's current stream has to do."""
        if self._ended:
            raise TransportError("this world is closed, and sends nothing any more. Connect again, or close it later.")
        task.ready = record_event(self._device)
        if self._threads:
            self._queues[0].put(task)
            return
        for number in range(len(self._legs) - 1):
            self._drive(task, number)

    def order_current_stream(self) -> None:
        """Let the device's current stream wait for what was enqueued for buckets that are done."""
        wait_stream(self._device, self._stream)

    def join(self, timeout_s: float | None = None) -> None:
        """Return when everything under way has arrived; nothing can be submitted afterwards."""
        self._end()
        for thread in self._threads:
            thread.join(timeout_s)

    def _end(self) -> None:
        """Let the threads end after what was submitted; nothing can be submitted any more."""
        atexit.unregister(self.join)
        self._ended = True
        if self._threads:
            self._queues[0].put(None)

    def _run(self, number: int) -> None:
        following = self._queues[number + 1 : number + 2]
        with torch.no_grad():
            while (task := self._queues[number].get()) is not None:
                self._drive(task, number)
                if not task.is_done and following:
                    following[0].put(task)
                # Else the last bucket's tensors would live until the next one comes.
                del task
        for queue in following:
            queue.put(None)

    def _drive(self, task: BucketTask[Any], number: int) -> None:
        """Take a bucket through the legs of a thread, and start the next leg. See [Note: order of collectives]."""
        own, startable = self._legs[number], self._legs[number] + self._legs[number + 1]
        try:
            if self._broken is not None:
                raise self._broken
            with use_stream(self._stream, task.ready):
                if number == 0:
                    task.resume(None)
                while True:
                    if task.wanted is not None and task.wanted.leg in startable:
                        task.start(self.transports[task.wanted.leg])
                    if task.under_way is None or task.under_way.leg not in own:
                        break
                    task.resume(task.wait())
        except TransportError as error:
            self._broken = error
            task.end(error)
        except BaseException as error:  # Whoever waits for the bucket raises it.
            task.end(error)
