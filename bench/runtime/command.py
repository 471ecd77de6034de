"""``python -m bench runtime``: iteration times that the runtime model predicts, beside measured ones.

On emulated clusters, All-Reduce, decentralized Adam and FlexDeMo train a model whose computing is a sleep, as on an
accelerator that leaves the host's cores idle; optimizer steps, encoding, decoding, mixing and communication are real.
Some clusters calibrate the model, with computing and communicating apart. Its predictions for all others, which are
held out, are compared with their measured times.
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from bench.cluster import ClusterSpec
from bench.cluster.launchers import find_launcher, parse_launcher
from bench.cluster.netns import check_available
from bench.common_options import (
    CheckOption,
    JsonOption,
    QuickOption,
    Report,
    check_count,
    conclude,
    parse_counts,
    split_words,
)
from bench.errors import UsageError
from bench.runtime.cluster_runs import (
    FIGURE_CLUSTER,
    FIGURE_METHODS,
    FIGURE_STRAGGLER,
    ClusterShape,
    parse_clusters,
    plan_cluster_runs,
    run_clusters,
    swap_s,
)
from bench.runtime.fit import Fitted, fit
from bench.runtime.plan import METHODS, USUAL_METHODS, Job, Load
from bench.runtime.predictions import COLUMNS, Row, format_rows, make_rows, write_markdown
from bench.tables import print_table

FIGURES = frozenset({"worst_error", "decentralized_of_bound", "straggler_speedup"})
_WARMUPS = 4
_LEAST_SWAP_S = 0.5
_ROUNDS = 5
_QUICK_ROUNDS = 3
_QUICK_ITERATIONS = 6
_QUICK_SHARE = 8
_QUICK_KNOWN = [ClusterShape(2, "100mbit")]
_QUICK_GRID = [*_QUICK_KNOWN, ClusterShape(4, "100mbit")]


def runtime(
    nodes: Annotated[str, typer.Option(metavar="N,...", help="Numbers of nodes, of one rank each.")] = "2,4,8",
    rates: Annotated[
        str, typer.Option(metavar="RATE,...", help="Rates of each link, in each direction.")
    ] = "50mbit,100mbit,1gbit",
    calibrate: Annotated[
        str, typer.Option(metavar="N:RATE,...", help="The clusters that calibrate the model; all others are held out.")
    ] = "2:100mbit,4:1gbit",
    methods: Annotated[str, typer.Option(metavar="NAME,...", help=f"Some of {', '.join(METHODS)}.")] = USUAL_METHODS,
    parameters: Annotated[
        int, typer.Option(help="Of the model, fp32; rounded to whole chunks of DeMo.")
    ] = Load.parameters,
    buckets: Annotated[int, typer.Option(help="How many equal buckets the model is in.")] = Load.buckets,
    compute_ms: Annotated[
        str, typer.Option(metavar="F,B", help="Milliseconds of the forward and the backward pass.")
    ] = "290,580",
    straggler: Annotated[float, typer.Option(help="Percent by which one node, a new one each time, is slower.")] = 0.0,
    sigma: Annotated[float, typer.Option(help="Percent by which computing varies on every node.")] = 0.0,
    k: Annotated[int, typer.Option("-k", help="FlexDeMo's: of every 64 x 64 coefficients.")] = Load.k,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    iterations: Annotated[int, typer.Option("-n", "--iterations", help="Timed iterations of each method.")] = 12,
    launcher: Annotated[str, typer.Option(help="torchrun (gloo), openmpi or mpich.")] = "torchrun",
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the table to FILE, as docs have it.")
    ] = None,
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Predict the iterations of several methods on clusters that the model has not seen, and measure them.

    Seconds are medians over iterations, of the last node to finish; where a schedule has several phases, over whole
    periods. Needs root, as every emulated cluster does.
    """
    load = Load(parameters, buckets, *parse_compute(compute_ms), straggler / 100, sigma / 100, seed, k)
    job = Job(load, parse_methods(methods), iterations, _WARMUPS)
    grid = parse_grid(nodes, rates)
    known = parse_clusters("--calibrate", split_words("--calibrate", calibrate))
    check_job(job, [*grid, *known])
    started_by = parse_launcher(launcher)
    rounds = _ROUNDS
    if quick:
        job, grid, known, rounds = make_quick(job), _QUICK_GRID, _QUICK_KNOWN, _QUICK_ROUNDS
    check_available()
    find_launcher(started_by)
    results = list(run_clusters(plan_cluster_runs(grid, known, job, rounds), started_by))
    calibrations = [found for one in results if (found := one.calibration()) is not None]
    fitted = fit(calibrations, count_cores())
    rows = make_rows(results, fitted)
    print_findings(rows, fitted, job)
    if markdown is not None:
        write_markdown(rows, markdown)
    settings = {"launcher": started_by, "calibrations": [asdict(one) for one in calibrations]}
    report = make_report(rows, fitted, job, settings)
    raise typer.Exit(conclude(report, json_file=json_file, check=check))


def parse_compute(text: str) -> tuple[float, float]:
    """Return the seconds of the forward and the backward pass that ``F,B``, in milliseconds, names."""
    try:
        forward_ms, backward_ms = (float(word) for word in text.split(","))
    except ValueError:
        forward_ms = backward_ms = math.nan
    if not (forward_ms >= 0 and backward_ms > 0):
        raise UsageError(
            f"got --compute-ms {text!r}, needed two numbers, of which the second is above 0, as in 100,200."
        )
    return forward_ms / 1e3, backward_ms / 1e3


def parse_methods(text: str) -> tuple[str, ...]:
    """Return the names asked for, in the table's order."""
    wanted = split_words("--methods", text)
    if not set(wanted) <= METHODS.keys():
        raise UsageError(f"got --methods {text!r}, needed some of {', '.join(METHODS)}, with commas between.")
    return tuple(name for name in METHODS if name in wanted)


def parse_grid(nodes: str, rates: str) -> list[ClusterShape]:
    """Return all combinations."""
    counts = parse_counts("--nodes", nodes)
    return [ClusterShape(count, rate) for rate in split_words("--rates", rates) for count in counts]


def check_job(job: Job, clusters: Sequence[ClusterShape]) -> None:
    """Raise, before any cluster is opened, unless the job can run on all of them."""
    for cluster in clusters:
        ClusterSpec(cluster.nodes, 1, cluster.rate)
        check_count("--nodes", cluster.nodes, 2)
    for option, number in {"--buckets": job.load.buckets, "-n": job.iterations, "-k": job.load.k}.items():
        check_count(option, number, 1)
    check_count("--parameters", job.load.parameters, job.load.buckets)
    if not (job.load.straggler >= 0 and 0 <= job.load.sigma < 1):
        raise UsageError(
            f"got --straggler {100 * job.load.straggler:g} and --sigma {100 * job.load.sigma:g}, needed percents: "
            f"0 or more, and 0 to 99."
        )


def make_quick(job: Job) -> Job:
    """Return less of the same: a smaller model that computes for a shorter time, and fewer iterations."""
    load = replace(
        job.load,
        parameters=max(job.load.parameters // _QUICK_SHARE, job.load.buckets),
        forward_s=job.load.forward_s / _QUICK_SHARE,
        backward_s=job.load.backward_s / _QUICK_SHARE,
    )
    return replace(job, load=load, iterations=min(job.iterations, _QUICK_ITERATIONS))


def count_cores() -> int:
    """Return how many cores the nodes of an emulated cluster share."""
    return len(os.sched_getaffinity(0))


def print_findings(rows: Sequence[Row], fitted: Fitted, job: Job) -> None:
    """Print the fitted figures, and every row."""
    links = [
        (name, f"{1 / one.stretch:.0%}", f"{1e3 * one.latency_s:.3f}", f"{1e9 * one.host_s_per_byte:.2f}")
        for name, one in fitted.links.items()
    ]
    print_table(
        f"fitted to the clusters that calibrate; {fitted.cores} cores for all nodes",
        ("collective", "of the link's rate", "ms/message/node on a core", "ns/byte of all nodes"),
        links,
        sys.stdout,
    )
    load = job.load
    print_table(
        f"\nan iteration of {load.nbytes / 1e6:.1f} MB in {load.buckets} buckets: medians, last node; computing sleeps",
        COLUMNS,
        format_rows(rows),
        sys.stdout,
    )


def make_report(rows: Sequence[Row], fitted: Fitted, job: Job, told: Mapping[str, object]) -> Report:
    """Return the figures of the jobs that ran, and why others are missing."""
    figures: dict[str, float] = {}
    unmeasured: dict[str, str] = {}
    errors = [abs(row.error) for row in rows if row.held_out]
    if errors:
        figures["worst_error"] = max(errors)
    else:
        unmeasured["worst_error"] = "every cluster calibrates, so none was predicted unseen"
    figures |= find_figures(rows, job.load)
    if "decentralized_of_bound" in figures and swap_s(job.load, FIGURE_CLUSTER) < _LEAST_SWAP_S:
        del figures["decentralized_of_bound"]
        unmeasured["decentralized_of_bound"] = "the model is so small that messages cost more than their bytes"
    absent = FIGURES - figures.keys() - unmeasured.keys()
    unmeasured |= dict.fromkeys(sorted(absent), f"no cluster of {FIGURE_CLUSTER.nodes} nodes at {FIGURE_CLUSTER.rate}")
    settings = {**asdict(job), **told, "fitted": asdict(fitted)}
    return Report(
        "runtime", FIGURES, figures, [{**asdict(row), "error": row.error} for row in rows], settings, unmeasured
    )


def find_figures(rows: Sequence[Row], load: Load) -> dict[str, float]:
    """Return the figures of jobs that compute as long as swapping the whole model takes; none without such jobs."""
    whole_s = swap_s(load, FIGURE_CLUSTER)
    equal = [
        row for row in rows if row.is_at(FIGURE_CLUSTER) and math.isclose(row.compute_s, whole_s) and not row.sigma
    ]
    seconds = {(row.method, row.straggler): row.measured_s for row in equal}
    all_reduce, ours = FIGURE_METHODS
    steady_s, slower_s = seconds.get((ours, 0.0)), seconds.get((ours, FIGURE_STRAGGLER))
    all_reduce_s = seconds.get((all_reduce, FIGURE_STRAGGLER))
    if steady_s is None or slower_s is None or all_reduce_s is None:
        return {}
    return {"decentralized_of_bound": steady_s / whole_s, "straggler_speedup": all_reduce_s / slower_s}
