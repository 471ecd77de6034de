"""What targets can bound of ``bench train``: FlexDeMo at its best beside the baseline, where that is fair."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from bench.common_options import Report
from bench.train.methods import BASELINE
from bench.train.plan import Settings
from bench.train.summary import Summary, find_baseline, find_common_loss, seconds_to

_HEADLINE = "flexdemo-sign"
_RATIOS: Mapping[str, Callable[[Summary, Summary, float], float]] = {
    "loss_ratio": lambda ours, base, _: (ours.loss or 0.0) / (base.loss or 1.0),
    "bytes_saved": lambda ours, base, _: base.sent_nbytes / ours.sent_nbytes,
    "speedup": lambda ours, base, loss: _seconds(base, loss) / _seconds(ours, loss),
}
"""What is compared of it and the baseline; the number is a loss that both reached."""

KNOWN_FIGURES = frozenset({*_RATIOS, "replicas_differ", "diverged"})


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
