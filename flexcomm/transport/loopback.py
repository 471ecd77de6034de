"""The transport of a group of one rank: outputs are copies of inputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexcomm.transport.base import Finished
from flexcomm.transport.staging import BufferTransport


class LoopbackTransport(BufferTransport):
    """A transport of one rank."""

    name = "loopback"

    def __init__(self, timeout_s: float = 300.0) -> None:
        super().__init__(rank=0, size=1, timeout_s=timeout_s)

    def _reaches(self, x: Tensor, *, summed: bool) -> bool:
        del x, summed
        return True

    def _start_all_gather(self, source: Tensor, buffer: Tensor) -> Finished:
        buffer.copy_(source)
        return Finished()

    def _start_all_gatherv(self, source: Tensor, buffer: Tensor, counts: Sequence[int]) -> Finished:
        del counts
        buffer.copy_(source)
        return Finished()

    def _start_all_reduce(self, buffer: Tensor) -> Finished:
        del buffer
        return Finished()

    def _start_reduce_scatter(self, source: Tensor, buffer: Tensor) -> Finished:
        buffer.copy_(source)
        return Finished()

    def _start_broadcast(self, buffer: Tensor, root: int) -> Finished:
        del buffer, root
        return Finished()

    def _start_send_recv(
        self, sources: Sequence[tuple[int, Tensor]], buffers: Sequence[tuple[int, Tensor]]
    ) -> Finished:
        del sources, buffers  # Both empty: what this rank sends itself has been copied.
        return Finished()

    def _start_barrier(self) -> Finished:
        return Finished()
