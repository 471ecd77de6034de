"""The engine: drives the buckets of all calls of a world, synchronisations and mixes (``flexcomm/gossip``) alike.

A :class:`Driver` drives buckets on one set of process groups: legs that would block a thread of the host by comm
threads, if it has any, all others by the thread of the caller, when a call is started and when it or a later call is
waited for. Collectives start in an order that follows from the order of calls and from nothing else, so any number of
buckets and of calls can be under way at once.

[Note: order of collectives] Ranks must start the collectives of one process group in one order, whatever the timing of
each rank. A synchronisation has one thread and one process group for each leg: every bucket passes through all threads
in the order in which calls were made, also through those of legs it does not have, and one thread alone starts the
collectives on a group: that of the leg before, as soon as a bucket gets there, so that the next bucket's collective is
under way while this one's is waited for. So ``flexcomm-wait-reduce_inside`` starts the first leg, waits for it, encodes
and starts the exchange; ``flexcomm-wait-exchange`` waits for that and starts what is next, and so on. A mix has several
collectives between nodes: one thread drives all legs of a bucket, and then those of the next.

[Note: order on a device] NCCL wants the collectives of all communicators of a device in one order on all ranks, those
of FSDP among them (https://github.com/pytorch/pytorch/issues/131895, https://github.com/NVIDIA/nccl/issues/1766). FSDP
starts its own in the thread that runs the model, so that thread starts ours, too: a comm thread would come between them
at another place on every rank. It does not wait for any of them: kernels and collectives are enqueued on a stream of
the driver's own, up to the first number that the host must read. Where NCCL joins the ranks of a node and MPI the
nodes, comm threads have what lies between the legs inside: they copy payloads to the host, exchange them, copy them
back, and check them.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Generator, Hashable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch

from flexcomm.bootstrap.consistency import explain_timeout
from flexcomm.device import make_stream, order_current_stream, order_stream, record_event, switch_stream
from flexcomm.errors import DeadlineExceededError, FlexcommError, TransportError
from flexcomm.stats import Timed
from flexcomm.sync.algorithms import LEGS, LEVELS, READ, Collective, Leg, Read
from flexcomm.sync.bucket import VERIFIED, Verified
from flexcomm.sync.plan import SyncPlan
from flexcomm.transport import Handle, Transport, enqueues
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

    drivers: dict[Hashable, Driver] = field(default_factory=dict)  # of synchronisations, and by communicator of mixes
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

    def sync_driver(self, world: World, plan: SyncPlan) -> Driver:
        """Return what drives a plan's calls, made on first use; in the background, by all ranks together."""
        key = ("sync", plan.device, plan.in_background)
        if key not in self.drivers:
            groups: tuple[Transport, ...] = (world.intra, world.inter, world.inter, world.intra)
            legs: tuple[Leg, ...] = ()
            if plan.in_background:
                first, second = world.clone_groups(), world.clone_groups()
                groups = (first.intra, first.inter, second.inter, second.intra)
                legs = legs_of_threads(world, plan.device)
            threads = {f"wait-{leg}": (leg,) for leg in legs}
            self.drivers[key] = Driver(world, dict(zip(LEGS, groups, strict=True)), threads, plan.device)
        return self.drivers[key]


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

    def __init__(self, ctx: C, steps: Generator[Collective | Read | Verified, Any, None]) -> None:
        self.ctx = ctx
        self.failure: BaseException | None = None
        self.is_done = False  # what came is verified, or the bucket failed
        self.must_read = False  # a device's memory, next, for which it will wait
        self.wanted: Collective | None = None  # what is to be started next
        self.under_way: Collective | None = None
        self.ready: torch.Event | None = None  # when the device has done all that it was given to do for the bucket
        self.handed_back: threading.Event | None = None  # when comm threads, which it was given to, need it no longer
        self._steps = steps
        self._handle: Handle[Any] | None = None
        self._result: Any = None
        self._started_s = 0.0

    def resume(self, result: Any) -> None:
        """Go on until the bucket wants the next collective, must read, or everything it received is verified."""
        self.must_read = False
        try:
            wanted = self._steps.send(result)
        except TransportError:
            raise
        except FlexcommError as failure:
            self.end(failure)
            return
        if wanted == VERIFIED:
            self.end()
        elif wanted == READ:
            self.must_read = True
        else:
            self.wanted = wanted

    def advance(self, transports: Mapping[Leg, Transport]) -> None:
        """Go on with the result of :meth:`wait`, if the next collective is not known yet, and start that.

        A collective of a leg without a transport is left to somebody else.
        """
        if self.wanted is None:
            result, self._result = self._result, None
            self.resume(result)
        wanted = self.wanted
        if wanted is not None and wanted.leg in transports:
            self._started_s = time.perf_counter()
            self._handle = wanted.start(transports[wanted.leg])
            self.wanted, self.under_way = None, wanted
            self.ctx.record.count(LEVELS[wanted.leg], wanted.sent_bytes, wanted.received_bytes)

    def wait(self) -> None:
        """Wait for the collective under way, if there is one."""
        if self._handle is None or self.under_way is None:
            return
        self._result = self._handle.wait()
        self.ctx.record.add_seconds(LEVELS[self.under_way.leg], time.perf_counter() - self._started_s)
        self.under_way = self._handle = None

    def end(self, failure: BaseException | None = None) -> None:
        """Have nothing under way any more; if the bucket failed, keep the reason."""
        self.failure, self.is_done = failure, True

    def write_outputs(self) -> None:
        next(self._steps, None)

    def has_arrived(self) -> bool:
        if self.is_done or (self.handed_back is not None and self.handed_back.is_set()):
            return True
        if self.must_read:
            return self.ready is None or self.ready.query()
        handle = self._handle  # a comm thread may take it away
        return handle is not None and handle.done()


def legs_of_threads(world: World, device: torch.device) -> tuple[Leg, ...]:
    """Return the legs that comm threads can drive while the caller computes. See [Note: order on a device]."""
    can_have_threads = world.topology.size > 1 and world.can_clone_groups and _may_use_threads(world)
    joining = [transport for transport in (world.intra, world.inter) if transport.size > 1]
    if not can_have_threads or all(enqueues(one, device) for one in joining):
        return ()
    if world.inter in joining and enqueues(world.inter, device):
        return ()  # They would come between NCCL's exchanges.
    return tuple(leg for leg in LEGS if LEVELS[leg] == "inter" or not enqueues(world.intra, device))


def _may_use_threads(world: World) -> bool:
    return all("mpi" not in transport.name or threads_are_free() for transport in (world.intra, world.inter))


class Driver:
    """Drives buckets on process groups that it alone uses, in the order in which they are started.

    Args:
        world: the ranks, all of which make the driver together.
        transports: of each leg.
        legs: those of each comm thread, by the thread's name: none, all, or all that follow each other between nodes.
        device: where the buckets are.

    """

    def __init__(
        self,
        world: World,
        transports: Mapping[Leg, Transport],
        legs: Mapping[str, tuple[Leg, ...]],
        device: torch.device,
    ) -> None:
        self.transports = transports
        self.threads = CommThreads(world, transports, legs, device) if legs else None
        of_threads = {leg for some in legs.values() for leg in some}
        self._own = {leg: transport for leg, transport in transports.items() if leg not in of_threads}
        self._device, self._stream = device, make_stream(device)
        self._streams = [self._stream] if self._stream else []
        if self.threads is not None and self.threads.stream is not None:
            self._streams.append(self.threads.stream)
        self._under_way: deque[list[BucketTask[Any]]] = deque()
        self._finishing = threading.RLock()
        self._sequence = 0
        self.enqueues = enqueues(transports["exchange"], device)
        """Whether the caller's thread enqueues what travels between nodes, without waiting for it."""

    def next_sequence(self) -> int:
        """Return the number of a call, counted on all ranks alike, for headers that carry it."""
        self._sequence += 1
        return self._sequence

    def start(self, tasks: list[BucketTask[Any]]) -> None:
        """Start the buckets of a call: when it returns, all of them are on their way between nodes, or further."""
        after = record_event(self._device) if self._streams else None
        self._forget_done()
        if not self._own and self.threads is not None:
            for task in tasks:
                task.ready = after
                self.threads.submit(task)
            self._under_way.append(tasks)
            return
        before = switch_stream(self._stream, after) if self._stream else None
        try:
            for task in tasks:
                task.advance(self._own)
            for task in tasks:
                # What the host would have to wait for is left, so that the caller may go on computing.
                while (one := task.under_way) is not None and (one.is_short or LEVELS[one.leg] == "intra"):
                    self._wait_and_advance(task)
                if self._streams:
                    self._hand_over(task)
        except BaseException as error:
            self._end_all(tasks, error)
            raise
        finally:
            switch_stream(before)
        self._under_way.append(tasks)

    def finish(self, tasks: list[BucketTask[Any]]) -> None:
        """Return when everything the buckets of a call received is verified, or they failed.

        Those of calls started before are finished first: their collectives must start in one order on all ranks.
        """
        with self._finishing:
            while tasks in self._under_way:
                call = self._under_way[0]
                for task in call:
                    # An interrupt here changes nothing: comm threads go on, and so does who waits again.
                    self._wait_for_threads(task)
                    try:
                        self._go_on(task)
                    except BaseException as error:
                        self._end_all(call, error)
                        if not isinstance(error, Exception):
                            raise
                self._forget_done()
        self.order_current_stream(tasks)

    def order_current_stream(self, tasks: list[BucketTask[Any]]) -> None:
        """Let the device's current stream wait for what was enqueued for these buckets."""
        if self._streams:
            for task in tasks:
                order_current_stream(self._device, task.ready)

    def end_call(self) -> None:
        """Let what is enqueued for later calls wait for what the caller has enqueued: memory may be theirs next."""
        for stream in self._streams:
            order_stream(stream)

    def _wait_for_threads(self, task: BucketTask[Any]) -> None:
        if task.handed_back is not None:
            with Timed(task.ctx.record, "waiting"):
                task.handed_back.wait()
            task.handed_back = None

    def _go_on(self, task: BucketTask[Any]) -> None:
        """Wait for what is under way, and start what is next."""
        if task.is_done:
            return
        before = switch_stream(self._stream, task.ready) if self._stream else None
        try:
            self._wait_and_advance(task)
            if self._streams:
                self._hand_over(task)
        except BaseException:
            task.ready = record_event(self._device)
            raise
        finally:
            switch_stream(before)

    def _end_all(self, tasks: list[BucketTask[Any]], error: BaseException) -> None:
        """End the buckets that no comm thread has: without a transport, or after an interrupt, none goes on."""
        for task in tasks:
            if not task.is_done and task.handed_back is None:
                task.ready = task.ready or record_event(self._device)
                task.end(error)

    def _forget_done(self) -> None:
        """Forget the first calls, as far as they are done, also those whose handles nobody has any more."""
        while self._under_way and all(task.is_done for task in self._under_way[0]):
            self._under_way.popleft()

    def _wait_and_advance(self, task: BucketTask[Any]) -> None:
        with Timed(task.ctx.record, "waiting"):
            task.wait()
            if task.must_read:
                task.advance(self._own)
                return
        task.advance(self._own)

    def _hand_over(self, task: BucketTask[Any]) -> None:
        """Note how far the device must come for others to go on, and give the bucket to comm threads, if it wants."""
        task.ready = record_event(self._device)
        if task.wanted is not None and self.threads is not None:
            self.threads.submit(task)


class CommThreads:
    """Threads that drive buckets on process groups that only they use, in the order in which they are submitted.

    A thread waits for its own legs, and starts its own and the next thread's: see [Note: order of collectives].
    ``legs`` are those of each thread, by its name; only the first may have several. After a transport failed, all later
    buckets fail with the same error: ranks no longer agree on which is next.
    """

    def __init__(
        self,
        world: World,
        transports: Mapping[Leg, Transport],
        legs: Mapping[str, tuple[Leg, ...]],
        device: torch.device,
    ) -> None:
        self._transports, self._legs = transports, [*legs.values(), ()]
        self._device, self.stream = device, make_stream(device)
        self._broken: TransportError | None = None
        self._ended = False
        self._queues: list[SimpleQueue[BucketTask[Any] | None]] = [SimpleQueue() for _ in legs]
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"flexcomm-{name}", daemon=True)
            for number, name in enumerate(legs)
        ]
        for thread in self._threads:
            thread.start()
        # A world that is closed with buckets under way lets them arrive: its peers wait for them.
        world.at_close(self.join)
        finalize(world, self._end)
        atexit.register(self.join, _END_S)

    def submit(self, task: BucketTask[Any]) -> None:
        """Have a bucket driven after all those before it, and after what the device was given to do for it."""
        if self._ended:
            raise TransportError("this world is closed, and sends nothing any more. Connect again, or close it later.")
        task.handed_back = threading.Event()
        self._queues[0].put(task)

    def join(self, timeout_s: float | None = None) -> None:
        """Return when everything under way has arrived; nothing can be submitted afterwards."""
        self._end()
        for thread in self._threads:
            thread.join(timeout_s)

    def _end(self) -> None:
        """Let the threads end after what was submitted; nothing can be submitted any more."""
        atexit.unregister(self.join)
        self._ended = True
        self._queues[0].put(None)

    def _run(self, number: int) -> None:
        following = self._queues[number + 1 : number + 2]
        with torch.no_grad():
            while (task := self._queues[number].get()) is not None:
                handed_back = task.handed_back
                self._drive(task, number)
                if not task.is_done and following:
                    following[0].put(task)
                elif handed_back is not None:
                    handed_back.set()
                # Else the last bucket's tensors would live until the next one comes.
                del task
        for queue in following:
            queue.put(None)

    def _drive(self, task: BucketTask[Any], number: int) -> None:
        """Take a bucket through the legs of a thread, and start the next leg. See [Note: order of collectives]."""
        own, following = self._legs[number], self._legs[number + 1]
        startable = {leg: self._transports[leg] for leg in (*own, *following)}
        before = None
        try:
            if self._broken is not None:
                raise self._broken
            before = switch_stream(self.stream, task.ready)
            while not task.is_done:
                if task.under_way is not None:
                    if task.under_way.leg not in own:
                        break
                    task.wait()
                elif task.wanted is not None and task.wanted.leg not in startable:
                    break
                task.advance(startable)
            task.ready = record_event(self._device)
        except TransportError as error:
            self._broken = error
            task.end(error)
        except BaseException as error:  # Whoever waits for the bucket raises it.
            task.end(error)
        finally:
            switch_stream(before)
