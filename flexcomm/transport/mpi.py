"""A transport over MPI, through mpi4py's buffer calls.

Host memory is handed to MPI as it is. So is device memory that is only moved, where the MPI is GPU-aware; else, and in
verbs that add, it goes through pinned host memory. MPI knows no streams, so the current one is synchronised first
either way. bfloat16 and float16, which MPI has no type for, are summed by an operation of our own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

import torch

from flexcomm.device import accelerator, current_device, synchronize_stream
from flexcomm.errors import InvalidTensorError, TransportError
from flexcomm.transport.mpi_progress import start_request
from flexcomm.transport.staging import BufferTransport, as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mpi4py import MPI
    from mpi4py.typing import Buffer
    from torch import Tensor

    from flexcomm.transport.base import Request

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


class MPITransport(BufferTransport):
    """The ranks of a communicator that nobody else uses."""

    name = "mpi"

    def __init__(self, comm: MPI.Comm, timeout_s: float) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), timeout_s)
        self._comm = comm
        self._rings_so_far = 0

    def close(self) -> None:
        """Free the communicator. All ranks call it; verbs raise from then on."""
        self._closed = True
        self._comm.Free()

    def _reaches(self, x: Tensor, *, summed: bool) -> bool:
        # Open MPI's non-blocking reductions crash on device pointers even if it is GPU-aware, and `sum_of` adds on the
        # host: device tensors are summed in host memory.
        return x.is_cpu or (not summed and mpi_is_gpu_aware())

    def _start_all_gather(self, source: Tensor, buffer: Tensor) -> Request:
        if self.size > _PAIR and source.nbytes >= _SHORTEST_IN_A_RING:
            return self._start_chains(self._rings(source, buffer), source, buffer)
        return self._start(lambda: self._comm.Iallgather(moved(source), moved(buffer, parts=self.size)), source, buffer)

    def _rings(self, source: Tensor, buffer: Tensor) -> list[Iterator[list[MPI.Request]]]:
        """Return two rings, one for each half of what is gathered: while one waits for a message, the other sends."""
        rows = as_bytes(buffer).view(self.size, -1)
        rows[self.rank] = as_bytes(source)
        middle = rows.shape[1] // (2 * _ALIGNED) * _ALIGNED
        self._rings_so_far += 1
        tag = 2 + 2 * (self._rings_so_far % _MOST_RINGS)
        return [self._ring(rows[:, :middle], tag), self._ring(rows[:, middle:], tag + 1)]

    def _ring(self, rows: Tensor, tag: int) -> Iterator[list[MPI.Request]]:
        """Send on to the right what came from the left, until all ranks have all rows."""
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        for number in range(self.size - 1):
            sent, received = rows[(self.rank - number) % self.size], rows[(self.rank - number - 1) % self.size]
            yield [self._comm.Irecv(moved(received), left, tag), self._comm.Isend(moved(sent), right, tag)]

    def _start_all_gatherv(self, source: Tensor, buffer: Tensor, counts: Sequence[int]) -> Request:
        return self._start(
            lambda: self._comm.Iallgatherv(moved_part(source), moved_parts(buffer, counts)), source, buffer
        )

    def _start_all_reduce(self, buffer: Tensor) -> Request:
        from mpi4py import MPI

        return self._start(lambda: self._comm.Iallreduce(MPI.IN_PLACE, summed(buffer), sum_of(buffer.dtype)), buffer)

    def _start_reduce_scatter(self, source: Tensor, buffer: Tensor) -> Request:
        return self._start(
            lambda: self._comm.Ireduce_scatter_block(
                summed(source, parts=self.size), summed(buffer), sum_of(source.dtype)
            ),
            source,
            buffer,
        )

    def _start_broadcast(self, buffer: Tensor, root: int) -> Request:
        return self._start(lambda: self._comm.Ibcast(moved(buffer), root), buffer)

    def _start_send_recv(self, sources: Sequence[tuple[int, Tensor]], buffers: Sequence[tuple[int, Tensor]]) -> Request:
        return self._start(
            lambda: [
                *(self._comm.Irecv(moved(buffer), peer) for peer, buffer in buffers),
                *(self._comm.Isend(moved(source), peer) for peer, source in sources),
            ],
            *(x for _, x in (*sources, *buffers)),
        )

    def _start_barrier(self) -> Request:
        return self._start(self._comm.Ibarrier)

    def _start(self, start: Callable[[], MPI.Request | list[MPI.Request]], *buffers: Tensor) -> Request:
        return self._start_chains([once(start)], *buffers)

    def _start_chains(self, chains: Sequence[Iterator[list[MPI.Request]]], *buffers: Tensor) -> Request:
        """Start work on complete buffers: MPI knows no streams, and would read what a copy has yet to write."""
        from mpi4py import MPI

        self._check_open()
        for device in {buffer.device for buffer in buffers}:
            synchronize_stream(device)
        try:
            return start_request(chains, str(self))
        except MPI.Exception as error:
            raise TransportError(f"{self} failed: {error.Get_error_string()}") from error


def once(start: Callable[[], MPI.Request | list[MPI.Request]]) -> Iterator[list[MPI.Request]]:
    """Yield what ``start`` starts, and nothing after it."""
    started = start()
    yield started if isinstance(started, list) else [started]


def moved(flat: Tensor, parts: int = 1) -> BufferSpec:
    """Return ``flat`` as a buffer that is only moved: counted in the widest unit that divides one of its ``parts``.

    Both ends derive the unit from the same size, and wide units keep the counts of large tensors within a C int.
    """
    nbytes = flat.nbytes // parts
    width = next(width for width in (8, 4, 2, 1) if nbytes % width == 0)
    return memory(flat), checked_count(nbytes // width, flat), unit(width)


def moved_part(flat: Tensor) -> BufferSpec:
    """Return ``flat`` as one of the parts that :func:`moved_parts` receives, counted in units of its element."""
    buffer, counts, datatype = moved_parts(flat, [flat.numel()])
    return buffer, counts[0], datatype


def moved_parts(flat: Tensor, counts: Sequence[int]) -> tuple[MPI.buffer, list[int], MPI.Datatype]:
    """Return ``flat`` as consecutive parts of ``counts`` elements each."""
    width = min(8, flat.element_size())
    scale = flat.element_size() // width
    checked_count(sum(counts) * scale, flat)
    return memory(flat), [count * scale for count in counts], unit(width)


def summed(flat: Tensor, parts: int = 1) -> BufferSpec:
    """Return ``flat`` as a buffer of numbers, for verbs that add."""
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
    """Return the operation that adds ``dtype``; 16-bit floats travel as 16-bit integers and are added here."""
    from mpi4py import MPI

    if dtype not in (torch.bfloat16, torch.float16):
        return MPI.SUM

    def add(incoming: Buffer, total: Buffer, _: MPI.Datatype) -> None:
        torch.frombuffer(total, dtype=dtype).add_(torch.frombuffer(incoming, dtype=dtype))

    return MPI.Op.Create(add, commute=True)


PROBE = """
import sys, torch
from mpi4py import MPI
sent = torch.arange(1024, dtype=torch.int32, device=sys.argv[1])
received = torch.zeros_like(sent)
torch.accelerator.synchronize()
buffer = lambda x: [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), x.numel(), MPI.INT32_T]
MPI.COMM_SELF.Sendrecv(buffer(sent), 0, recvbuf=buffer(received), source=0)
raise SystemExit(0 if torch.equal(sent, received) else 1)
"""
PROBE_TIMEOUT_S = 60.0
LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYD", "MPI_LOCAL", "SLURM_")
CHOICE_PREFIXES = ("OMPI_ALLOW_", "PRTE_ALLOW_", "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_opal_cuda")
"""Variables by which people choose how Open MPI moves data; the rest of ``OMPI_MCA_*`` is the launcher's own state."""


@cache
def mpi_is_gpu_aware() -> bool:
    """Return whether the MPI at hand may be given device pointers; asked once per process.

    Asking is dangerous: an MPI that is not GPU-aware (Open MPI says CUDA-aware) reads the pointer as host memory and
    crashes, and some builds answer their own query wrongly. So a child process tries it, and may crash instead of the
    job.
    """
    kind = accelerator()
    if kind is None:
        return False
    try:
        probe = subprocess.run(
            [sys.executable, "-c", PROBE, str(current_device(kind.name))],
            env=environment_without_launcher(os.environ),
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return probe.returncode == 0


def environment_without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the launcher's variables: the child is a job of one, not this job's rank again."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(CHOICE_PREFIXES) or not name.startswith(LAUNCHER_PREFIXES)
    }
