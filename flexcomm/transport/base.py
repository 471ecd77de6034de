"""The Protocol of a transport, and of the handles it returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from flexcomm.errors import InvalidArgumentError, TransportUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Handle", "Transport", "check_can_clone", "check_has_verbs", "describe_transport"]

T_co = TypeVar("T_co", covariant=True)


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
    equal shapes and dtypes; ``World.agree`` makes sure of that beforehand, because no backend does (unequal sizes
    corrupt memory or abort the process). ``rank`` and every peer are numbers inside the group. Inputs must not change,
    and outputs must not be read, before ``wait()`` returns.

    One of your own may also have a method ``clone()``, which all its ranks call together: it returns a second transport
    on the same ranks, whose collectives do not order those of the first. :meth:`World.clone_groups` needs it.

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

        Everybody knows all ``counts``. ``out`` is ``[sum(counts)]``.
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

    def send_recv(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Handle[tuple[Tensor, ...]]:
        """Every ``(peer, tensor)`` of ``sends`` has left, every one of ``receives`` is filled.

        Between two ranks, messages match in order. Peers may be this rank itself, or repeat.
        """
        ...

    def barrier(self) -> Handle[None]:
        """Every rank has started this barrier."""
        ...


_VERBS = ("all_gather", "all_gatherv", "all_reduce", "reduce_scatter", "broadcast", "send_recv", "barrier")
_PROPERTIES = ("name", "rank", "size", "timeout_s")


def check_has_verbs(leg: str, transport: object) -> None:
    """Raise unless an object that was passed for a leg has what :class:`Transport` has."""
    missing = [name for name in _PROPERTIES if not hasattr(transport, name)]
    missing += [verb for verb in _VERBS if not callable(getattr(transport, verb, None))]
    if missing:
        raise InvalidArgumentError(
            f"{leg}={transport!r} is neither the name of a transport nor a transport: it has no {', '.join(missing)}. "
            f"See flexcomm.Transport, and hold yours to flexcomm.testing.check_transport."
        )


def describe_transport(transport: Transport) -> str:
    """Return the type and the name of a transport."""
    return f"{type(transport).__name__}({transport.name!r})"


def check_can_clone(leg: str, transport: Transport) -> None:
    """Raise unless a transport that is not the library's own has a ``clone()``."""
    if not hasattr(transport, "clone"):
        raise TransportUnavailableError(
            f"clone_groups() needs a second group of the same ranks, which {describe_transport(transport)}, passed as "
            f"{leg}, cannot make. Give it a method clone() that returns another transport on the same ranks, with the "
            f"same rank and size, whose collectives are independent of the first one's; all ranks call it together."
        )
