"""``python -m bench train``: a small GPT learns Python from its standard library, by our methods and by AdamW.

Starts its own ranks, as nodes of this host or, with ``--rate``, on an emulated cluster. All methods see the same bytes
in the same order, and each the learning rate that a sweep found best for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from bench.cluster.command import LauncherOption, RanksOption
from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.train.comparison import (
    Comparison,
    EvalOption,
    NodesOption,
    OutOption,
    RateLrOption,
    RateOption,
    SeedsOption,
    SizeOption,
    StepsOption,
    SweepOption,
    SweepStepsOption,
    Table,
    WindowsOption,
    check_settings,
    plan_settings,
    run_comparison,
    sweep_rates,
)
from bench.train.methods import BASELINE, METHODS, parse_methods
from bench.train.plan import Settings
from bench.train.summary import Summary, columns_for, find_baseline, find_common_loss, format_rows, seconds_to

_QUICK_METHODS = "adamw,flexdemo-k32,flexdemo-sign,local-muon"
_QUICK_STEPS = 200
_QUICK_EVAL_EVERY = 20
_HEADLINE = "flexdemo-sign"
_RATIOS: Mapping[str, Callable[[Summary, Summary, float], float]] = {
    "loss_ratio": lambda ours, base, _: (ours.loss or 0.0) / (base.loss or 1.0),
    "bytes_saved": lambda ours, base, _: base.sent_nbytes / ours.sent_nbytes,
    "speedup": lambda ours, base, loss: _seconds(base, loss) / _seconds(ours, loss),
}
"""Figures, from the summaries of FlexDeMo and of the baseline, and a loss that both reached."""
KNOWN_FIGURES = frozenset({*_RATIOS, "replicas_differ", "diverged"})


def train(
    size: SizeOption = "small",
    methods: Annotated[str, typer.Option(metavar="NAME,...", help=f"Some of {', '.join(METHODS)}; or all.")] = "all",
    steps: StepsOption = 1000,
    seeds: SeedsOption = "0",
    lr: RateLrOption = None,
    windows: WindowsOption = None,
    eval_every: EvalOption = None,
    shard: Annotated[bool, typer.Option("--shard", help="Shard the model inside each node, by FSDP2.")] = False,
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
    settings = plan_settings(
        size,
        sweep_steps if sweep else steps,
        windows,
        eval_every,
        shard=shard,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        launcher=launcher,
        rate=rate,
    )
    names = parse_methods(methods)
    check_settings(settings, names)
    if sweep:
        sweep_rates(_COMPARISON, settings, names, lr, out)
        return
    summaries = run_comparison(_COMPARISON, settings, names, lr, seeds, out)
    report = make_report(summaries, settings, quick=quick)
    raise typer.Exit(conclude(report, json_file=json_file, check=check))


def tabulate(summaries: Sequence[Summary]) -> Table:
    """Return the table of all methods."""
    columns = columns_for(find_common_loss(summaries))
    legend = "val loss in nats per byte; MB sent by a node; s to: the least loss that all of them reached"
    return Table(columns, format_rows(summaries), legend)


def make_report(summaries: Sequence[Summary], settings: Settings, *, quick: bool) -> Report:
    """Return figures, each with its value or the reason why this run has none, and a row for each method."""
    figures = {
        "replicas_differ": float(sum(not one.replicas_equal for one in summaries)),
        "diverged": float(sum(len(one.diverged) for one in summaries)),
    }
    unmeasured = {}
    ours, base = next((one for one in summaries if one.method == _HEADLINE), None), find_baseline(summaries)
    for figure, ratio in _RATIOS.items():
        reason = _why_not(figure, ours, base, settings, quick=quick)
        if reason or ours is None or base is None:
            unmeasured[figure] = reason
        else:
            figures[figure] = ratio(ours, base, find_common_loss([ours, base]) or 0.0)
    rows = [{**asdict(one), "loss": one.loss} for one in summaries]
    return Report("train", KNOWN_FIGURES, figures, rows, asdict(settings), unmeasured)


def _why_not(figure: str, ours: Summary | None, base: Summary | None, settings: Settings, *, quick: bool) -> str:
    if ours is None or base is None:
        return f"it needs {BASELINE} and {_HEADLINE}: not among --methods, or not trained to the end"
    if settings.nodes == 1:
        return "one node sends nothing to others"
    if not ours.curve:
        return f"{_HEADLINE} diverged"
    if quick:
        return "--quick trains too little, and too small a model"
    if figure.startswith("speedup") and settings.rate is None:
        return "on one host, links cost nothing: give --rate, such as 100mbit"
    return ""


def _seconds(one: Summary, loss: float) -> float:
    seconds = seconds_to(one.curve, loss)
    return float("nan") if seconds is None else seconds


_COMPARISON = Comparison("train", BASELINE, tabulate)
