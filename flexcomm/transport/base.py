"""The Protocol of a transport, and the handles its collectives return."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from flexcomm.errors import DeadlineExceededError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Messages = Sequence[tuple[int, Tensor]]  # each a peer, and what is sent to it or received from it


class Handle(Protocol[T_co]):
    """A collective under way. It keeps the buffers alive, even if nobody waits and even after a missed deadline."""

    def wait(self) -> T_co:
        """Return the result once it is there; calling again returns it again.

        Raises ``DeadlineExceededError`` when this call has blocked for the transport's ``timeout_s``, and
        ``PeerLostError`` when a rank is found gone. What the result tensors then hold is undefined.
        """
        ...

    def done(self) -> bool:
        """Whether ``wait()`` would return without blocking."""
        ...


class Transport(Protocol):
    """A group of ranks over one backend. :func:`flexcomm.connect` takes one of your own for either leg.

    Every verb starts at once and returns a handle. All ranks of the group call the same verbs in the same order with
    equal shapes and dtypes; the library makes sure of that beforehand, because no backend does. ``rank`` and every peer
    are numbers inside the group. Inputs must not change, and outputs must not be read, before ``wait()`` returns.

    One of your own may also have a method ``clone()``, which all its ranks call together: it returns a second transport
    on the same ranks, whose collectives do not order those of the first. :meth:`World.clone_groups` needs it. And a
    method ``enqueues(device)``, which returns whether its work on that device's tensors is given to the current stream
    there, as NCCL's is: then ``wait()`` orders the current stream after it instead of blocking, and the thread that
    runs the model starts it, never another.

    Tensors may be of any strided layout, of any dtype that torch can view as bytes, on any device and empty; verbs that
    add take float64, float32, bfloat16, float16, int64, int32, int8 and uint8.
    """

    @property
    def name(self) -> str:
        """The name of the backend, for people; equal on all ranks, and with ``mpi`` in it over MPI."""
        ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def timeout_s(self) -> float: ...

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Handle[Tensor]:
        """``out[r]`` is rank r's ``x``; ``out`` is ``[size, *x.shape]``."""
        ...

    def all_gatherv(self, x: Tensor, counts: Sequence[int], out: Tensor | None = None) -> Handle[tuple[Tensor, ...]]:
        """Element r of the result is rank r's ``x``, flat, of ``counts[r]`` elements, a view into ``out``.

        All ranks pass the same ``counts``. ``out`` is ``[sum(counts)]``.
        """
        ...

    def all_reduce(self, x: Tensor) -> Handle[Tensor]:
        """``x`` becomes the sum of every rank's ``x``, the same bits on all ranks."""
        ...

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Handle[Tensor]:
        """``out`` is the sum of every rank's ``x[rank]``; ``x`` is ``[size, *out.shape]``."""
        ...

    def broadcast(self, x: Tensor, root: int = 0) -> Handle[Tensor]:
        """``x`` becomes the root's ``x``."""
        ...

    def send_recv(self, sends: Messages, receives: Messages) -> Handle[tuple[Tensor, ...]]:
        """Every ``(peer, tensor)`` of ``sends`` has left, every one of ``receives`` is filled.

        Between two ranks, messages match in order. Peers may be this rank itself, or repeat.
        """
        ...

    def barrier(self) -> Handle[None]:
        """Every rank has started this barrier."""
        ...


def enqueues(transport: Transport, device: torch.device) -> bool:
    """Return whether a transport's work on this device's tensors is enqueued there, and blocks no thread."""
    ask = getattr(transport, "enqueues", None)
    return ask is not None and bool(ask(device))


def describe_transport(transport: Transport) -> str:
    return f"{type(transport).__name__}({transport.name!r})"


class Expired(Exception):  # noqa: N818  (a signal between a request and its operation; users see DeadlineExceededError)
    """A request did not finish within the time it was given."""


class Request(Protocol):
    """Work that a backend was given, as the backend knows it."""

    def wait(self, timeout_s: float) -> None:
        """Return when the work is done; raise ``Expired`` after ``timeout_s``, or an error of this library."""
        ...

    def done(self) -> bool: ...


class Finished:
    """The request of work that was done when it started."""

    def wait(self, timeout_s: float) -> None: ...

    def done(self) -> bool:
        return True


class Operation(Generic[T]):
    """The handle that the library's own transports return.

    ``deliver`` returns the result, once the work of ``request`` is done. ``holds`` are the backend's buffers.
    """

    def __init__(
        self, verb: str, transport: Transport, request: Request, deliver: Callable[[], T], holds: object = None
    ) -> None:
        self._verb, self._transport, self._request, self._holds = verb, transport, request, holds
        self._deliver: Callable[[], T] | None = deliver
        self._result: T | None = None
        self._started_s = time.monotonic()

    def wait(self) -> T:
        if self._deliver is not None:
            timeout_s = self._transport.timeout_s
            try:
                self._request.wait(timeout_s)
            except BaseException as error:
                hold_until_done(self._request, self._holds)
                if isinstance(error, Expired):
                    raise DeadlineExceededError(
                        f"{self._verb} over {self._transport} did not finish: waited {timeout_s:g} s, "
                        f"{time.monotonic() - self._started_s:.1f} s after it was started. A rank is slow, stopped, or "
                        f"in another call; its own output tells which. Or pass a larger timeout_s to flexcomm.connect."
                    ) from error.__cause__
                raise
            self._result = self._deliver()
            self._deliver = self._holds = None
        return self._result  # type: ignore[return-value]  # set above, and `None` is the result of a barrier

    def done(self) -> bool:
        return self._deliver is None or self._request.done()

    def __del__(self) -> None:
        if self._deliver is not None and not self._request.done():
            hold_until_done(self._request, self._holds)


# A backend may write into the buffers of an operation nobody waits for any longer, so they stay alive here until it is
# done. For one that never gets done that is a leak, in a job about to end, against silent memory corruption.
_not_waited_for: list[tuple[Request, object]] = []


def hold_until_done(request: Request, buffers: object) -> None:
    _not_waited_for[:] = [(other, held) for other, held in _not_waited_for if not other.done()]
    _not_waited_for.append((request, buffers))
