"""What a cable must be able to do, and what it hands back while it does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Handle", "Transport"]

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
    """A group of ranks joined by one kind of cable.

    Every verb starts at once and returns a handle. All ranks of the group call the same verbs in the same order with
    equal shapes and dtypes; ``World.agree`` makes sure of that beforehand, because no backend does (unequal sizes
    corrupt memory or abort the process). ``rank`` and every peer are numbers inside the group. Inputs must not change,
    and outputs must not be read, before ``wait()`` returns.

    Tensors may be of any strided layout, of any dtype that torch can view as bytes, on any device and empty; verbs that
    add take float64, float32, bfloat16, float16, int64, int32, int8 and uint8.
    """

    @property
    def name(self) -> str:
        """The kind of cable, for people."""
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
