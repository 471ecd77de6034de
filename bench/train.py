"""``python -m bench train``: a small GPT learns Python from its standard library, by our methods and by AdamW.

Starts its own ranks, as nodes of this host or, with ``--rate``, on an emulated cluster. All methods see the same bytes
in the same order, and each the learning rate that a sweep found best for it.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from bench.cluster_command import LauncherOption, RanksOption
from bench.collectives_arguments import check_count
from bench.errors import BenchError, UsageError
from bench.habits import CheckOption, JsonOption, QuickOption, conclude
from bench.tables import print_table
from bench.train_methods import METHODS, parse_methods
from bench.train_model import SIZES, find_size
from bench.train_plan import Plan, Run, Settings, save_plan
from bench.train_plot import can_draw, draw_plot
from bench.train_rates import RATES_FILE, Choice, Swept, choose_rates, save_sweep
from bench.train_records import read_history
from bench.train_report import make_report
from bench.train_start import check_start, start_ranks
from bench.train_summary import Summary, columns_for, find_common_loss, format_rows, summarise
from bench.train_watch import watching

_QUICK_METHODS = "adamw,flexdemo-k32,flexdemo-sign,local-muon"
_QUICK_STEPS = 200
_QUICK_EVAL_EVERY = 20
_EVALUATIONS = 10
_EVAL_WINDOWS = 128

SizeOption = Annotated[str, typer.Option(help=f"The model: {', '.join(SIZES)}.")]
MethodsOption = Annotated[str, typer.Option(metavar="NAME,...", help=f"Some of {', '.join(METHODS)}; or all.")]
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
ShardOption = Annotated[bool, typer.Option("--shard", help="Shard the model inside each node, by FSDP2.")]
NodesOption = Annotated[int, typer.Option(help="How many nodes.")]
RateOption = Annotated[
    str | None, typer.Option(metavar="RATE", help="Emulate cables of this rate, such as 100mbit; needs root.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where records and plot go; without it, below runs/.")
]
SweepOption = Annotated[
    bool, typer.Option("--sweep", help="Try each method's learning rates with seed 0, and write down the losses.")
]
SweepStepsOption = Annotated[int, typer.Option(help="Optimizer steps of each run of a sweep.")]


def train(
    size: SizeOption = "small",
    methods: MethodsOption = "all",
    steps: StepsOption = 1000,
    seeds: SeedsOption = "0",
    lr: RateLrOption = None,
    windows: WindowsOption = None,
    eval_every: EvalOption = None,
    shard: ShardOption = False,
    nodes: NodesOption = 2,
    ranks_per_node: RanksOption = 2,
    rate: RateOption = None,
    launcher: LauncherOption = "openmpi",
    out: OutOption = None,
    sweep: SweepOption = False,
    sweep_steps: SweepStepsOption = 300,
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Train a small GPT on Python's standard library by several methods, and compare losses, bytes and seconds.

    Learning rates are those that ``--sweep`` found and wrote down.
    """
    if quick:
        size, methods = "tiny", _QUICK_METHODS if methods == "all" else methods
        steps, sweep_steps = min(steps, _QUICK_STEPS), min(sweep_steps, _QUICK_STEPS)
        eval_every = eval_every or _QUICK_EVAL_EVERY
    steps = sweep_steps if sweep else steps
    every = max(1, steps // _EVALUATIONS) if eval_every is None else eval_every
    batch = find_size(size).windows if windows is None else windows
    half = max(1, every // 2)
    settings = Settings(size, steps, batch, half, every, _EVAL_WINDOWS, shard, nodes, ranks_per_node, launcher, rate)
    names = parse_methods(methods)
    check_settings(settings, names)
    if sweep:
        raise typer.Exit(_sweep(Plan(settings, plan_sweep(names, lr)), _folder(out)))
    choices = choose_rates(size, names, lr)
    plan = Plan(settings, plan_runs(choices, _parse_seeds(seeds)))
    _tell_of_rates(choices)
    summaries = _run(plan, _folder(out))
    report = make_report(summaries, settings, quick=quick)
    raise typer.Exit(conclude(report, json_file=json_file, check=check))


def check_settings(settings: Settings, methods: Iterable[str]) -> None:
    """Raise, before any rank starts, unless all methods can be trained so."""
    check_count("--steps", settings.steps, 1)
    check_count("--batch", settings.windows, 1)
    check_count("--eval-every", settings.eval_every, 1)
    apart = [name for name in methods if settings.steps % METHODS[name].meets_every]
    if apart:
        every = METHODS[apart[0]].meets_every
        raise UsageError(f"got {settings.steps} steps, but nodes meet every {every} with {apart[0]}: give a multiple.")
    check_start(settings)


def plan_runs(choices: dict[str, Choice], seeds: Sequence[int]) -> tuple[Run, ...]:
    """Return all methods with the first seed, then all with the next: an interrupted run has whole rounds."""
    return tuple(Run(name, choice.lr, seed) for seed in seeds for name, choice in choices.items())


def plan_sweep(methods: Iterable[str], lr: float | None) -> tuple[Run, ...]:
    """Return every method with each learning rate of its grid, or with the one that is given."""
    return tuple(Run(name, rate, 0) for name in methods for rate in (METHODS[name].grid if lr is None else (lr,)))


def _run(plan: Plan, folder: Path) -> list[Summary]:
    """Train everything, show what came of it even if it was interrupted, and return that."""
    try:
        _train_all(plan, folder)
    finally:
        summaries = _summaries(plan, folder)
        if summaries:
            _show(summaries, plan.settings, folder)
        ended = sum(len(one.losses) + len(one.diverged) for one in summaries)
        if ended < len(plan.runs):
            print(f"interrupted: {ended} of {len(plan.runs)} runs ended", flush=True)
    return summaries


def _sweep(plan: Plan, folder: Path) -> int:
    """Try all learning rates, and write the losses down, even if it was interrupted."""
    try:
        _train_all(plan, folder)
    finally:
        found: dict[str, dict[float, float | None]] = {}
        for one in _summaries(plan, folder):
            found.setdefault(one.method, {})[one.lr] = one.loss
        _show_sweep(save_sweep(plan.settings, found))
    return 0


def _train_all(plan: Plan, folder: Path) -> None:
    save_plan(plan, folder)
    print(f"records: {folder}/*.jsonl", flush=True)
    with watching(plan, folder):
        code = start_ranks(plan.settings, folder)
    if code:
        raise BenchError(f"the ranks ended with exit code {code}; see above. What they noted is in {folder}.")


def _summaries(plan: Plan, folder: Path) -> list[Summary]:
    return summarise({run: read_history(run, folder) for run in plan.runs})


def _show(summaries: Sequence[Summary], settings: Settings, folder: Path) -> None:
    print()
    print_table(describe(settings), columns_for(find_common_loss(summaries)), format_rows(summaries), sys.stdout)
    print("val loss in nats per byte; MB sent by a node; s to: the least loss that all of them reached")
    for one in summaries:
        for reason in one.diverged:
            print(f"{one.method} diverged {reason}")
    _draw(summaries, settings, folder / "train.png")


def _draw(summaries: Sequence[Summary], settings: Settings, file: Path) -> None:
    if not can_draw():
        print("no plot: it needs matplotlib, the extra `report`: `pip install '.[report]'` in the checkout")
    elif find_common_loss(summaries) is not None:
        draw_plot(summaries, describe(settings), file)
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
    """Return what was trained, in a line."""
    link = "one host" if settings.rate is None else f"links of {settings.rate}"
    held = "sharded in the node" if settings.shard else "whole on every rank"
    tokens = settings.windows * find_size(settings.size).context
    return (
        f"{settings.size} GPT, {held}, {settings.nodes} nodes x {settings.ranks_per_node} ranks ({settings.launcher}), "
        f"{link}, {settings.steps} steps of {tokens} bytes a rank"
    )


def _tell_of_rates(choices: dict[str, Choice]) -> None:
    for name, choice in choices.items():
        print(f"lr of {name}: {choice.lr:g} ({choice.source})")


def _folder(out: Path | None) -> Path:
    """Return a folder that is there, and was not used by another run."""
    folder = out or Path("runs") / f"bench-train-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}. Give --out another folder.") from error
    if any(folder.glob("*.jsonl")):
        raise UsageError(f"{folder} holds the records of another run: give --out another folder.")
    return folder


def _parse_seeds(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise UsageError(f"got --seeds {text!r}, needed whole numbers, with commas between.")
    return list(dict.fromkeys(map(int, words)))
