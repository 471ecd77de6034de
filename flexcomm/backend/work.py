"""The work of a compressed all-reduce, as torch knows work: to be waited for, asked, or had as a future."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future as ThreadFuture
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from flexcomm.errors import DeadlineExceededError
from flexcomm.torch_private import BaseWork


class FinishedWork(BaseWork):
    """An all-reduce that is done when it is returned, as far as the host is concerned."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        devices: list[Any] = sorted({x.device for x in self._tensors if x.device.type != "cpu"}, key=str)
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        future.set_result(self._tensors)
        return future


class PendingWork(FinishedWork):
    """An all-reduce of host tensors that a thread finishes.

    Another thread completes the future: what is called then may wait for all-reduces that were started later.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__(tensors)
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._done = ThreadFuture[None]()

    def finish(self, finish: Callable[[], None], completing: WorkThread) -> None:
        """Finish it, in this thread, and have its future completed."""
        try:
            finish()
        except BaseException as error:
            self._done.set_exception(error)
            completing.submit(partial(self._future.set_exception, error))
        else:
            self._done.set_result(None)
            completing.submit(partial(self._future.set_result, self._tensors))

    def wait(self, timeout: timedelta | None = None) -> bool:
        # A timeout of 0 is torch's word for the group's own.
        limit_s = timeout.total_seconds() if timeout else None
        try:
            self._done.result(limit_s)
        except TimeoutError as error:
            if self._done.done():
                raise
            raise DeadlineExceededError(f"a compressed all-reduce was not done after {limit_s:g} s.") from error
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def is_success(self) -> bool:
        return self._done.done() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        return self._done.exception() if self._done.done() else None

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class WorkThread:
    """A thread that does what it is given, in order. It ends with whoever has it, and keeps no process alive."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=self._run, args=(self._queue,), name=f"flexcomm-{name}", daemon=True).start()
        finalize(self, self._queue.put, None)

    def submit(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    @staticmethod
    def _run(queue: SimpleQueue[Callable[[], object] | None]) -> None:
        while (work := queue.get()) is not None:
            work()
            del work  # Else what it holds would live until the next comes.
