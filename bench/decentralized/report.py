"""What targets can bound of ``bench decentralized``: losses and seconds beside All-Reduce, where that is fair."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from bench.cluster.rates import parse_rate
from bench.common_options import Report
from bench.train.decentralized_methods import ALLREDUCE, ALLREDUCE_DDP
from bench.train.plan import Settings
from bench.train.summary import Summary, find_baseline

_ALLREDUCES = (ALLREDUCE, ALLREDUCE_DDP)
_ACCUMULATED, _COMPRESSED = "-accum", "choco"


def _accumulated_loss(summaries: Sequence[Summary], _settings: Settings) -> float:
    """The worst loss with accumulation, as a multiple of All-Reduce's."""
    base = find_baseline(summaries, ALLREDUCE)
    base_loss = float("nan") if base is None or base.loss is None else base.loss
    return max(one.loss for one in _accumulated(summaries) if one.loss is not None) / base_loss


def _speedup(summaries: Sequence[Summary], _settings: Settings) -> float:
    """The fastest step of plain decentralized methods, beside the fastest of All-Reduce."""
    return min(one.step_s for one in _all_reduces(summaries)) / min(one.step_s for one in _plain(summaries))


def _of_bound(summaries: Sequence[Summary], settings: Settings) -> float:
    """The worst step of plain decentralized methods, as a multiple of what its computation or its cable takes alone."""
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
        return "nodes that share cores get in each other's way: give --compute-ms, such as 500"
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
