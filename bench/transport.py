"""``python -m bench transport``: how long a small gather takes, and how much of a large one hides behind computation.

Runs under mpirun, torchrun or ``python -m bench cluster``; started alone, it starts two ranks under Open MPI by itself.
It measures the transport between nodes, so give every node one rank.
"""

import os
import sys
import time
from collections.abc import Callable

import typer

from bench.cluster.launchers import run_on_loopback
from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.tables import print_table
from flexcomm import Transport
from flexcomm.topology import RANKS_PER_NODE_VARIABLE, read_launcher

_OVERLAPS = ("overlap_native", "overlap_python")
_FIGURES = frozenset({"latency_us", *_OVERLAPS})
_SMALL_NBYTES = 1024
_LARGE_NBYTES = 4_000_000
_SMALL_ROUNDS = 200
"""Enough for a median; a small gather takes microseconds."""


def transport(json_file: JsonOption = None, quick: QuickOption = False, check: CheckOption = False) -> None:
    """Measure the transport between nodes: latency of a small gather, share of a large one that computation hides."""
    if read_launcher(os.environ).launcher == "none":
        raise typer.Exit(_start_two_ranks())
    import torch

    import flexcomm

    torch.set_num_threads(1)
    with flexcomm.connect() as world:
        figures = measure(world.inter, rounds=3 if quick else 9)
    if world.topology.rank == 0:
        raise typer.Exit(conclude(_report(world.inter, figures), json_file=json_file, check=check))


def _report(transport: "Transport", figures: dict[str, float]) -> Report:
    shown = [f"{figures['latency_us']:.0f}", *(f"{figures[name]:.0%}" for name in _OVERLAPS)]
    columns = ("transport", "1 KiB gather, us", "hidden behind torch", "hidden behind Python")
    print_table(f"{transport.size} nodes", columns, [(transport.name, *shown)], sys.stdout)
    rows = [{"transport": transport.name, "nodes": transport.size, **figures}]
    if RANKS_PER_NODE_VARIABLE not in os.environ:
        return Report("transport", _FIGURES, figures, rows)
    reason = "these nodes share memory and cores; use `python -m bench cluster --nodes 2 -- python -m bench transport`"
    latency = {"latency_us": figures["latency_us"]}
    return Report("transport", _FIGURES, latency, rows, unmeasured=dict.fromkeys(_OVERLAPS, reason))


def _start_two_ranks() -> int:
    command = [sys.executable, "-m", "bench", *sys.argv[1:]]
    return run_on_loopback(command, nodes=2, ranks_per_node=1, launcher="openmpi")


def measure(transport: "Transport", rounds: int) -> dict[str, float]:
    """Return latency and overlaps, from medians over rounds of the slowest rank's seconds."""
    import torch

    small = torch.zeros(_SMALL_NBYTES, dtype=torch.uint8)
    large = torch.zeros(_LARGE_NBYTES, dtype=torch.uint8)
    out = torch.empty(transport.size, _LARGE_NBYTES, dtype=torch.uint8)
    latency_s = slowest(transport, lambda: transport.all_gather(small).wait(), _SMALL_ROUNDS)
    alone_s = slowest(transport, lambda: transport.all_gather(large, out).wait(), rounds)

    def overlap(compute: Callable[[float], object]) -> float:
        """Return the share of the gather's time that vanishes when as much computation runs meanwhile."""

        def both() -> None:
            handle = transport.all_gather(large, out)
            compute(alone_s)
            handle.wait()

        return (2 * alone_s - slowest(transport, both, rounds)) / alone_s

    return {
        "latency_us": latency_s * 1e6,
        "overlap_native": overlap(compute_in_torch),
        "overlap_python": overlap(_compute_in_python),
    }


def slowest(transport: "Transport", body: Callable[[], object], rounds: int) -> float:
    """Return the median over rounds of the seconds that ``body`` takes on the slowest rank."""
    import torch

    seconds = torch.zeros(rounds, dtype=torch.float64)
    for i in range(rounds):
        transport.barrier().wait()
        start_s = time.perf_counter()
        body()
        seconds[i] = time.perf_counter() - start_s
    return float(transport.all_gather(seconds).wait().amax(dim=0).median())


def compute_in_torch(seconds: float) -> None:
    """Multiply matrices: torch releases Python's lock while it computes, as in any backward pass."""
    import torch

    matrix = torch.ones(256, 256)
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        matrix @ matrix


def _compute_in_python(seconds: float) -> int:
    """Count in pure Python, which releases the lock only every few milliseconds: the worst case."""
    counted = 0
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        counted += 1
    return counted
