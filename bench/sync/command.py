"""``python -m bench sync``: what a synchronisation costs beside its bytes.

Runs under mpirun, torchrun or ``python -m bench cluster``; started alone, it starts two ranks as two nodes of this
host.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import torch
import typer

import flexcomm
from bench.cluster.node_link import Link, find_link
from bench.cluster.two_ranks import start_two_ranks
from bench.collectives.command import LinkOption, describe_link, describe_world
from bench.collectives.output import show_size
from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.sync.measure import (
    Exposure,
    Growth,
    Overhead,
    measure_buckets,
    measure_exposure,
    measure_growth,
    measure_overhead,
)
from bench.tables import print_table
from flexcomm.sync import BUCKET_BYTES
from flexcomm.topology import read_launcher

_FIGURES = frozenset({"overhead_us", "exposed_share", "growth_kib", "growth_objects"})
_BUCKETS = [1 << 20, 4 << 20, 8 << 20, BUCKET_BYTES, 32 << 20, 128 << 20]
_CALLS = 1000

ModelOption = Annotated[str, typer.Option(help="Whose gradients fill the buckets: 23m, 124m or tiny.")]


def sync(
    model: ModelOption = "23m",
    link_rate: LinkOption = None,
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Measure overhead of a small call, what of the wire stays exposed behind computation, memory, and bucket sizes.

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
    """Return what targets can bound. Behind a link of unknown rate, what stays exposed says nothing."""
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
