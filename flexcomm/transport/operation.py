"""A started collective: the backend's request, the buffers it uses, and how its result is handed over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

from flexcomm.errors import DeadlineExceededError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Expired", "Finished", "Operation", "Request"]

T = TypeVar("T")


class Expired(Exception):  # noqa: N818  (a signal between a request and its operation; users see DeadlineExceededError)
    """A request did not finish within the time it was given."""


class Request(Protocol):
    """A backend's own token of work under way."""

    def wait(self, timeout_s: float) -> None:
        """Return when the work is done; raise ``Expired`` after ``timeout_s``, or an error of this library."""
        ...

    def done(self) -> bool: ...


class Finished:
    """The request of work that was done when it started."""

    def wait(self, timeout_s: float) -> None: ...

    def done(self) -> bool:
        return True


# A backend may write into the buffers of an operation nobody waits for any longer, so they stay alive here until it is
# done. For one that never gets done that is a leak, in a job about to end, against silent memory corruption.
_abandoned: list[tuple[Request, object]] = []


def keep_until_done(request: Request, buffers: object) -> None:
    _abandoned[:] = [(other, kept) for other, kept in _abandoned if not other.done()]
    _abandoned.append((request, buffers))


class Operation(Generic[T]):
    """The handle every transport returns. ``keep`` holds what the backend reads and writes."""

    def __init__(
        self, what: str, request: Request, deliver: Callable[[], T], *, timeout_s: float, keep: object = None
    ) -> None:
        self._what = what
        self._request = request
        self._deliver: Callable[[], T] | None = deliver
        self._timeout_s = timeout_s
        self._keep = keep
        self._started_s = time.monotonic()
        self._result: T | None = None

    def wait(self) -> T:
        if self._deliver is not None:
            try:
                self._request.wait(self._timeout_s)
            except BaseException as error:
                keep_until_done(self._request, self._keep)
                if isinstance(error, Expired):
                    raise self._deadline_error() from error.__cause__
                raise
            self._result = self._deliver()
            self._deliver = None
            self._keep = None
        return cast("T", self._result)  # set above, and `None` is the result of a barrier

    def done(self) -> bool:
        return self._deliver is None or self._request.done()

    def __del__(self) -> None:
        if self._deliver is not None and not self._request.done():
            keep_until_done(self._request, self._keep)

    def _deadline_error(self) -> DeadlineExceededError:
        since_start_s = time.monotonic() - self._started_s
        return DeadlineExceededError(
            f"{self._what} did not finish: waited {self._timeout_s:g} s, {since_start_s:.1f} s after it was started. A "
            f"rank is slow, stopped, or in another call; its own output tells which. If the wait is expected, pass a "
            f"larger timeout_s to flexcomm.connect."
        )
