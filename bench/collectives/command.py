"""``python -m bench collectives``: the cost of averaging a tensor, by size and compressor, beside a plain all-reduce.

In the manner of nccl-tests: the same options, a line for each size, results checked in the same run. Runs under mpirun,
torchrun or ``python -m bench cluster``; started alone, it starts two ranks as two nodes of this host by itself.
"""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from typing import Annotated

import torch
import typer

import flexcomm
from bench.cluster.launchers import start_two_ranks
from bench.cluster.links import Link, describe_link, find_link
from bench.collectives.arguments import (
    NamedCompressor,
    parse_algorithm,
    parse_compressor,
    parse_dtype,
    parse_size,
    plan_shape,
    plan_sizes,
)
from bench.collectives.measure import Case, Row, find_link_share, measure
from bench.collectives.methods import AllReduce, Method, Sync
from bench.collectives.output import Printer, check_plot_possible, draw_plot, show_number, write_csv
from bench.common_options import CheckOption, JsonOption, LinkOption, QuickOption, Report, check_count, conclude
from bench.errors import UsageError
from bench.world import describe_world
from flexcomm import AlgorithmOption as Algorithm
from flexcomm import InvalidArgumentError, World
from flexcomm.topology import read_launcher

_FIGURES = frozenset({"wrong", "link_share", "effective_mb_per_s"})
_COMPRESSORS = ("demo:k=32", "top_k:rate=1/32", "random_k:rate=1/32", "sign", "dense")
_BASELINES = ("fp32", "bf16")
_QUICK_MOST = 1 << 20
_QUICK_ITERATIONS = 5

AlgorithmOption = Annotated[str, typer.Option(help="auto, gather, gatherv, reduce, two_phase or dense.")]


@dataclass(frozen=True)
class Settings:
    """Sizes, compressors and repetitions to measure."""

    shapes: tuple[tuple[int, int], ...]
    iterations: int
    warmups: int
    checked: bool
    compressors: tuple[NamedCompressor, ...]
    algorithm: Algorithm
    dtype_name: str
    baselines: tuple[str, ...] = _BASELINES

    @property
    def dtype(self) -> torch.dtype:
        return parse_dtype(self.dtype_name)

    def case(self, shape: tuple[int, int]) -> Case:
        return Case(shape, self.dtype, self.dtype_name, self.iterations, self.warmups, self.checked)


@dataclass
class Findings:
    """Rows measured so far; an interrupted run reports them."""

    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        return sum(row.wrong or 0 for row in self.rows)


def collectives(
    least: Annotated[
        str, typer.Option("-b", "--min-bytes", metavar="SIZE", help="The least size, such as 64K.")
    ] = "4K",
    most: Annotated[
        str, typer.Option("-e", "--max-bytes", metavar="SIZE", help="The largest size, such as 64M.")
    ] = "16M",
    factor: Annotated[float, typer.Option("-f", "--step-factor", help="From one size to the next.")] = 8.0,
    iterations: Annotated[int, typer.Option("-n", "--iterations", help="Timed calls for each line.")] = 10,
    warmups: Annotated[int, typer.Option("-w", "--warmup-iterations", help="Calls before, which do not count.")] = 2,
    check_results: Annotated[int, typer.Option("-c", "--check-results", help="1: check the results, 0: do not.")] = 1,
    compressor: Annotated[
        list[str],
        typer.Option(metavar="RECIPE:NAME=VALUE,...", help="A recipe and its arguments, demo:k=32; may be repeated."),
    ] = list(_COMPRESSORS),  # noqa: B006  (typer copies it)
    algorithm: AlgorithmOption = "auto",
    dtype: Annotated[str, typer.Option(help="What the tensors hold: fp32, bf16 or fp16.")] = "fp32",
    baselines: Annotated[bool, typer.Option(help="Also all-reduce everything, in fp32 and bf16.")] = True,
    link_rate: LinkOption = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the table to FILE.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the table into FILE (.png).")
    ] = None,
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Average tensors over all ranks, by size and compressor, beside an all-reduce of everything.

    Times are of the slowest rank, medians over iterations. Results are checked in the same run, on inputs whose average
    is exactly known; the code to exit with is 1 if an element is wrong.
    """
    most_nbytes = min(parse_size(most), _QUICK_MOST) if quick else parse_size(most)
    check_count("-n", iterations, 1)
    check_count("-w", warmups, 0)
    if check_results not in (0, 1):
        raise UsageError(f"got -c {check_results}, needed 0 or 1.")
    settings = Settings(
        shapes=plan_shapes(parse_size(least), most_nbytes, factor, dtype),
        iterations=min(iterations, _QUICK_ITERATIONS) if quick else iterations,
        warmups=warmups,
        checked=bool(check_results),
        compressors=tuple(parse_compressor(text) for text in compressor),
        algorithm=parse_algorithm(algorithm),
        dtype_name=dtype,
        baselines=_BASELINES if baselines else (),
    )
    link = find_link(link_rate)
    if plot is not None:
        check_plot_possible(plot)
    if read_launcher(os.environ).launcher == "none":
        raise typer.Exit(start_two_ranks())
    torch.set_num_threads(1)
    with flexcomm.connect() as world:
        methods, skipped = plan_methods(settings, world)
        findings = Findings(skipped=skipped)
        _run(settings, methods, world, link, findings)
    if world.topology.rank == 0:
        if csv_file is not None:
            write_csv(findings.rows, csv_file)
        if plot is not None:
            draw_plot(findings.rows, f"{describe_world(world)}; {describe_link(link)}", plot)
        code = conclude(make_report(findings, settings, link), json_file=json_file, check=check)
        raise typer.Exit(code or int(findings.wrong > 0))


def plan_shapes(least_nbytes: int, most_nbytes: int, factor: float, dtype: str) -> tuple[tuple[int, int], ...]:
    """Return the shapes of all sizes, each once: small sizes that are close come to the same shape."""
    itemsize = parse_dtype(dtype).itemsize
    return tuple(dict.fromkeys(plan_shape(size, itemsize) for size in plan_sizes(least_nbytes, most_nbytes, factor)))


def plan_methods(settings: Settings, world: World) -> tuple[list[Method], list[str]]:
    """Return the methods to measure, and the reasons why some that were asked for are skipped."""
    methods: list[Method] = []
    skipped = []
    for asked in settings.compressors:
        method = Sync(asked, settings.algorithm, world)
        try:
            for shape in settings.shapes:
                method.plan(settings.case(shape).spec)
        except InvalidArgumentError as error:
            skipped.append(f"{asked.name}: {error}")
        else:
            methods.append(method)
    if not methods:
        raise UsageError(f"nothing to measure: {'; '.join(skipped)}")
    return [*(AllReduce(name, world) for name in settings.baselines), *methods], skipped


def _run(settings: Settings, methods: Sequence[Method], world: World, link: Link | None, findings: Findings) -> None:
    """Measure everything; rank 0 prints it. The rows so far are also printed if it is interrupted."""
    total = len(methods) * len(settings.shapes)
    first = world.topology.rank == 0
    printer = Printer([method.name for method in methods], total) if first else None
    if printer:
        printer.start(describe(settings, world, link))
    try:
        for shape in settings.shapes:
            case = settings.case(shape)
            for method in methods:
                if printer:
                    printer.announce(f"{case.nbytes:,} bytes, {method.name}")
                findings.rows.append(measure(method, case, world, link))
                if printer:
                    printer.add(findings.rows[-1])
    finally:
        if printer:
            printer.finish(findings.rows, conclude_lines(findings, total))


def describe(settings: Settings, world: World, link: Link | None) -> list[str]:
    """Return the lines above the table."""
    packages = [f"{name} {_version(name)}" for name in ("flexcomm", "torch", "numpy", "mpi4py")]
    arguments = [word for word in sys.argv[1:] if word != "collectives"]
    return [
        f"bench collectives: {', '.join(packages)}, Python {platform.python_version()}",
        describe_world(world),
        f"{describe_link(link)}; tensors on {world.device}",
        f"arguments: {shlex.join(arguments) or 'none'}; {settings.iterations} iterations after {settings.warmups}",
        "time: slowest rank; effbw: dense bytes / time; wire: bytes from node to node; wirebw: a node's wire / inter",
    ]


def conclude_lines(findings: Findings, total: int) -> list[str]:
    """Return the lines under the table."""
    lines = [f"skipped {reason}" for reason in findings.skipped]
    if len(findings.rows) < total:
        lines.append(f"interrupted: {len(findings.rows)} of {total} lines were measured")
    if any(row.wrong is not None for row in findings.rows):
        lines.append(f"Out of bounds values : {findings.wrong} {'FAILED' if findings.wrong else 'OK'}")
    names = dict.fromkeys(row.compressor for row in findings.rows)
    averages = [f"{name} {show_number(average_mb_per_s(findings.rows, name))}" for name in names]
    return [*lines, f"Avg effective bandwidth, MB/s : {', '.join(averages) or 'nothing measured'}"]


def average_mb_per_s(rows: Sequence[Row], name: str) -> float:
    """Return the mean over sizes, as nccl-tests averages."""
    return mean(row.effective_bytes_per_s for row in rows if row.compressor == name) / 1e6


def make_report(findings: Findings, settings: Settings, link: Link | None) -> Report:
    """Return the figures that targets can bound, and all rows."""
    baselines = frozenset(f"all-reduce {name}" for name in settings.baselines)
    figures: dict[str, float] = {}
    unmeasured: dict[str, str] = {}
    ours = [name for name in dict.fromkeys(row.compressor for row in findings.rows) if name not in baselines]
    figures["effective_mb_per_s"] = mean(average_mb_per_s(findings.rows, name) for name in ours)
    share = find_link_share(findings.rows, baselines)
    if share is not None:
        figures["link_share"] = share
    elif link is None:
        unmeasured["link_share"] = "what the link carries is not known: give --link-rate, or run in `bench cluster`"
    else:
        unmeasured["link_share"] = "no payload of 1 MB or more crossed the link: give a larger -e"
    if settings.checked:
        figures["wrong"] = float(findings.wrong)
    else:
        unmeasured["wrong"] = "-c 0 leaves results unchecked"
    said = {**asdict(settings), "link_rate_bits_per_s": link.rate_bits_per_s if link else None}
    said["compressors"] = [asked.name for asked in settings.compressors]
    return Report("collectives", _FIGURES, figures, [asdict(row) for row in findings.rows], said, unmeasured)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"
