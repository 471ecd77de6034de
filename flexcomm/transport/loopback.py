"""The transport of a group of one: everything arrives because it is already here."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from flexcomm.errors import InvalidTensorError
from flexcomm.transport.operation import Finished, Operation
from flexcomm.transport.staging import (
    check_counts,
    check_peer,
    check_plain,
    check_reducible,
    check_writable,
    gather_output,
    gatherv_output,
    scatter_output,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["LoopbackTransport"]

T = TypeVar("T")


class LoopbackTransport:
    """A transport of one rank."""

    name = "loopback"
    rank = 0
    size = 1

    def __init__(self, timeout_s: float = 300.0) -> None:
        self.timeout_s = timeout_s

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        check_plain(x)
        out = gather_output(x, out, self.size)
        check_writable(out)
        out.detach()[0].copy_(x.detach())
        return self._finished(out)

    def all_gatherv(self, x: Tensor, counts: Sequence[int], out: Tensor | None = None) -> Operation[tuple[Tensor, ...]]:
        check_plain(x)
        check_counts(x, counts, self.rank, self.size)
        out = gatherv_output(x, counts, out)
        check_writable(out)
        out.detach().copy_(x.detach().reshape(-1))
        return self._finished((out,))

    def all_reduce(self, x: Tensor) -> Operation[Tensor]:
        check_writable(x)
        check_reducible(x)
        return self._finished(x)

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        check_plain(x)
        check_reducible(x)
        out = scatter_output(x, out, self.size)
        check_writable(out)
        out.detach().copy_(x.detach()[0])
        return self._finished(out)

    def broadcast(self, x: Tensor, root: int = 0) -> Operation[Tensor]:
        check_writable(x)
        check_peer(root, self.size)
        return self._finished(x)

    def send_recv(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Operation[tuple[Tensor, ...]]:
        return self._finished(copy_to_self(sends, receives, self.rank, self.size))

    def barrier(self) -> Operation[None]:
        return self._finished(None)

    def _finished(self, result: T) -> Operation[T]:
        return Operation("loopback", Finished(), lambda: result, timeout_s=self.timeout_s)


def copy_to_self(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], rank: int, size: int
) -> tuple[Tensor, ...]:
    """Fill what ``rank`` receives from itself, and return all that is received, in order."""
    for peer, x in sends:
        check_peer(peer, size)
        check_plain(x)
    for peer, x in receives:
        check_peer(peer, size)
        check_writable(x)
    own_sends = [x for peer, x in sends if peer == rank]
    own_receives = [x for peer, x in receives if peer == rank]
    if [(x.dtype, x.numel()) for x in own_sends] != [(x.dtype, x.numel()) for x in own_receives]:
        raise InvalidTensorError(
            f"rank {rank} sends itself {[list(x.shape) for x in own_sends]} and receives "
            f"{[list(x.shape) for x in own_receives]}: messages to oneself must match in number, dtype and size."
        )
    for sent, received in zip(own_sends, own_receives, strict=True):
        received.detach().copy_(sent.detach().reshape(received.shape))
    return tuple(x for _, x in receives)
