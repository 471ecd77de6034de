"""``python -m bench sync``: the cost of a synchronisation beside its bytes.

Runs under mpirun, torchrun or ``python -m bench cluster``; started alone, it starts two ranks as two nodes of this
host.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

import flexcomm
from bench.cluster.launchers import start_two_ranks
from bench.cluster.links import Link, describe_link, find_link
from bench.common_options import CheckOption, JsonOption, LinkOption, QuickOption, Report, conclude
from bench.step.models import draw_gradients, find_model
from bench.tables import print_table, show_size
from bench.transport import compute_in_torch, slowest
from bench.world import describe_world
from flexcomm import BUCKET_BYTES, Residuals, TensorSpec, World, demo, hierarchical_sync, start_sync, top_k
from flexcomm.codec import plan_buffer
from flexcomm.topology import read_launcher

_FIGURES = frozenset({"overhead_us", "exposed_share", "growth_kib", "growth_objects"})
_BUCKETS = [1 << 20, 4 << 20, 8 << 20, BUCKET_BYTES, 32 << 20, 128 << 20]
_CALLS = 1000
_SMALL = (16, 16)
"""1 KiB of float32."""
_LARGE = (1024, 4096)
_COMPUTE = 1.5
"""Seconds of computation per second of the exchange: more than 1, so that all of it can be hidden."""
_WARMUPS = 1000
"""More calls than the world keeps records of, and enough for malloc to hold the memory that threads need."""


class Overhead(NamedTuple):
    """Seconds of a small synchronisation, and of the bare gather of what it sends."""

    sync_s: float
    gather_s: float


class Exposure(NamedTuple):
    """Seconds of an exchange alone, and those that remain when the caller computes meanwhile."""

    wire_s: float
    exposed_s: float


class Growth(NamedTuple):
    """Memory that a rank holds more after a number of calls; the maximum over ranks."""

    resident_kib: float
    objects: float


def sync(
    model: Annotated[str, typer.Option(help="Whose gradients fill the buckets: 23m, 124m or tiny.")] = "23m",
    link_rate: LinkOption = None,
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Measure the overhead of a small call, the exposed part of an exchange behind computation, memory, bucket sizes.

    Seconds are those of the slowest rank, medians over rounds.
    """
    link = find_link(link_rate)
    if read_launcher(os.environ).launcher == "none":
        raise typer.Exit(start_two_ranks())
    torch.set_num_threads(1)
    rounds = 3 if quick else 7
    with flexcomm.connect() as world:
        first = world.topology.rank == 0
        if first:
            print(f"# bench sync: {describe_world(world)}; {describe_link(link)}", flush=True)
        overhead = measure_overhead(world, 100 * rounds)
        exposure = measure_exposure(world, rounds)
        growth = measure_growth(world, _CALLS)
        buckets_s = measure_buckets(world, model, _BUCKETS, rounds)
    if first:
        _print(overhead, exposure, growth)
        _print_buckets(model, buckets_s)
        report = make_report(overhead, exposure, growth, buckets_s, link)
        raise typer.Exit(conclude(report, json_file=json_file, check=check))


def _print(overhead: Overhead, exposure: Exposure, growth: Growth) -> None:
    rows = [
        ("sync of 1 KiB", f"{1e6 * overhead.sync_s:.0f} us"),
        ("bare gather of what it sends", f"{1e6 * overhead.gather_s:.0f} us"),
        ("overhead of the call", f"{1e6 * (overhead.sync_s - overhead.gather_s):.0f} us"),
        ("exchange of 16 MiB by top_k(1/8), alone", f"{1e3 * exposure.wire_s:.1f} ms"),
        ("the same behind longer computation: exposed", f"{1e3 * exposure.exposed_s:.1f} ms"),
        ("exposed share", f"{exposure.exposed_s / exposure.wire_s:.1%}"),
        (f"memory after {_CALLS:,} more calls", f"{growth.resident_kib:+.0f} KiB"),
        ("Python's objects, in blocks of memory", f"{growth.objects:+.0f}"),
    ]
    print_table("slowest rank, medians", ("what", "measured"), rows, sys.stdout)


def _print_buckets(model: str, seconds: Sequence[float]) -> None:
    rows = [(show_size(size), f"{one:.3f}") for size, one in zip(_BUCKETS, seconds, strict=True)]
    print_table(f"demo(k=32) of the {model} model's gradients", ("bucket_bytes", "s/step"), rows, sys.stdout)


def make_report(
    overhead: Overhead, exposure: Exposure, growth: Growth, buckets_s: Sequence[float], link: Link | None
) -> Report:
    """Return the figures. The exposed share is left out if the rate of the link is unknown: it would say nothing."""
    figures = {
        "overhead_us": 1e6 * (overhead.sync_s - overhead.gather_s),
        "growth_kib": growth.resident_kib,
        "growth_objects": growth.objects,
    }
    unmeasured = {}
    if link is None:
        unmeasured["exposed_share"] = "the link is this host's memory: run it in `bench cluster`"
    else:
        figures["exposed_share"] = exposure.exposed_s / exposure.wire_s
    rows = [{"bucket_bytes": size, "step_s": one} for size, one in zip(_BUCKETS, buckets_s, strict=True)]
    return Report("sync", _FIGURES, figures, rows, unmeasured=unmeasured)


def measure_overhead(world: World, rounds: int) -> Overhead:
    x, compressor, residuals = torch.randn(_SMALL), demo(32), Residuals()
    nbytes = plan_buffer([TensorSpec("0", _SMALL, x.dtype)], compressor).nbytes
    buffer, gathered = (torch.zeros(shape, dtype=torch.uint8) for shape in ((nbytes,), (world.inter.size, nbytes)))
    hierarchical_sync(x, compressor, world=world, residuals=residuals)
    return Overhead(
        slowest(world.control, lambda: hierarchical_sync(x, compressor, world=world, residuals=residuals), rounds),
        slowest(world.control, lambda: world.inter.all_gather(buffer, gathered).wait(), rounds),
    )


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
