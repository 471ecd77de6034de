"""Comm threads of the library as hosts of their own: what one waited for, others know once they were handed it."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import flexcomm.sync.engine
from tests.stand_in.collective_order import COMM_THREAD


def watch_threads(native: Any) -> None:
    """Watch what is handed from thread to thread, in this process, from now on."""
    run = threading.Thread.run

    def run_as_host(thread: threading.Thread) -> None:
        if not thread.name.startswith(COMM_THREAD):
            run(thread)
            return
        native.enter_as_host()
        try:
            run(thread)
        finally:
            native.leave_as_host()

    class WatchedQueue:
        """A queue that hands over what is known to be done with each item."""

        def __init__(self) -> None:
            self._items: SimpleQueue[tuple[list[int], Any]] = SimpleQueue()

        def put(self, item: Any) -> None:
            self._items.put((native.host_clock(), item))

        def get(self) -> Any:
            known, item = self._items.get()
            native.tell_host(known)
            return item

    class WatchedEvent(threading.Event):
        """An event that tells who waits for it what was known when it was set."""

        _known: list[int] | None = None

        def set(self) -> None:
            self._known = native.host_clock()
            super().set()

        def wait(self, timeout: float | None = None) -> bool:
            is_set = super().wait(timeout)
            if self._known is not None:
                native.tell_host(self._known)
            return is_set

    threading.Thread.run = run_as_host  # type: ignore[method-assign]
    threading.Event = WatchedEvent  # type: ignore[misc]
    flexcomm.sync.engine.SimpleQueue = WatchedQueue  # type: ignore[misc,assignment]
