"""A transport over MPI, through mpi4py's buffer calls.

Host memory is handed to MPI as it is. Device memory too where the MPI is CUDA-aware, else through pinned host memory;
MPI knows no streams, so the current one is synchronised first either way. bfloat16 and float16, which MPI has no word
for, are summed by an operation of our own.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, TypeVar

import torch

from flexcomm.device import synchronize_stream
from flexcomm.errors import InvalidTensorError, TransportError
from flexcomm.transport.gpu_aware import mpi_is_gpu_aware
from flexcomm.transport.loopback import copy_to_self
from flexcomm.transport.mpi_progress import start_request
from flexcomm.transport.operation import Operation, Request
from flexcomm.transport.staging import (
    as_bytes,
    check_counts,
    check_peer,
    check_reducible,
    deliver_all,
    gather_output,
    gatherv_output,
    readable,
    readable_apart,
    scatter_output,
    staging_buffer,
    staging_buffer_filled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpi4py import MPI
    from mpi4py.typing import Buffer
    from torch import Tensor

__all__ = ["MPITransport"]

T = TypeVar("T")
BufferSpec = tuple["MPI.buffer", int, "MPI.Datatype"]

LARGEST_COUNT = 2**31 - 1
"""An MPI before version 4 counts in C ints."""


_PAIR = 2
_ALIGNED = 8
_SHORTEST_IN_A_RING = 1 << 16
"""Bytes from which a gather among more than two goes round in a ring: links carry one message each way at a time. Open
MPI's own gather of 4 MB among four nodes used 57 % of links of 100 Mbit/s, where a ring uses 85 %."""
_MOST_RINGS = 1 << 13
"""Rings that may be under way before one has the tags of another; MPI promises tags up to 2**15 - 1, 0 is taken."""


class MPITransport:
    """The ranks of a communicator that nobody else uses."""

    name = "mpi"

    def __init__(self, comm: MPI.Comm, timeout_s: float) -> None:
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.timeout_s = timeout_s
        self._comm = comm
        self._closed = False
        self._rings_so_far = 0

    def __str__(self) -> str:
        return f"mpi on rank {self.rank} of {self.size}"

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        out = gather_output(x, out, self.size)
        place = staging_buffer(out, in_reach=reaches(out))
        source = readable_apart(x, place, in_reach=reaches(x))
        if self.size > _PAIR and source.nbytes >= _SHORTEST_IN_A_RING:
            work = self._start_chains(self._rings(source, place.buffer), x, out)
        else:
            work = self._start(
                lambda: self._comm.Iallgather(moved(source), moved(place.buffer, parts=self.size)), x, out
            )
        return self._operation("all_gather", work, place.deliver, keep=(source, place))

    def _rings(self, source: Tensor, buffer: Tensor) -> list[Iterator[list[MPI.Request]]]:
        """Two rings, one for each half of what is gathered: while one goes on to its next turn, the other sends."""
        rows = as_bytes(buffer).view(self.size, -1)
        rows[self.rank] = as_bytes(source)
        middle = rows.shape[1] // (2 * _ALIGNED) * _ALIGNED
        self._rings_so_far += 1
        tag = 2 + 2 * (self._rings_so_far % _MOST_RINGS)
        return [self._ring(rows[:, :middle], tag), self._ring(rows[:, middle:], tag + 1)]

    def _ring(self, rows: Tensor, tag: int) -> Iterator[list[MPI.Request]]:
        """Send on to the right what came from the left, until everything has been everywhere."""
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        for turn in range(self.size - 1):
            sent, received = rows[(self.rank - turn) % self.size], rows[(self.rank - turn - 1) % self.size]
            yield [
                self._comm.Irecv(moved(received), left, tag),
                self._comm.Isend(moved(sent), right, tag),
            ]

    def all_gatherv(self, x: Tensor, counts: Sequence[int], out: Tensor | None = None) -> Operation[tuple[Tensor, ...]]:
        check_counts(x, counts, self.rank, self.size)
        out = gatherv_output(x, counts, out)
        place = staging_buffer(out, in_reach=reaches(out))
        source = readable_apart(x, place, in_reach=reaches(x))
        work = self._start(
            lambda: self._comm.Iallgatherv(moved_part(source), moved_parts(place.buffer, counts)), x, out
        )
        return self._operation(
            "all_gatherv", work, lambda: torch.split(place.deliver(), list(counts)), keep=(source, place)
        )

    def all_reduce(self, x: Tensor) -> Operation[Tensor]:
        from mpi4py import MPI

        check_reducible(x)
        place = staging_buffer_filled(x, in_reach=reaches(x))
        work = self._start(
            lambda: self._comm.Iallreduce(MPI.IN_PLACE, summed(place.buffer), sum_of(place.buffer.dtype)), x
        )
        return self._operation("all_reduce", work, place.deliver, keep=place)

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        check_reducible(x)
        out = scatter_output(x, out, self.size)
        place = staging_buffer(out, in_reach=reaches(out))
        source = readable_apart(x, place, in_reach=reaches(x))
        work = self._start(
            lambda: self._comm.Ireduce_scatter_block(
                summed(source, parts=self.size), summed(place.buffer), sum_of(source.dtype)
            ),
            x,
            out,
        )
        return self._operation("reduce_scatter", work, place.deliver, keep=(source, place))

    def broadcast(self, x: Tensor, root: int = 0) -> Operation[Tensor]:
        check_peer(root, self.size)
        place = staging_buffer_filled(x, in_reach=reaches(x))
        work = self._start(lambda: self._comm.Ibcast(moved(place.buffer), root), x)
        return self._operation("broadcast", work, place.deliver, keep=place)

    def send_recv(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Operation[tuple[Tensor, ...]]:
        received = copy_to_self(sends, receives, self.rank, self.size)
        sources = [(peer, readable(x, in_reach=reaches(x))) for peer, x in sends if peer != self.rank]
        places = [(peer, staging_buffer(x, in_reach=reaches(x))) for peer, x in receives if peer != self.rank]
        work = self._start(
            lambda: [
                *(self._comm.Irecv(moved(place.buffer), peer) for peer, place in places),
                *(self._comm.Isend(moved(source), peer) for peer, source in sources),
            ],
            *(x for _, x in (*sends, *receives)),
        )
        return self._operation("send_recv", work, lambda: deliver_all(places, received), keep=(sources, places))

    def barrier(self) -> Operation[None]:
        return self._operation("barrier", self._start(self._comm.Ibarrier), lambda: None)

    def close(self) -> None:
        """Give the communicator back. All ranks call it; verbs raise from then on."""
        self._closed = True
        self._comm.Free()

    def _start(self, start: Callable[[], MPI.Request | list[MPI.Request]], *used: Tensor) -> Request:
        return self._start_chains([once(start)], *used)

    def _start_chains(self, chains: Sequence[Iterator[list[MPI.Request]]], *used: Tensor) -> Request:
        """Start work on complete buffers: MPI knows no streams, and would read what a copy has yet to write."""
        from mpi4py import MPI

        if self._closed:
            raise TransportError(f"{self}: this world is closed. Connect again, or close it later.")
        for device in {x.device for x in used}:
            synchronize_stream(device)
        try:
            return start_request(chains, str(self))
        except MPI.Exception as error:
            raise TransportError(f"{self} failed: {error.Get_error_string()}") from error

    def _operation(self, verb: str, request: Request, deliver: Callable[[], T], keep: object = None) -> Operation[T]:
        what = f"{verb} over {self}"
        return Operation(what, request, deliver, timeout_s=self.timeout_s, keep=keep)


def once(start: Callable[[], MPI.Request | list[MPI.Request]]) -> Iterator[list[MPI.Request]]:
    """A chain of one link."""
    started = start()
    yield started if isinstance(started, list) else [started]


def reaches(x: Tensor) -> bool:
    """Whether MPI may be handed the memory of ``x`` itself."""
    return x.is_cpu or mpi_is_gpu_aware()


def moved(flat: Tensor, parts: int = 1) -> BufferSpec:
    """``flat`` as a buffer that is only moved: counted in the widest unit that divides one of its ``parts``.

    Both ends derive the unit from the same size, and wide units keep the counts of large tensors within a C int.
    """
    nbytes = flat.nbytes // parts
    width = next(width for width in (8, 4, 2, 1) if nbytes % width == 0)
    return memory(flat), checked_count(nbytes // width, flat), unit(width)


def moved_part(flat: Tensor) -> BufferSpec:
    """``flat`` as one of the parts that :func:`moved_parts` receives: in units of its element, whatever its length."""
    buffer, counts, datatype = moved_parts(flat, [flat.numel()])
    return buffer, counts[0], datatype


def moved_parts(flat: Tensor, counts: Sequence[int]) -> tuple[MPI.buffer, list[int], MPI.Datatype]:
    """``flat`` as consecutive parts of ``counts`` elements each."""
    width = min(8, flat.element_size())
    scale = flat.element_size() // width
    checked_count(sum(counts) * scale, flat)
    return memory(flat), [count * scale for count in counts], unit(width)


def summed(flat: Tensor, parts: int = 1) -> BufferSpec:
    """``flat`` as a buffer of numbers, for verbs that add."""
    return memory(flat), checked_count(flat.numel() // parts, flat), number(flat.dtype)


def memory(flat: Tensor) -> MPI.buffer:
    from mpi4py import MPI

    return MPI.buffer.fromaddress(flat.data_ptr(), flat.nbytes)


def checked_count(count: int, flat: Tensor) -> int:
    if count > LARGEST_COUNT and not counts_are_large():
        raise InvalidTensorError(
            f"a {flat.dtype} tensor of {flat.numel()} elements needs a count of {count}, and this MPI, older than MPI "
            f"4, counts to {LARGEST_COUNT}. Split the tensor, or use an MPI of version 4 or later (MPICH 4.1+)."
        )
    return count


@cache
def counts_are_large() -> bool:
    from mpi4py import MPI

    return MPI.Get_version() >= (4, 0)


@cache
def unit(width: int) -> MPI.Datatype:
    from mpi4py import MPI

    return {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}[width]


@cache
def number(dtype: torch.dtype) -> MPI.Datatype:
    from mpi4py import MPI

    return {
        torch.float64: MPI.DOUBLE,
        torch.float32: MPI.FLOAT,
        torch.bfloat16: MPI.UINT16_T,
        torch.float16: MPI.UINT16_T,
        torch.int64: MPI.INT64_T,
        torch.int32: MPI.INT32_T,
        torch.int8: MPI.INT8_T,
        torch.uint8: MPI.UINT8_T,
    }[dtype]


@cache
def sum_of(dtype: torch.dtype) -> MPI.Op:
    """The operation that adds ``dtype``; 16-bit floats travel as 16-bit integers and are added here."""
    from mpi4py import MPI

    if dtype not in (torch.bfloat16, torch.float16):
        return MPI.SUM

    def add(incoming: Buffer, total: Buffer, _: MPI.Datatype) -> None:
        torch.frombuffer(total, dtype=dtype).add_(torch.frombuffer(incoming, dtype=dtype))

    return MPI.Op.Create(add, commute=True)
