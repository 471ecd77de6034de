"""A transport over MPI, through mpi4py's buffer calls.

Host memory is handed to MPI as it is. Device memory goes through pinned host memory, but for gathers and messages of a
GPU-aware MPI.

[Note: device memory] A GPU-aware MPI takes device memory in sends and receives, but hardly in non-blocking collectives:
Open MPI's reductions crash on it (https://github.com/open-mpi/ompi/issues/9845), and without UCX it supports none
(https://www.open-mpi.org/faq/?category=runcuda). So gathers of device tensors are made of sends and receives, also on
a rank whose MPI is not GPU-aware, and other collectives get a copy in host memory.

[Note: MPI progress] An MPI moves data only inside MPI calls. Without help, a 5 MB gather over 100 Mbit/s that is
started before 0.8 s of computation takes place after it (measured with Open MPI 5: 1.3 to 1.6 s in all, against 0.81 s
with regular tests). So one daemon thread per process tests whatever is under way, twice a millisecond. A rank that
waits tests by itself: going through the thread would cost a small message its latency.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
import time
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from flexcomm.device import accelerator, current_device, enter_device, is_on_host, synchronize_stream
from flexcomm.errors import InvalidTensorError, TransportError
from flexcomm.transport.base import Expired
from flexcomm.transport.staging import REDUCIBLE, BufferTransport, as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from mpi4py import MPI
    from mpi4py.typing import Buffer
    from torch import Tensor

    from flexcomm.transport.base import Messages

    Chain = Iterator[list[MPI.Request]]
    """Requests of a verb: what it yields next is started when what it yielded before is done."""
    BufferSpec = tuple[MPI.buffer, int, MPI.Datatype]

TEST_INTERVAL_S = 0.0005
SPIN_S = 0.002
"""A rank that waits only yields between its tests for so long; then it sleeps a tenth of the time it has waited."""
LARGEST_COUNT = 2**31 - 1  # an MPI before version 4 counts in C ints
_OF_MESSAGES = ("all_gather", "all_gatherv", "send_recv")
_ALIGNED = 8
_SHORTEST_IN_A_RING = 1 << 16
"""Bytes from which a gather among more than two goes round in a ring: links carry one message each way at a time. Open
MPI's own gather of 4 MB among four nodes used 57 % of links of 100 Mbit/s, where a ring uses 85 %."""
_MOST_RINGS = 1 << 13
"""Rings that may be under way before one has the tags of another; MPI promises tags up to 2**15 - 1, 0 is taken."""

log = logging.getLogger(__name__)


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

    def _reaches(self, x: Tensor, verb: str) -> bool:
        # See [Note: device memory].
        return is_on_host(x) or (verb in _OF_MESSAGES and mpi_is_gpu_aware())

    def _start_all_gather(self, source: Tensor, buffer: Tensor, x: Tensor) -> MPIRequest:
        if not is_on_host(x) or (self.size > 2 and source.nbytes >= _SHORTEST_IN_A_RING):
            return self._start((source, buffer), *self._rings(source, buffer))
        own, parts = moved(source), moved(buffer, parts=self.size)
        return self._start((source, buffer), once(lambda: self._comm.Iallgather(own, parts)))

    def _rings(self, source: Tensor, buffer: Tensor) -> list[Chain]:
        """Return two rings, one for each half of what is gathered: while one waits for a message, the other sends."""
        rows = as_bytes(buffer).view(self.size, source.nbytes)
        rows[self.rank] = as_bytes(source)
        middle = rows.shape[1] // (2 * _ALIGNED) * _ALIGNED
        self._rings_so_far += 1
        tag = 2 + 2 * (self._rings_so_far % _MOST_RINGS)
        return [self._ring(rows[:, :middle], tag), self._ring(rows[:, middle:], tag + 1)]

    def _ring(self, rows: Tensor, tag: int) -> Chain:
        """Send on to the right what came from the left, until all ranks have all rows."""
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        for number in range(self.size - 1):
            sent, received = rows[(self.rank - number) % self.size], rows[(self.rank - number - 1) % self.size]
            yield [self._comm.Irecv(moved(received), left, tag), self._comm.Isend(moved(sent), right, tag)]

    def _start_all_gatherv(self, source: Tensor, buffer: Tensor, x: Tensor, counts: Sequence[int]) -> MPIRequest:
        if not is_on_host(x):
            parts = list(enumerate(torch.split(buffer, list(counts))))
            _, own_part = parts.pop(self.rank)
            own_part.copy_(source)
            return self._start_send_recv([(peer, source) for peer, _ in parts], parts)
        memory, (count,), unit = moved_parts(source, [source.numel()])
        own, all_parts = (memory, count, unit), moved_parts(buffer, counts)
        return self._start((source, buffer), once(lambda: self._comm.Iallgatherv(own, all_parts)))

    def _start_all_reduce(self, buffer: Tensor) -> MPIRequest:
        from mpi4py import MPI

        total, add = summed(buffer), sum_of(buffer.dtype)
        return self._start((buffer,), once(lambda: self._comm.Iallreduce(MPI.IN_PLACE, total, add)))

    def _start_reduce_scatter(self, source: Tensor, buffer: Tensor) -> MPIRequest:
        parts, own, add = summed(source, parts=self.size), summed(buffer), sum_of(source.dtype)
        return self._start((source, buffer), once(lambda: self._comm.Ireduce_scatter_block(parts, own, add)))

    def _start_broadcast(self, buffer: Tensor, root: int) -> MPIRequest:
        return self._start((buffer,), once(lambda: self._comm.Ibcast(moved(buffer), root)))

    def _start_send_recv(self, sources: Messages, buffers: Messages) -> MPIRequest:
        def start() -> list[MPI.Request]:
            receives = [self._comm.Irecv(moved(buffer), peer) for peer, buffer in buffers]
            return receives + [self._comm.Isend(moved(source), peer) for peer, source in sources]

        return self._start([x for _, x in (*sources, *buffers)], once(start))

    def _start_barrier(self) -> MPIRequest:
        return self._start((), once(self._comm.Ibarrier))

    def _start(self, buffers: Sequence[Tensor], *chains: Chain) -> MPIRequest:
        """Start work on complete buffers: MPI knows no streams, and would read what a copy has yet to write."""
        from mpi4py import MPI

        self._check_open()
        devices = {buffer.device for buffer in buffers}
        for device in devices:
            synchronize_stream(device, self.timeout_s)
        try:
            return start_request(chains, str(self), devices)
        except MPI.Exception as error:
            raise TransportError(f"{self} failed: {error.Get_error_string()}") from error


def once(start: Callable[[], MPI.Request | list[MPI.Request]]) -> Chain:
    """Yield what ``start`` starts, and nothing after it."""
    started = start()
    yield started if isinstance(started, list) else [started]


class MPIRequest:
    """The chains of one verb, independent of each other, tested by the rank that waits and by the progress thread."""

    def __init__(self, chains: Sequence[Chain], where: str, devices: Iterable[torch.device] = ()) -> None:
        from mpi4py import MPI

        self._mpi = MPI  # Kept: a handle may die when the interpreter ends, too late to import anything.
        self.devices = tuple(devices)
        """Where the memory is that MPI was given."""
        self._chains = [(chain, next(chain, [])) for chain in chains]
        self._where, self._lock, self._finished = where, threading.Lock(), False
        self._error: TransportError | None = None

    def done(self) -> bool:
        if not self._finished and self._lock.acquire(blocking=False):
            try:
                self._test()
            finally:
                self._lock.release()
        return self._finished

    def wait(self, timeout_s: float) -> None:
        start_s = time.monotonic()
        while not self.done():
            waited_s = time.monotonic() - start_s
            if waited_s > timeout_s:
                raise Expired
            if waited_s < SPIN_S:
                os.sched_yield()  # Not `time.sleep(0)`, which the kernel's timer slack makes 50 us long.
            else:
                time.sleep(min(TEST_INTERVAL_S, waited_s / 10))
        if self._error is not None:
            raise self._error

    def _test(self) -> None:
        under_way = []
        try:
            for chain, requests in self._chains:
                while requests and self._mpi.Request.Testall(requests):
                    requests = next(chain, [])
                if requests:
                    under_way.append((chain, requests))
        except self._mpi.Exception as error:
            under_way = []
            self._error = TransportError(f"{self._where} failed: {error.Get_error_string()}")
            self._error.__cause__ = error
        self._chains = under_way
        self._finished = not under_way


def start_request(chains: Sequence[Chain], where: str, devices: Iterable[torch.device] = ()) -> MPIRequest:
    """Start what the chains yield first; the progress thread tests it from now on, where threads may call MPI."""
    request = MPIRequest(chains, where, devices)
    if not request.done() and threads_are_free():
        progress_queue().put(request)
    return request


@cache
def progress_queue() -> SimpleQueue[MPIRequest | None]:
    """Return the queue of requests that a thread, started here, tests until they are done."""
    queue: SimpleQueue[MPIRequest | None] = SimpleQueue()

    def test_requests() -> None:
        under_way: list[MPIRequest] = []
        entered: torch.device | None = None
        while True:
            while not (under_way and queue.empty()):
                request = queue.get()
                if request is None:
                    return
                under_way.append(request)
            time.sleep(TEST_INTERVAL_S)
            tested, under_way = under_way, []
            for request in tested:
                # MPI copies device memory in the context of the thread that tests, and this one begins without.
                for device in request.devices:
                    if device != entered:
                        enter_device(device)
                        entered = device
                if not request.done():
                    under_way.append(request)

    def stop() -> None:
        queue.put(None)
        thread.join(timeout=1.0)

    thread = threading.Thread(target=test_requests, name="flexcomm-mpi-progress", daemon=True)
    thread.start()
    atexit.register(stop)  # MPI is finalised when the interpreter ends; a test after that is a crash.
    return queue


@cache
def threads_are_free() -> bool:
    """Return whether this MPI lets several threads call it at once; log once that it does not."""
    from mpi4py import MPI

    is_granted = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    if not is_granted:
        log.warning("this MPI grants no MPI_THREAD_MULTIPLE: exchanges advance only while a rank waits for them.")
    return is_granted


def moved(flat: Tensor, parts: int = 1) -> BufferSpec:
    """Return ``flat`` as a buffer that is only moved: in units as wide as divide a part, so that counts stay small."""
    nbytes = flat.nbytes // parts
    width = next(width for width in (8, 4, 2, 1) if nbytes % width == 0)
    return buffer_spec(flat, nbytes // width, f"UINT{8 * width}_T")


def moved_parts(flat: Tensor, counts: Sequence[int]) -> tuple[MPI.buffer, list[int], MPI.Datatype]:
    """Return ``flat`` as consecutive parts of ``counts`` elements each, counted in units of an element."""
    width = min(8, flat.element_size())
    scale = flat.element_size() // width
    memory, _, unit = buffer_spec(flat, sum(counts) * scale, f"UINT{8 * width}_T")
    return memory, [count * scale for count in counts], unit


def summed(flat: Tensor, parts: int = 1) -> BufferSpec:
    """Return ``flat`` as a buffer of numbers, for verbs that add."""
    return buffer_spec(flat, flat.numel() // parts, REDUCIBLE[flat.dtype])


def buffer_spec(flat: Tensor, count: int, datatype: str) -> BufferSpec:
    from mpi4py import MPI

    if count > LARGEST_COUNT and MPI.Get_version() < (4, 0):
        raise InvalidTensorError(
            f"a {flat.dtype} tensor of {flat.numel()} elements needs a count of {count}, and this MPI, older than MPI "
            f"4, counts to {LARGEST_COUNT}. Split the tensor, or use an MPI of version 4 or later (MPICH 4.1+)."
        )
    return MPI.buffer.fromaddress(flat.data_ptr(), flat.nbytes), count, getattr(MPI, datatype)


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
for numel in (1 << 10, 1 << 20):
    sent = torch.arange(numel, dtype=torch.int32, device=sys.argv[1])
    received = torch.zeros_like(sent)
    # Both are read back: work on the device is done.
    expected = sent.tolist() if received.sum().item() == 0 else []
    buffer = lambda x: [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), x.numel(), MPI.INT32_T]
    comm = MPI.COMM_SELF
    MPI.Request.Waitall([comm.Irecv(buffer(received), 0), comm.Isend(buffer(sent), 0)])
    if received.tolist() != expected:
        raise SystemExit(1)
"""
"""Messages of both kinds: one short enough to be sent at once, and one that waits for its receiver."""
PROBE_TIMEOUT_S = 60.0
LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYD", "MPI_LOCAL", "SLURM_")
CHOICE_PREFIXES = ("OMPI_ALLOW_", "PRTE_ALLOW_", "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_opal_cuda")
"""Variables by which people choose how Open MPI moves data; the rest of ``OMPI_MCA_*`` is the launcher's own state."""


@cache
def mpi_is_gpu_aware() -> bool:
    """Return whether the MPI at hand may be given device pointers, in non-blocking sends and receives.

    One that is not GPU-aware reads the pointer as host memory and crashes, and some builds answer their own query
    wrongly: so a child process tries it, and may crash instead of the job.
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
    """Return the environment of a child that is a job of one, not this job's rank again."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(CHOICE_PREFIXES) or not name.startswith(LAUNCHER_PREFIXES)
    }
