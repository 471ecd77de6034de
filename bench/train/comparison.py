"""Training by several methods, for all commands that train: plan runs, start ranks, watch them, show the results.

Ranks run as nodes of this host or, with a rate, on an emulated cluster.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from bench.cluster import ClusterSpec, open_cluster
from bench.cluster.launchers import check_counts, find_launcher, parse_launcher, run_on_loopback
from bench.cluster.netns import check_available
from bench.common_options import check_count, parse_counts
from bench.errors import BenchError, UsageError
from bench.tables import print_table
from bench.train.learning_rates import RATES_FILE, Choice, Swept, choose_rates, save_sweep
from bench.train.methods import ALL_METHODS
from bench.train.model import SIZES, find_size
from bench.train.plan import Plan, Run, Settings, save_plan
from bench.train.records import read_history
from bench.train.summary import Summary, can_draw, draw_plot, find_common_loss, summarise
from bench.train.watch import watching
from flexcomm.topology import read_launcher

SizeOption = Annotated[str, typer.Option(help=f"The model: {', '.join(SIZES)}.")]
StepsOption = Annotated[int, typer.Option(help="Optimizer steps of each run.")]
SeedsOption = Annotated[str, typer.Option(metavar="N,...", help="A run of every method for each of these.")]
WindowsOption = Annotated[
    int | None, typer.Option("--batch", help="Windows a rank takes for a step; without it, what fits the size.")
]
RateLrOption = Annotated[
    float | None,
    typer.Option("--lr", help="For all methods, instead of what a sweep found; with --sweep, the only one to try."),
]
EvalOption = Annotated[
    int | None, typer.Option("--eval-every", help="Steps between validations; without it, a tenth of all.")
]
NodesOption = Annotated[int, typer.Option(help="How many nodes.")]
RateOption = Annotated[
    str | None, typer.Option(metavar="RATE", help="Emulate links of this rate, such as 100mbit; needs root.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where records and plot go; without it, below runs/.")
]
SweepOption = Annotated[
    bool, typer.Option("--sweep", help="Try each method's learning rates with seed 0, and write down the losses.")
]
SweepStepsOption = Annotated[int, typer.Option(help="Optimizer steps of each run of a sweep.")]


_EVALUATIONS = 10
_EVAL_WINDOWS = 128


class Table(NamedTuple):
    """The table of all methods, and a legend of its columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: str


@dataclass(frozen=True)
class Comparison:
    """A command that trains: its name, the baseline, and the functions that show its progress and results."""

    name: str
    baseline: str
    tabulate: Callable[[Sequence[Summary]], Table]
    watch: Callable[[Plan, Path], AbstractContextManager[None]] = watching
    draw: Callable[[Sequence[Summary], str, Path, str], None] = draw_plot
    title: Callable[[Settings], str] = lambda settings: describe(settings)


# Any: fields of Settings, which checks their names.
def plan_settings(size: str, steps: int, windows: int | None, eval_every: int | None, **rest: Any) -> Settings:
    """Return settings; by default, windows are those of the size, and there are ten validations."""
    every = max(1, steps // _EVALUATIONS) if eval_every is None else eval_every
    return Settings(
        size=size,
        steps=steps,
        windows=find_size(size).windows if windows is None else windows,
        log_every=max(1, every // 2),
        eval_every=every,
        eval_windows=_EVAL_WINDOWS,
        **rest,
    )


def check_settings(settings: Settings, methods: Iterable[str]) -> None:
    """Raise, before any rank starts, unless all methods can be trained with these settings."""
    check_count("--steps", settings.steps, 1)
    check_count("--batch", settings.windows, 1)
    check_count("--eval-every", settings.eval_every, 1)
    apart = [name for name in methods if settings.steps % ALL_METHODS[name].sync_every]
    if apart:
        every = ALL_METHODS[apart[0]].sync_every
        raise UsageError(
            f"got {settings.steps} steps, but nodes synchronise every {every} with {apart[0]}: give a multiple."
        )
    check_start(settings)


def plan_runs(choices: dict[str, Choice], seeds: Sequence[int]) -> tuple[Run, ...]:
    """Return all methods with the first seed, then all with the next: an interrupted comparison has whole rounds."""
    return tuple(Run(name, choice.lr, seed) for seed in seeds for name, choice in choices.items())


def plan_sweep(methods: Iterable[str], lr: float | None) -> tuple[Run, ...]:
    """Return every method with each learning rate of its grid, or with the one that is given."""
    return tuple(Run(name, rate, 0) for name in methods for rate in (ALL_METHODS[name].grid if lr is None else (lr,)))


def run_comparison(
    comparison: Comparison, settings: Settings, methods: Iterable[str], lr: float | None, seeds: str, out: Path | None
) -> list[Summary]:
    """Train everything, show the results even if interrupted, and return them."""
    choices = choose_rates(settings.size, methods, lr)
    plan = Plan(settings, plan_runs(choices, list(dict.fromkeys(parse_counts("--seeds", seeds)))))
    for name, choice in choices.items():
        print(f"lr of {name}: {choice.lr:g} ({choice.source})")
    folder = _folder(out, comparison)
    try:
        _train_all(comparison, plan, folder)
    finally:
        summaries = _summaries(plan, folder)
        if summaries:
            _show(comparison, summaries, settings, folder)
        ended = sum(len(one.losses) + len(one.diverged) for one in summaries)
        if ended < len(plan.runs):
            print(f"interrupted: {ended} of {len(plan.runs)} runs ended", flush=True)
    return summaries


def sweep_rates(
    comparison: Comparison, settings: Settings, methods: Iterable[str], lr: float | None, out: Path | None
) -> None:
    """Try all learning rates, and save the losses, even if interrupted."""
    plan, folder = Plan(settings, plan_sweep(methods, lr)), _folder(out, comparison)
    try:
        _train_all(comparison, plan, folder)
    finally:
        found: dict[str, dict[float, float | None]] = {}
        for one in _summaries(plan, folder):
            found.setdefault(one.method, {})[one.lr] = one.loss
        _show_sweep(save_sweep(settings, found))


def _train_all(comparison: Comparison, plan: Plan, folder: Path) -> None:
    save_plan(plan, folder)
    print(f"records: {folder}/*.jsonl", flush=True)
    with comparison.watch(plan, folder):
        code = start_ranks(plan.settings, folder)
    if code:
        raise BenchError(f"the ranks ended with exit code {code}; see above. Their records are in {folder}.")


def _summaries(plan: Plan, folder: Path) -> list[Summary]:
    return summarise({run: read_history(run, folder) for run in plan.runs})


def _show(comparison: Comparison, summaries: Sequence[Summary], settings: Settings, folder: Path) -> None:
    table = comparison.tabulate(summaries)
    print()
    print_table(comparison.title(settings), table.columns, table.rows, sys.stdout)
    print(table.legend)
    for one in summaries:
        for reason in one.diverged:
            print(f"{one.method} diverged {reason}")
    _draw(comparison, summaries, settings, folder / f"{comparison.name}.png")


def _draw(comparison: Comparison, summaries: Sequence[Summary], settings: Settings, file: Path) -> None:
    if not can_draw():
        print("no plot: it needs matplotlib, the extra `report`: `pip install '.[report]'` in the checkout")
    elif find_common_loss(summaries) is not None:
        comparison.draw(summaries, comparison.title(settings), file, comparison.baseline)
        print(f"plot: {file}", flush=True)


def _show_sweep(known: Mapping[str, Swept]) -> None:
    rows = []
    for name, swept in known.items():
        for lr, loss in swept.losses.items():
            best = "" if lr != swept.best else "best, at the edge" if swept.is_at_edge else "best"
            rows.append((name, f"{lr:g}", "diverged" if loss is None else f"{loss:.4f}", best))
    print()
    print_table("learning rates", ("method", "lr", "val loss", ""), rows, sys.stdout)
    print(f"written to {RATES_FILE.name}")


def describe(settings: Settings) -> str:
    """Return the settings in a line."""
    link = "one host" if settings.rate is None else f"links of {settings.rate} ({settings.links})"
    held = "sharded in the node" if settings.shard else "whole on every rank"
    tokens = settings.windows * find_size(settings.size).context
    paced = f", {settings.compute_ms:g} ms of computing" if settings.compute_ms else ""
    length = f"{settings.steps} steps" if settings.seconds is None else f"{settings.seconds:g} s"
    slowed = f", one node {settings.straggler_percent:g} % slower" if settings.straggler_percent else ""
    return (
        f"{settings.size} GPT, {held}, {settings.nodes} nodes x {settings.ranks_per_node} ranks ({settings.launcher}), "
        f"{link}, {length}, {tokens} bytes a rank and step{paced}{slowed}"
    )


def _folder(out: Path | None, comparison: Comparison) -> Path:
    """Make and return a folder that holds no records of another run."""
    folder = out or Path("runs") / f"bench-{comparison.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}. Give --out another folder.") from error
    if any(folder.glob("*.jsonl")):
        raise UsageError(f"{folder} holds the records of another run: give --out another folder.")
    return folder


def check_start(settings: Settings) -> None:
    """Raise, before anything is written, unless ranks can be started as asked."""
    _check_not_a_rank()
    check_counts(settings.nodes, settings.ranks_per_node)
    find_launcher(parse_launcher(settings.launcher))
    if settings.rate is not None:
        ClusterSpec(settings.nodes, settings.ranks_per_node, settings.rate)
        if settings.links == "namespaces":
            check_available()


def _check_not_a_rank() -> None:
    launcher = read_launcher(os.environ).launcher
    if launcher != "none":
        raise UsageError(
            f"this process is a rank that {launcher} started, but this command starts ranks itself: run it without a "
            f"launcher, or, on real nodes, let the launcher run `python -m bench.train.rank DIR` with the plan.json of "
            f"another run in DIR."
        )


def start_ranks(settings: Settings, folder: Path) -> int:
    """Run the plan in ``folder``, and return the exit code of its ranks."""
    command = [sys.executable, "-m", "bench.train.rank", str(folder.resolve())]
    launcher = parse_launcher(settings.launcher)
    nodes, ranks_per_node = settings.nodes, settings.ranks_per_node
    if settings.rate is None or settings.links == "paced":
        return run_on_loopback(command, nodes=nodes, ranks_per_node=ranks_per_node, launcher=launcher)
    with open_cluster(ClusterSpec(nodes, ranks_per_node, settings.rate)) as cluster:
        return cluster.run_attached(command, launcher=launcher)
