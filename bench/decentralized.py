"""``python -m bench decentralized``: the GPT of ``bench train``, by Adam on nodes that mix with few others at a time.

The baseline is Adam with a full All-Reduce, on the same data in the same order. Starts its own ranks, as nodes of this
host or, with ``--rate``, on an emulated cluster; replicas are averaged for every validation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from bench.cluster.command import LauncherOption, RanksOption
from bench.cluster.links import parse_rate
from bench.common_options import CheckOption, JsonOption, QuickOption, Report, check_count, conclude
from bench.errors import UsageError
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
from bench.train.methods import ALLREDUCE, ALLREDUCE_DDP, DECENTRALIZED_METHODS, parse_methods
from bench.train.plan import Settings
from bench.train.summary import Summary, find_baseline, format_losses

_LAUNCHER = "torchrun"
"""gloo's all-reduce takes half the time of Open MPI's on emulated links: the baseline gets the faster one."""
_QUICK_METHODS = "allreduce-adam,exponential,aer-accum,choco-int8"
_QUICK_STEPS = 100
_QUICK_EVAL_EVERY = 20
_ALLREDUCES = (ALLREDUCE, ALLREDUCE_DDP)
_ACCUMULATED, _COMPRESSED = "-accum", "choco"


def decentralized(
    size: SizeOption = "small",
    methods: Annotated[
        str, typer.Option(metavar="NAME,...", help=f"Some of {', '.join(DECENTRALIZED_METHODS)}; or all.")
    ] = "all",
    steps: StepsOption = 1000,
    seeds: SeedsOption = "0",
    lr: RateLrOption = None,
    windows: WindowsOption = None,
    eval_every: EvalOption = None,
    accumulate: Annotated[
        int, typer.Option("--window", help="Steps in which the moments of methods that accumulate advance once.")
    ] = Settings.accumulate,
    compute_ms: Annotated[
        float,
        typer.Option(
            "--compute-ms",
            metavar="MS",
            help="Let the passes of a step last so long, by sleeping, as on an accelerator that leaves cores idle.",
        ),
    ] = Settings.compute_ms,
    straggler: Annotated[
        float,
        typer.Option(
            "--straggler", metavar="PERCENT", help="By how much one node, another in every step, computes longer."
        ),
    ] = Settings.straggler_percent,
    nodes: NodesOption = 4,
    ranks_per_node: RanksOption = 1,
    rate: RateOption = None,
    launcher: LauncherOption = _LAUNCHER,
    out: OutOption = None,
    sweep: SweepOption = False,
    sweep_steps: SweepStepsOption = 300,
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Train a small GPT by Adam with All-Reduce and by decentralized Adam, and compare losses, bytes and seconds.

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
        shard=False,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        launcher=launcher,
        rate=rate,
        accumulate=accumulate,
        compute_ms=compute_ms,
        straggler_percent=straggler,
    )
    names = parse_methods(methods, DECENTRALIZED_METHODS)
    check_emulation(settings)
    check_settings(settings, names)
    if sweep:
        sweep_rates(_COMPARISON, settings, names, lr, out)
        return
    summaries = run_comparison(_COMPARISON, settings, names, lr, seeds, out)
    report = make_report(summaries, settings, quick=quick)
    raise typer.Exit(conclude(report, json_file=json_file, check=check))


def check_emulation(settings: Settings) -> None:
    """Raise unless there are other nodes to mix with, and a straggler has a computing time."""
    check_count("--window", settings.accumulate, 1)
    check_count("--nodes", settings.nodes, 2)
    for option, value in (("--compute-ms", settings.compute_ms), ("--straggler", settings.straggler_percent)):
        if not 0 <= value < float("inf"):
            raise UsageError(f"got {option} {value:g}, needed a number from 0 on.")
    if settings.straggler_percent and not settings.compute_ms:
        raise UsageError(
            "got --straggler without --compute-ms: say how long a step computes, such as --compute-ms 500."
        )


_COLUMNS = (
    "method",
    "lr",
    "val loss",
    "spread",
    f"/ {ALLREDUCE}",
    "MB/step",
    "compute s",
    "s/step",
    "speedup",
    "apart",
)
_LEGEND = (
    "val loss in nats per byte, of the mean of all replicas; MB sent by a node; compute s: passes of a mean rank;\n"
    f"speedup of a step over {ALLREDUCE}'s; apart: consensus distance at the end, from replicas to their mean"
)


def tabulate(summaries: Sequence[Summary]) -> Table:
    """Return the table of all methods."""
    baseline = find_baseline(summaries, ALLREDUCE)
    return Table(_COLUMNS, [_format_row(one, baseline) for one in summaries], _LEGEND)


def _format_row(one: Summary, baseline: Summary | None) -> tuple[str, ...]:
    return (
        *format_losses(one, baseline),
        f"{one.sent_nbytes / 1e6:.4g}",
        f"{one.compute_s:.3f}",
        f"{one.step_s:.3f}",
        f"{baseline.step_s / one.step_s:.2f}x" if baseline is not None and one.step_s else "-",
        "-" if one.consensus_distance is None else f"{one.consensus_distance:.3g}",
    )


def _accumulated_loss(summaries: Sequence[Summary], _settings: Settings) -> float:
    """The worst loss with accumulation, as a multiple of All-Reduce's."""
    base = find_baseline(summaries, ALLREDUCE)
    base_loss = float("nan") if base is None or base.loss is None else base.loss
    return max(one.loss for one in _accumulated(summaries) if one.loss is not None) / base_loss


def _speedup(summaries: Sequence[Summary], _settings: Settings) -> float:
    """The fastest step of plain decentralized methods, beside the fastest of All-Reduce."""
    return min(one.step_s for one in _all_reduces(summaries)) / min(one.step_s for one in _plain(summaries))


def _of_bound(summaries: Sequence[Summary], settings: Settings) -> float:
    """The worst step of plain decentralized methods, in units of its computation or its bytes on the link."""
    rate_bits_per_s = parse_rate(settings.rate or "")
    return max(one.step_s / max(one.compute_s, 8 * one.sent_nbytes / rate_bits_per_s) for one in _plain(summaries))


def _all_reduces(summaries: Sequence[Summary]) -> list[Summary]:
    return [one for one in summaries if one.curve and one.method in _ALLREDUCES]


def _accumulated(summaries: Sequence[Summary]) -> list[Summary]:
    return [one for one in summaries if one.curve and one.method.endswith(_ACCUMULATED)]


def _plain(summaries: Sequence[Summary]) -> list[Summary]:
    """Return the decentralized methods that mix without compression."""
    others = [one for one in summaries if one.curve and one.method not in _ALLREDUCES]
    return [one for one in others if not one.method.startswith(_COMPRESSED)]


_FIGURES: Mapping[str, Callable[[Sequence[Summary], Settings], float]] = {
    "accum_loss_of_allreduce": _accumulated_loss,
    "straggler_speedup": _speedup,
    "iteration_of_bound": _of_bound,
}
KNOWN_FIGURES = frozenset({*_FIGURES, "replicas_differ", "diverged"})


def make_report(summaries: Sequence[Summary], settings: Settings, *, quick: bool) -> Report:
    """Return figures, each with its value or the reason why this run has none, and a row for each method."""
    figures = {
        "replicas_differ": float(sum(not one.replicas_equal for one in summaries)),
        "diverged": float(sum(len(one.diverged) for one in summaries)),
    }
    unmeasured = {}
    for figure, measure in _FIGURES.items():
        reason = "--quick trains too little, and too small a model" if quick else _why_not(figure, summaries, settings)
        if reason:
            unmeasured[figure] = reason
        else:
            figures[figure] = measure(summaries, settings)
    rows = [{**asdict(one), "loss": one.loss} for one in summaries]
    return Report("decentralized", KNOWN_FIGURES, figures, rows, asdict(settings), unmeasured)


def _why_not(figure: str, summaries: Sequence[Summary], settings: Settings) -> str:
    if figure == "accum_loss_of_allreduce":
        trained = _accumulated(summaries) and find_baseline(summaries, ALLREDUCE)
        return "" if trained else f"it needs {ALLREDUCE} and a method in {_ACCUMULATED}, both trained to the end"
    if not _plain(summaries):
        return "it needs a decentralized method without compression, trained to the end"
    if not settings.compute_ms:
        return "nodes that share cores slow each other down: give --compute-ms, such as 500"
    if figure == "iteration_of_bound":
        return _why_no_bound(settings)
    if not _all_reduces(summaries):
        return f"it needs one of {', '.join(_ALLREDUCES)}, trained to the end"
    return "" if settings.straggler_percent else "all nodes were equally fast: give --straggler, such as 50"


def _why_no_bound(settings: Settings) -> str:
    if settings.rate is None:
        return "on one host, links cost nothing: give --rate, such as 100mbit"
    return (
        "one node is slower than the mean, and holds up its peers: leave out --straggler"
        if settings.straggler_percent
        else ""
    )


_COMPARISON = Comparison("decentralized", ALLREDUCE, tabulate)
