"""MPI keeps every law of a transport, moves data while Python computes, and refuses what it cannot count."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

import flexcomm
from flexcomm import testing
from flexcomm.bootstrap.job import barrier_with_timeout
from flexcomm.errors import DeadlineExceededError, InvalidTensorError, TransportError
from flexcomm.transport import LoopbackTransport, MPITransport
from flexcomm.transport import mpi as mpi_module

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("law", testing.TRANSPORT_LAWS, ids=lambda law: law.__name__)
def test_mpi_keeps_the_law(world: flexcomm.World, law) -> None:  # type: ignore[no-untyped-def]
    assert world.control.name == "mpi"
    law(world.control, "cpu")


def test_a_group_of_one_is_a_loopback_and_others_are_mpi(world: flexcomm.World) -> None:
    kind = LoopbackTransport if world.topology.size == 1 else MPITransport
    assert isinstance(world.intra, kind)
    assert isinstance(world.inter, LoopbackTransport)


def test_messages_advance_while_python_does_something_else(world: flexcomm.World) -> None:
    """Nobody calls MPI here after the start: 16 MB need many round trips, which only the progress thread can make."""
    x = torch.full((4_000_000,), float(world.topology.rank))
    handle = world.control.all_gather(x)
    request = handle._request
    deadline_s = time.monotonic() + 60
    while not request._finished and time.monotonic() < deadline_s:
        torch.ones(1000).sum()
        time.sleep(0.01)
    assert request._finished
    assert [row[-1].item() for row in handle.wait()] == [float(rank) for rank in range(world.topology.size)]


@pytest.mark.mpi(min_size=2)
def test_a_deadline_is_kept_and_the_communicator_goes_on(world: flexcomm.World) -> None:
    impatient = MPITransport(MPI.COMM_WORLD.Dup(), timeout_s=0.3)
    last = impatient.size - 1
    late = None
    if impatient.rank == 0:
        late = impatient.send_recv([], [(last, torch.empty(3))])
        with pytest.raises(DeadlineExceededError, match=r"send_recv over mpi on rank 0 .* waited 0\.3 s"):
            late.wait()
    world.control.barrier().wait()
    if impatient.rank == last:
        impatient.send_recv([(0, torch.tensor([1.0, 2.0, 3.0]))], []).wait()
    if late is not None:
        (received,) = late.wait()
        assert received.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.mpi(min_size=2)
def test_ranks_that_do_not_come_to_connect_are_waited_for_no_longer_than_the_deadline(world: flexcomm.World) -> None:
    comm = MPI.COMM_WORLD.Dup()
    if world.topology.rank == 0:
        with pytest.raises(DeadlineExceededError, match=r"rank 0 of \d waited 0\.3 s for the others"):
            barrier_with_timeout(comm, 0.3)
    world.control.barrier().wait()
    if world.topology.rank > 0:
        barrier_with_timeout(comm, 30)
    world.control.barrier().wait()


def test_a_closed_world_refuses_and_does_not_crash(world: flexcomm.World) -> None:
    with flexcomm.connect(timeout_s=30) as other:
        pass
    with pytest.raises(TransportError, match="this world is closed"):
        other.control.all_gather(torch.ones(3))
    world.control.barrier().wait()


def test_a_count_this_mpi_cannot_express_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_module, "LARGEST_COUNT", 10)
    monkeypatch.setattr(MPI, "Get_version", lambda: (3, 1))
    transport = MPITransport(MPI.COMM_SELF, timeout_s=5)
    with pytest.raises(InvalidTensorError, match=r"11 elements needs a count of 11, .*counts to 10"):
        transport.all_reduce(torch.ones(11))
    with pytest.raises(InvalidTensorError, match="count of 13"):
        transport.broadcast(torch.ones(13, dtype=torch.uint8))
    wide = torch.arange(80, dtype=torch.uint8)
    assert torch.equal(transport.all_gather(wide).wait()[0], wide)


class Device:
    """Memory of the host that stands in for a device's, and what is in it."""

    def __init__(self) -> None:
        self._memory, self._used = torch.zeros(4 << 20, dtype=torch.uint8), 0

    def holds(self, address: int) -> bool:
        return 0 <= address - self._memory.data_ptr() < self._memory.nbytes

    def put(self, x: torch.Tensor) -> torch.Tensor:
        first, self._used = self._used, self._used + -(-x.nbytes // 8) * 8
        return self._memory[first : first + x.nbytes].view(x.dtype).view(x.shape).copy_(x)


class PickyComm:
    """A communicator that takes a device's memory in sends and receives alone, as Open MPI without UCX does."""

    def __init__(self, comm: MPI.Intracomm, device: Device) -> None:
        self._comm, self._device = comm, device
        self.taken: set[str] = set()
        """The calls that got a device's memory."""

    def __getattr__(self, name: str) -> object:
        call = getattr(self._comm, name)

        def checked(*args: object) -> object:
            buffers = [arg[0] for arg in args if isinstance(arg, tuple)]
            if any(self._device.holds(buffer.address) for buffer in buffers if isinstance(buffer, MPI.buffer)):
                assert name in ("Isend", "Irecv"), f"{name} crashes on device memory"
                self.taken.add(name)
            return call(*args)

        return checked


@pytest.mark.parametrize(
    "aware", [lambda _: True, lambda _: False, lambda rank: rank % 2 == 0], ids=["all", "none", "even"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_device_memory_is_handed_to_sends_and_receives_of_a_gpu_aware_mpi_alone(
    monkeypatch: pytest.MonkeyPatch, aware: Callable[[int], bool], dtype: torch.dtype
) -> None:
    device, is_aware = Device(), aware(MPI.COMM_WORLD.Get_rank())
    monkeypatch.setattr(mpi_module, "is_on_host", lambda x: not device.holds(x.untyped_storage().data_ptr()))
    monkeypatch.setattr(mpi_module, "mpi_is_gpu_aware", lambda: is_aware)
    comm: Any = PickyComm(MPI.COMM_WORLD.Dup(), device)
    transport = MPITransport(comm, timeout_s=60)
    rank, size = transport.rank, transport.size

    def make(rank: int, numel: int) -> torch.Tensor:
        return (torch.arange(numel) % 7 + rank).to(dtype)

    for numel in (0, 1, 13, 40_001):
        mine, blank = device.put(make(rank, numel)), torch.zeros(size, numel, dtype=dtype)
        every = [make(other, numel) for other in range(size)]
        total = sum(x.to(torch.int64) for x in every).to(dtype)  # type: ignore[union-attr]
        assert torch.equal(transport.all_gather(mine, device.put(blank)).wait(), torch.stack(every))
        counts = [max(numel - other, 0) for other in range(size)]
        parts = transport.all_gatherv(mine[: counts[rank]], counts, device.put(torch.zeros(sum(counts), dtype=dtype)))
        assert all(torch.equal(part, x[:count]) for part, x, count in zip(parts.wait(), every, counts, strict=True))
        assert torch.equal(transport.all_reduce(device.put(mine)).wait(), total)
        rows = device.put(mine.expand(size, numel).contiguous())
        assert torch.equal(transport.reduce_scatter(rows, device.put(blank[0])).wait(), total)
        assert torch.equal(transport.broadcast(device.put(mine), size - 1).wait(), every[-1])
        left, right = (rank - 1) % size, (rank + 1) % size
        (received,) = transport.send_recv([(right, mine)], [(left, device.put(blank[0]))]).wait()
        assert torch.equal(received, every[left])
    assert comm.taken == ({"Isend", "Irecv"} if is_aware and size > 1 else set())


def test_the_probe_is_survived_by_memory_that_this_mpi_takes() -> None:
    probe = [sys.executable, "-c", mpi_module.PROBE, "cpu"]
    environ = mpi_module.environment_without_launcher(os.environ)
    assert subprocess.run(probe, env=environ, timeout=60, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_more_than_two_gigabytes_cross_in_one_broadcast(world: flexcomm.World) -> None:
    """2^31 + 8 bytes, more than a C int counts; two ranks, so that memory suffices."""
    if world.topology.size != 3:
        pytest.skip("once for each MPI is enough: with 3 ranks")
    if available_nbytes() < 8 * 2**30:
        pytest.skip("needs 8 GiB of free memory")
    pair = MPI.COMM_WORLD.Split(0 if world.topology.rank < 2 else MPI.UNDEFINED, world.topology.rank)
    if pair == MPI.COMM_NULL:
        assert world.topology.rank >= 2
        return
    transport = MPITransport(pair, timeout_s=60)
    x = torch.zeros(2**31 + 8, dtype=torch.uint8)
    if transport.rank == 0:
        x[-1] = 7
    assert transport.broadcast(x).wait()[-1] == 7


def available_nbytes() -> int:
    """What the machine has free, or the container's limit where that is less."""
    free = int(re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    limited = limit.read_text().strip() if limit.exists() else "max"
    return free if limited == "max" else min(free, int(limited))
