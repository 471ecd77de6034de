"""The work of a compressed all-reduce, as torch knows work: to be waited for, asked, or had as a future."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future as ThreadFuture
from datetime import timedelta
from typing import Any

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
    """An all-reduce of host tensors that a thread finishes."""

    def __init__(self, tensors: list[Tensor], submit: Callable[[Callable[[], None]], ThreadFuture[None]]) -> None:
        super().__init__(tensors)
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._submit, self._done = submit, ThreadFuture[None]()

    def start(self, finish: Callable[[], None]) -> None:
        """Have a thread finish it, after those started before."""
        self._done = self._submit(lambda: self._finish(finish))

    def _finish(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except BaseException as error:
            self._future.set_exception(error)
            raise
        self._future.set_result(self._tensors)

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
