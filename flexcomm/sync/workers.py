"""Comm threads: drive buckets while the caller computes, one thread for each leg.

[Note: order of collectives] Ranks must start the collectives of one process group in one order, whatever the timing of
each rank. So every leg has a process group of its own, every bucket passes through all threads in the order in which
calls were made, also through those of legs it does not have, and only one thread starts collectives on a group: that of
the leg before, as soon as a bucket gets there, so that the next bucket's collective is under way while this one's is
waited for. The first thread starts the first two legs.
"""

from __future__ import annotations

import atexit
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING
from weakref import finalize

import torch

from flexcomm.errors import TransportError
from flexcomm.sync.algorithms import LEGS
from flexcomm.transport.mpi_progress import threads_are_free

if TYPE_CHECKING:
    from flexcomm.sync.algorithms import Leg
    from flexcomm.sync.engine import BucketTask
    from flexcomm.transport import Transport
    from flexcomm.world import World

__all__ = ["LegThreads", "can_run_in_background"]

_END_S = 1.0
"""How long an interpreter that ends waits for a collective that does not."""


def can_run_in_background(world: World, device: torch.device) -> bool:
    """Return whether comm threads can drive the buckets of this world's tensors on that device.

    On a GPU the model's own thread enqueues everything, in one order with FSDP's collectives.
    """
    if device.type != "cpu" or world.topology.size == 1 or not world.can_clone_groups:
        return False
    return all("mpi" not in transport.name or threads_are_free() for transport in (world.intra, world.inter))


class LegThreads:
    """One thread and one process group for each leg. All ranks of the world make it together.

    After a transport failed, all later buckets fail with the same error: ranks no longer agree on which is next.
    """

    def __init__(self, world: World) -> None:
        first, second = world.clone_groups(), world.clone_groups()
        self.transports: dict[Leg, Transport] = {
            "reduce_inside": first.intra,
            "exchange": first.inter,
            "second_exchange": second.inter,
            "gather_inside": second.intra,
        }
        self._broken: TransportError | None = None
        self._ended = False
        self._queues: list[SimpleQueue[BucketTask | None]] = [SimpleQueue() for _ in LEGS]
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"flexcomm-{leg}", daemon=True)
            for number, leg in enumerate(LEGS)
        ]
        for thread in self._threads:
            thread.start()
        # A world that is closed with buckets under way lets them arrive: its peers wait for them.
        world.at_close(self.join)
        finalize(world, self._end)
        atexit.register(self._stop)

    def submit(self, task: BucketTask) -> None:
        """Have a bucket driven after all those before it.

        Raises:
            TransportError: the world is closed, and the threads have ended.

        """
        if self._ended:
            raise TransportError("a synchronisation on a world that is closed. Connect again, or close it later.")
        self._queues[0].put(task)

    def join(self) -> None:
        """Return when everything under way has arrived; nothing can be submitted afterwards."""
        self._end()
        for thread in self._threads:
            thread.join()

    def _end(self) -> None:
        """Let the threads end after what was submitted; nothing can be submitted any more."""
        atexit.unregister(self._stop)
        self._ended = True
        self._queues[0].put(None)

    def _stop(self) -> None:
        self._end()
        for thread in self._threads:
            thread.join(timeout=_END_S)

    def _run(self, number: int) -> None:
        with torch.no_grad():
            while (task := self._queues[number].get()) is not None:
                self._drive(task, number)
                if not task.is_done and number + 1 < len(LEGS):
                    self._queues[number + 1].put(task)
                # Else the last bucket's tensors would live until the next one comes.
                del task
        if number + 1 < len(LEGS):
            self._queues[number + 1].put(None)

    def _drive(self, task: BucketTask, number: int) -> None:
        """Take a bucket through leg ``number``, and start the leg after it. See [Note: order of collectives]."""
        try:
            if self._broken is not None:
                raise self._broken
            if number == 0:
                task.resume(None)
                if task.wants(LEGS[0]):
                    task.start(self.transports[LEGS[0]])
            if task.is_under_way(LEGS[number]):
                task.resume(task.wait())
            if number + 1 < len(LEGS) and task.wants(LEGS[number + 1]):
                task.start(self.transports[LEGS[number + 1]])
        except TransportError as error:
            self._broken = error
            task.fail(error)
        except BaseException as error:  # Whoever waits for the bucket raises it.
            task.fail(error)
