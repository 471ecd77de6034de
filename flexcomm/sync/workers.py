"""Comm threads: drive buckets while the caller computes.

[Note: order of collectives] Ranks must start the collectives of one process group in one order, whatever the timing of
each rank. A synchronisation has one thread and one process group for each leg: every bucket passes through all threads
in the order in which calls were made, also through those of legs it does not have, and only one thread starts
collectives on a group: that of the leg before, as soon as a bucket gets there, so that the next bucket's collective is
under way while this one's is waited for. The first thread starts the first two legs. So a thread is
named after the leg it waits for, and starts the next one. A mix has several collectives
between nodes: one thread drives all legs of a bucket, and then those of the next.
"""

from __future__ import annotations

import atexit
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch

from flexcomm.device import make_stream, record_event, use_stream, wait_stream
from flexcomm.errors import TransportError
from flexcomm.transport.mpi import threads_are_free

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flexcomm.sync.algorithms import Leg
    from flexcomm.sync.engine import BucketTask
    from flexcomm.transport import Transport
    from flexcomm.world import World

    Task = BucketTask[Any]

_END_S = 1.0
"""How long an interpreter that ends waits for a collective that does not."""


def can_run_in_background(world: World, device: torch.device) -> bool:
    """Return whether comm threads can drive the buckets of this world's tensors on that device.

    On a GPU the model's own thread enqueues everything, in one order with FSDP's collectives.
    """
    return device.type == "cpu" and world.topology.size > 1 and world.can_clone_groups and _may_use_threads(world)


def _may_use_threads(world: World) -> bool:
    return all("mpi" not in transport.name or threads_are_free() for transport in (world.intra, world.inter))


class CommThreads:
    """Threads that drive buckets on process groups that only they use. All ranks of the world make them together.

    After a transport failed, all later buckets fail with the same error: ranks no longer agree on which is next.

    Args:
        world: the ranks; if their MPI serves one thread at a time, :meth:`submit` drives a bucket to its end instead.
        transports: the cloned groups, by leg.
        legs: the legs that each thread drives, by its name. Only the first thread may have several.
        device: whose tensors are sent; if it has streams, the threads use one of their own.

    """

    def __init__(
        self,
        world: World,
        transports: Mapping[Leg, Transport],
        legs: Mapping[str, tuple[Leg, ...]],
        device: torch.device,
    ) -> None:
        self._sequence = 0
        self.transports, self._legs = transports, list(legs.values())
        self._device, self._stream = device, make_stream(device)
        self._broken: TransportError | None = None
        self._ended = False
        names = legs if _may_use_threads(world) else ()
        self._queues: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in names]
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"flexcomm-{name}", daemon=True)
            for number, name in enumerate(names)
        ]
        for thread in self._threads:
            thread.start()
        # A world that is closed with buckets under way lets them arrive: its peers wait for them.
        world.at_close(self.join)
        finalize(world, self._end)
        atexit.register(self._stop)

    def next_sequence(self) -> int:
        """Return the number of a call, counted on all ranks alike, for callers whose headers carry it."""
        self._sequence += 1
        return self._sequence

    def submit(self, task: Task) -> None:
        """Have a bucket driven after all those before it, and after what the device's current stream has to do.

        Raises:
            TransportError: the world is closed, and the threads have ended.

        """
        if self._ended:
            raise TransportError("this world is closed, and sends nothing any more. Connect again, or close it later.")
        task.ready = record_event(self._device)
        if self._threads:
            self._queues[0].put(task)
            return
        for number in range(len(self._legs)):
            self._drive(task, number)

    def order_current_stream(self) -> None:
        """Let the device's current stream wait for what was enqueued for buckets that are done."""
        wait_stream(self._device, self._stream)

    def join(self) -> None:
        """Return when everything under way has arrived; nothing can be submitted afterwards."""
        self._end()
        for thread in self._threads:
            thread.join()

    def _end(self) -> None:
        """Let the threads end after what was submitted; nothing can be submitted any more."""
        atexit.unregister(self._stop)
        self._ended = True
        if self._threads:
            self._queues[0].put(None)

    def _stop(self) -> None:
        self._end()
        for thread in self._threads:
            thread.join(timeout=_END_S)

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

    def _drive(self, task: Task, number: int) -> None:
        """Take a bucket through the legs of a thread, and start the next leg. See [Note: order of collectives]."""
        try:
            if self._broken is not None:
                raise self._broken
            with use_stream(self._stream, task.ready):
                if number == 0:
                    task.resume(None)
                    self._start(task, number)
                while task.is_under_way(self._legs[number]):
                    task.resume(task.wait())
                    self._start(task, number)
                if number + 1 < len(self._legs):
                    self._start(task, number + 1)
        except TransportError as error:
            self._broken = error
            task.fail(error)
        except BaseException as error:  # Whoever waits for the bucket raises it.
            task.fail(error)

    def _start(self, task: Task, number: int) -> None:
        """Start the collective that the bucket wants, if it is one of these legs."""
        if (leg := task.wanted_leg) in self._legs[number]:
            task.start(self.transports[leg])
