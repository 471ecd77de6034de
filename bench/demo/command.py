"""``python -m bench demo``: a small GPT trained for equal seconds over slow links, by AdamW and three of our methods.

As root, links are those of an emulated cluster; else they are paced in software (``bench.paced``). The ranks
are those of ``bench train``.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.cluster import ClusterSpec, open_cluster
from bench.cluster.command import RanksOption
from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.demo.results import BASELINE, HEADLINE, LABELS, chart, conclusion, draw, sooner, tabulate, title
from bench.errors import ClusterUnavailableError, RateNotKeptError, UsageError
from bench.tables import is_terminal
from bench.train.comparison import Comparison, OutOption, check_settings, plan_settings, run_comparison
from bench.train.plan import Links, Plan, Run, Settings
from bench.train.records import Ending, Evaluation, Interval, Record, Start
from bench.train.summary import Summary
from bench.train.watch import following

_EVAL_WINDOWS = 64
_FIGURES = frozenset({"sooner", "total_s", "replicas_differ"})


def demo(
    links: Annotated[
        Literal["auto", "paced", "namespaces"],
        typer.Option(help="Links paced in software, or network namespaces (root); auto: namespaces where they work."),
    ] = "auto",
    rate: Annotated[str, typer.Option(metavar="RATE", help="Of each node's link, in each direction.")] = "10mbit",
    seconds: Annotated[float, typer.Option(help="How long each method trains.")] = 13.0,
    ranks_per_node: RanksOption = 1,
    out: OutOption = None,
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Train a small GPT on two nodes over slow links, and compare the losses of methods after equal seconds."""
    begin_s = time.perf_counter()
    if not 0 < seconds < float("inf"):
        raise UsageError(f"got --seconds {seconds}, needed a number above 0.")
    settings = plan_settings(
        "tiny" if quick else "demo",
        1,
        None,
        1,
        shard=False,
        nodes=2,
        ranks_per_node=ranks_per_node,
        launcher="torchrun",
        rate=rate,
        links="paced",
        seconds=min(seconds, 1.0) if quick else seconds,
    )
    settings = replace(settings, eval_windows=_EVAL_WINDOWS)
    methods = (BASELINE, HEADLINE) if quick else tuple(LABELS)
    settings = replace(settings, links=find_links(links, settings))
    check_settings(settings, ())
    kernels_s = prepare_kernels()
    summaries = run_comparison(_COMPARISON, settings, methods, None, "0", out)
    total_s = time.perf_counter() - begin_s - kernels_s
    print(chart(summaries))
    print(conclusion(summaries))
    print(f"all of it took {total_s:.0f} s, kernels not counted", flush=True)
    report = make_report(summaries, settings, total_s, quick=quick)
    raise typer.Exit(conclude(report, json_file=json_file, check=check))


def find_links(asked: Literal["auto", "paced", "namespaces"], settings: Settings) -> Links:
    """Return the links to use; ``auto`` is network namespaces if this machine can make them, else paced."""
    if asked != "auto":
        return asked
    try:
        with open_cluster(ClusterSpec(settings.nodes, settings.ranks_per_node, str(settings.rate))):
            return "namespaces"
    except (ClusterUnavailableError, RateNotKeptError) as error:
        reason = str(error).split(". ")[0]
        print(f"links are paced in software: {reason}", flush=True)
        return "paced"


def prepare_kernels() -> float:
    """Compile all CPU kernels that are not yet compiled, and return the seconds it took."""
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", "flexcomm.kernels"], check=True)
    return time.perf_counter() - begin_s


def make_report(summaries: Sequence[Summary], settings: Settings, total_s: float, *, quick: bool) -> Report:
    """Return how much sooner FlexDeMo was, or why that is unknown, and a row for each method."""
    figures = {"total_s": total_s, "replicas_differ": float(sum(not one.replicas_equal for one in summaries))}
    times = sooner(summaries).get(HEADLINE)
    unmeasured = {}
    if quick:
        unmeasured["sooner"] = "--quick trains too little, and too small a model"
    elif times is None:
        unmeasured["sooner"] = f"{HEADLINE} did not reach the loss of {BASELINE}"
    else:
        figures["sooner"] = times
    rows = [{**asdict(one), "loss": one.loss} for one in summaries]
    return Report("demo", _FIGURES, figures, rows, asdict(settings), unmeasured)


class Progress:
    """Progress of a run: its steps, seconds of training, and last losses."""

    def __init__(self) -> None:
        self.step, self.train_s = 0, 0.0
        self.losses: dict[str, float] = {}
        self.diverged = ""

    def add(self, record: Record) -> None:
        """Update the progress with a record of the run."""
        match record:
            case Start():
                pass
            case Evaluation():
                self.step, self.train_s = record.step, record.train_s
                self.losses["validation loss"] = record.loss
            case Interval():
                # None of these steps is new if an evaluation, which is noted first, ended there.
                self.train_s += (record.step - self.step) * record.step_s
                self.step = record.step
                self.losses["training loss"] = record.loss
            case Ending():
                self.diverged = f"diverged {record.diverged}" if record.diverged else ""

    def __str__(self) -> str:
        losses = ", ".join(f"{name} {loss:.2f}" for name, loss in self.losses.items())
        return f"{self.train_s:5.1f} s  step {self.step:4d}  {self.diverged or losses}"


@contextmanager
def watching(plan: Plan, folder: Path) -> Iterator[None]:
    """Show the records of ``folder`` until the block ends: as a bar for each run, or as lines without a terminal."""
    seen = {run: Progress() for run in plan.runs}
    with _bars(plan) if is_terminal(sys.stdout) else _lines() as show:

        def take(run: Run, _steps: int, record: Record) -> None:
            seen[run].add(record)
            show(run, seen[run], record)

        with following(plan, folder, take):
            yield


@contextmanager
def _lines() -> Iterator[Callable[[Run, Progress, Record], None]]:
    def show(run: Run, progress: Progress, record: Record) -> None:
        if isinstance(record, Evaluation):
            print(f"{LABELS[run.method]:{_width()}}  {progress}", flush=True)

    print("starting the ranks ...", flush=True)
    yield show


@contextmanager
def _bars(plan: Plan) -> Iterator[Callable[[Run, Progress, Record], None]]:
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (SpinnerColumn(finished_text=" "), TextColumn("{task.description}"), BarColumn(bar_width=20))
    with Bars(*columns, TextColumn("{task.fields[said]}")) as bars:
        tasks = {
            run: bars.add_task(f"{LABELS[run.method]:{_width()}}", total=plan.settings.seconds, said="waiting")
            for run in plan.runs
        }
        bars.update(tasks[plan.runs[0]], said="starting the ranks")

        def show(run: Run, progress: Progress, _record: Record) -> None:
            bars.update(tasks[run], completed=progress.train_s, said=str(progress))

        yield show


def _width() -> int:
    return max(map(len, LABELS.values()))


_COMPARISON = Comparison("demo", BASELINE, tabulate, watching, draw, title)
