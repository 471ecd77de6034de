"""``python -m bench sweep``: one collective on emulated clusters of several sizes, rates and launchers, in one table.

The measured time stands beside the time that the link allows. The table shows whether links are full, and whether the
cost is linear in the number of nodes.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from bench.cluster import Cluster, ClusterSpec, open_cluster
from bench.cluster.launchers import Launcher, find_launcher, parse_launcher
from bench.cluster.netns import check_available
from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude, parse_counts, split_words
from bench.tables import print_table

_SHARES = {"link_share_100mbit": "100mbit", "link_share_1gbit": "1gbit"}
_FIGURES = frozenset({*_SHARES, "growth_over_linear"})
_TIMEOUT_S = 300.0
_MB = 1e6
_QUICK_ITERATIONS = 3
_TARGET_NODES = 4


@dataclass(frozen=True)
class Row:
    """One collective on one cluster. ``link_s`` is the time of its bytes at the link's rate."""

    nodes: int
    rate: str
    launcher: str
    size_nbytes: int
    payload_nbytes: float
    wire_nbytes: float
    time_s: float
    encode_s: float
    decode_s: float
    inter_s: float
    link_s: float

    @property
    def share(self) -> float:
        return self.link_s / self.inter_s


@dataclass(frozen=True)
class SweepCase:
    """Arguments of ``bench collectives``, the same on every cluster."""

    least: str
    most: str
    factor: float
    compressor: str
    algorithm: str
    iterations: int

    def arguments(self) -> list[str]:
        """Return them as words of the command line."""
        sizes = ["-b", self.least, "-e", self.most, "-f", str(self.factor), "-n", str(self.iterations)]
        return [*sizes, "--compressor", self.compressor, "--algorithm", self.algorithm, "--no-baselines"]


def sweep(
    nodes: Annotated[str, typer.Option(metavar="N,...", help="Numbers of nodes, of one rank each.")] = "2,4,8",
    rates: Annotated[
        str, typer.Option(metavar="RATE,...", help="Rates of each link, in each direction.")
    ] = "100mbit,1gbit",
    launchers: Annotated[
        str, typer.Option(metavar="NAME,...", help="torchrun (gloo), openmpi, mpich.")
    ] = "torchrun,openmpi,mpich",
    least: Annotated[
        str, typer.Option("-b", "--minbytes", metavar="SIZE", help="Bytes of the smallest tensor.")
    ] = "2M",
    most: Annotated[str, typer.Option("-e", "--maxbytes", metavar="SIZE", help="Bytes of the largest.")] = "8M",
    factor: Annotated[float, typer.Option("-f", "--stepfactor", help="From one size to the next.")] = 4.0,
    compressor: Annotated[
        str, typer.Option(metavar="RECIPE", help="As `bench collectives` takes it.")
    ] = "dense:dtype=bf16",
    algorithm: Annotated[str, typer.Option(help="auto, gather, gatherv, reduce, two_phase or dense.")] = "gather",
    iterations: Annotated[int, typer.Option("-n", "--iterations", help="Timed calls of each line.")] = 5,
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Run one collective on every combination of nodes, rates and launchers, beside the time that the link allows.

    Needs root, as every emulated cluster does.
    """
    chosen = [parse_launcher(word) for word in split_words("--launchers", launchers)]
    counts = parse_counts("--nodes", nodes)
    specs = [ClusterSpec(number, 1, rate) for rate in split_words("--rates", rates) for number in counts]
    case = SweepCase(least, most, factor, compressor, algorithm, _QUICK_ITERATIONS if quick else iterations)
    check_available()
    for launcher in chosen:
        find_launcher(launcher)
    rows: list[Row] = []
    for spec in specs:
        with open_cluster(spec) as cluster:
            for launcher in chosen:
                print(f"{spec.nodes} nodes, {spec.rate}, {launcher} ...", file=sys.stderr, flush=True)
                rows += run_case(cluster, launcher, case)
    print_rows(rows, case)
    raise typer.Exit(conclude(make_report(rows, case), json_file=json_file, check=check))


def run_case(cluster: Cluster, launcher: Launcher, case: SweepCase) -> Iterator[Row]:
    """Yield the rows of ``bench collectives`` on a cluster."""
    with TemporaryDirectory(prefix="flexcomm-sweep-") as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, "-m", "bench", "collectives", *case.arguments(), "--json", str(found)]
        cluster.run_to_end(command, launcher=launcher, timeout_s=_TIMEOUT_S)
        lines = json.loads(found.read_text())["rows"]
    for line in lines:
        yield _row(line, cluster.spec, launcher)


def _row(line: dict[str, float], spec: ClusterSpec, launcher: Launcher) -> Row:
    return Row(
        nodes=spec.nodes,
        rate=spec.rate,
        launcher=launcher,
        size_nbytes=int(line["size_nbytes"]),
        payload_nbytes=line["payload_nbytes"],
        wire_nbytes=line["wire_nbytes"],
        time_s=line["time_median_s"],
        encode_s=line["encode_s"],
        decode_s=line["decode_s"],
        inter_s=line["inter_s"],
        link_s=8 * line["wire_nbytes"] / spec.rate_bits_per_s,
    )


def print_rows(rows: Sequence[Row], case: SweepCase) -> None:
    """Print one line for each, and how the time grows with the nodes: linear is 1 in the last column."""
    columns = ("launcher", "rate", "nodes", "payload MB", "time ms", "inter ms", "link ms", "share", "/ peer, ms")
    lines = [
        (
            row.launcher,
            row.rate,
            str(row.nodes),
            f"{row.payload_nbytes / _MB:.2f}",
            *(f"{1e3 * seconds:.1f}" for seconds in (row.time_s, row.inter_s, row.link_s)),
            f"{row.share:.0%}",
            f"{1e3 * row.inter_s / (row.nodes - 1):.1f}",
        )
        for row in rows
    ]
    title = f"{case.compressor}, {case.algorithm}: slowest rank, medians; link: payload bytes at the link's rate"
    print_table(title, columns, lines, sys.stdout)


def make_report(rows: Sequence[Row], case: SweepCase) -> Report:
    """Return the figures: the least share of a link by its rate, and the worst growth with the nodes."""
    figures, unmeasured = {}, {}
    for figure, rate in _SHARES.items():
        shares = [row.share for row in rows if row.nodes == _TARGET_NODES and row.rate == rate]
        if shares:
            figures[figure] = min(shares)
        else:
            unmeasured[figure] = f"no cluster of {_TARGET_NODES} nodes at {rate} was asked for"
    growths = [growth for row in rows for other in rows if (growth := _growth(other, row)) is not None]
    if growths:
        figures["growth_over_linear"] = max(growths)
    else:
        unmeasured["growth_over_linear"] = "only one number of nodes was asked for"
    return Report("sweep", _FIGURES, figures, [asdict(row) for row in rows], asdict(case), unmeasured)


def _growth(few: Row, many: Row) -> float | None:
    """Return by how much more than the number of peers the time between nodes grows; None if they do not compare."""
    alike = (few.rate, few.launcher, few.size_nbytes) == (many.rate, many.launcher, many.size_nbytes)
    if not alike or few.nodes >= many.nodes:
        return None
    return (many.inter_s / (many.nodes - 1)) / (few.inter_s / (few.nodes - 1))
