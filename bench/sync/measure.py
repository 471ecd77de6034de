"""What ``bench sync`` measures: what a call costs beside its bytes. All ranks call each of these together."""

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from bench.step.command import draw_gradients
from bench.step.models import find_model
from bench.transport import compute_in_torch, slowest
from flexcomm import Residuals, TensorSpec, World, demo, hierarchical_sync, start_sync, top_k
from flexcomm.codec import plan_buffer

_SMALL = (16, 16)
"""1 KiB of float32."""
_LARGE = (1024, 4096)
_COMPUTE = 1.5
"""How much longer than the wire the caller computes, so that all of it can hide."""
_WARMUPS = 1000
"""More calls than the last ones that are remembered, and enough for malloc to have what the threads need."""


class Overhead(NamedTuple):
    """Seconds of a small synchronisation, and of the bare gather of what it sends."""

    sync_s: float
    gather_s: float


def measure_overhead(world: World, rounds: int) -> Overhead:
    x, compressor, residuals = torch.randn(_SMALL), demo(32), Residuals()
    nbytes = plan_buffer([TensorSpec("0", _SMALL, x.dtype)], compressor).nbytes
    buffer, gathered = (torch.zeros(shape, dtype=torch.uint8) for shape in ((nbytes,), (world.inter.size, nbytes)))
    hierarchical_sync(x, compressor, world=world, residuals=residuals)
    return Overhead(
        slowest(world.control, lambda: hierarchical_sync(x, compressor, world=world, residuals=residuals), rounds),
        slowest(world.control, lambda: world.inter.all_gather(buffer, gathered).wait(), rounds),
    )


class Exposure(NamedTuple):
    """Seconds that an exchange takes alone, and that are left of it when the caller computes meanwhile."""

    wire_s: float
    exposed_s: float


def measure_exposure(world: World, rounds: int) -> Exposure:
    x, compressor = torch.randn(_LARGE), top_k(1 / 8)
    nbytes = plan_buffer([TensorSpec("0", _LARGE, x.dtype)], compressor).nbytes
    buffer, gathered = (torch.zeros(shape, dtype=torch.uint8) for shape in ((nbytes,), (world.inter.size, nbytes)))
    hierarchical_sync(x, compressor, world=world, algorithm="gather")
    wire_s = slowest(world.control, lambda: world.inter.all_gather(buffer, gathered).wait(), rounds)
    exposed_s = torch.zeros(rounds, dtype=torch.float64)
    for i in range(rounds):
        world.control.barrier().wait()
        begin_s = time.perf_counter()
        handle = start_sync(x, compressor, world=world, algorithm="gather")
        compute_in_torch(_COMPUTE * wire_s)
        handle.wait()
        work_s = handle.record.encode_s + handle.record.decode_s + _COMPUTE * wire_s
        exposed_s[i] = time.perf_counter() - begin_s - work_s
    return Exposure(wire_s, float(world.control.all_gather(exposed_s).wait().amax(dim=0).median()))


class Growth(NamedTuple):
    """How much more memory a rank holds after so many calls; the largest of all ranks."""

    resident_kib: float
    objects: float


def measure_growth(world: World, calls: int) -> Growth:
    tensors, residuals = [torch.randn(64, 64), torch.randn(300), torch.randn(65, 130)], Residuals()

    def synchronise(times: int) -> None:
        for _ in range(times):
            hierarchical_sync(tensors, demo(32), world=world, residuals=residuals)

    synchronise(_WARMUPS)
    before = _memory_held()
    synchronise(calls)
    grown = torch.tensor([now - then for now, then in zip(_memory_held(), before, strict=True)], dtype=torch.float64)
    return Growth(*world.control.all_gather(grown).wait().amax(dim=0).tolist())


def _memory_held() -> tuple[float, float]:
    """Return resident KiB of this process, and how many blocks of memory Python's objects take."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024, float(sys.getallocatedblocks())


def measure_buckets(world: World, model: str, sizes: list[int], rounds: int) -> list[float]:
    """Return seconds per step of a model's gradients, for each number of bytes in a bucket."""
    gradients = draw_gradients(find_model(model), world)
    out = [torch.empty_like(x) for x in gradients.tensors]

    def step(bucket_bytes: int, residuals: Residuals) -> Callable[[], object]:
        return lambda: hierarchical_sync(
            gradients.tensors,
            demo(32),
            world=world,
            residuals=residuals,
            names=gradients.names,
            bucket_bytes=bucket_bytes,
            out=out,
        )

    seconds = []
    for bucket_bytes in sizes:
        run = step(bucket_bytes, Residuals(decay=0.999))
        run()
        seconds.append(slowest(world.control, run, rounds))
    return seconds
