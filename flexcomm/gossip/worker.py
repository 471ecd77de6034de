"""The comm thread: drives the mixes of one communicator while the caller computes.

A mix is several collectives, each of which needs the result of the one before, so somebody must start the second while
the caller is busy. A thread runs mixes in the order in which they were submitted, on process groups of its own: all
ranks start these collectives in one order, whatever else they do.
"""

from __future__ import annotations

import atexit
import threading
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from flexcomm.device import make_stream, record_event, use_stream, wait_stream
from flexcomm.errors import TransportError
from flexcomm.transport.mpi_progress import threads_are_free

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from flexcomm.world import World

__all__ = ["CommThread", "comm_thread_of"]

T = TypeVar("T")

_EXIT_TIMEOUT_S = 1.0
"""Longest wait of an exiting interpreter for a mix that hangs."""


class CommThread:
    """Process groups cloned from a world's, and the thread that runs mixes on them.

    After a transport failed, all later mixes fail with the same error: ranks no longer agree on which one is next.
    """

    def __init__(self, world: World) -> None:
        self.groups = world.clone_groups()
        self.sequence = 0
        self._device = world.device
        self._may_overlap = all("mpi" not in group.name or threads_are_free() for group in (world.intra, world.inter))
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._failure: TransportError | None = None
        self._closed = False
        self._stream = make_stream(world.device)
        self._thread = threading.Thread(target=self._run, name="flexcomm-mixing", daemon=True)
        self._thread.start()
        # A world that is closed with mixes under way finishes them first: peers wait for its messages.
        world.at_close(self._close)
        atexit.register(self._exit)

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Queue a task behind those submitted before; on CUDA, also behind the work queued on the current stream.

        If this MPI serves one thread at a time, return only when the task is done.
        """
        if self._closed:
            raise TransportError("mixing on a world that is closed. Connect again, or close it later.")
        future: Future[T] = Future()
        ready = record_event(self._device)
        self._queue.put((future, lambda: self._run_task(task, ready)))
        if not self._may_overlap:
            wait([future])
        return future

    def order_current_stream(self) -> None:
        """Make the current CUDA stream wait for the work that finished tasks queued on the thread's stream."""
        wait_stream(self._device, self._stream)

    def _run_task(self, task: Callable[[], T], ready: torch.Event | None) -> T:
        if self._failure is not None:
            raise self._failure
        try:
            with use_stream(self._stream, ready):
                return task()
        except TransportError as error:
            self._failure = error
            raise

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            future, run = job
            try:
                future.set_result(run())
            except BaseException as error:  # Raised again by future.result().
                future.set_exception(error)
            # Otherwise the tensors of the last task would live until the next one comes.
            del job, future, run

    def _close(self) -> None:
        atexit.unregister(self._exit)
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _exit(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=_EXIT_TIMEOUT_S)


_threads: WeakKeyDictionary[World, dict[str, CommThread]] = WeakKeyDictionary()


def comm_thread_of(world: World, communicator: str) -> CommThread:
    """Return the thread of a communicator, made on first use: all ranks make it together, because it clones groups.

    Ranks submit the tasks of one communicator in the same order. Those of different ones need no common order.
    """
    threads = _threads.setdefault(world, {})
    if communicator not in threads:
        threads[communicator] = CommThread(world)
    return threads[communicator]
