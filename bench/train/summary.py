"""Summaries of runs, by method: means over seeds, table rows, and the plot."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from bench.train.methods import BASELINE
from bench.train.plan import Run
from bench.train.records import History

COLUMNS = ("method", "lr", "val loss", "spread", "/ adamw", "MB/step", "fewer bytes", "s/step", "tokens/s")


class Point(NamedTuple):
    """A validation loss, and the steps, seconds and bytes to reach it: means over seeds."""

    step: float
    loss: float
    train_s: float
    sent_nbytes: float


@dataclass(frozen=True)
class Summary:
    """One method, over all seeds that ended. ``curve`` is empty if none did without diverging."""

    method: str
    lr: float
    losses: tuple[float, ...]
    diverged: tuple[str, ...]
    curve: tuple[Point, ...]
    step_s: float
    tokens_per_s: float
    sent_nbytes: float
    gradient_elements: int
    replicas_equal: bool
    compute_s: float = 0.0
    consensus_distance: float | None = None

    @property
    def loss(self) -> float | None:
        return mean(self.losses) if self.losses else None

    @property
    def spread(self) -> float:
        return max(self.losses) - min(self.losses)


def summarise(histories: Mapping[Run, History]) -> list[Summary]:
    """Return a summary for each method and learning rate of which at least one run ended, in the order of runs."""
    ended: dict[tuple[str, float], list[History]] = {}
    for run, history in histories.items():
        if history.ending is not None:
            ended.setdefault((run.method, run.lr), []).append(history)
    return [_summarise(method, lr, seeds) for (method, lr), seeds in ended.items()]


def _summarise(method: str, lr: float, seeds: Sequence[History]) -> Summary:
    endings = [history.ending for history in seeds if history.ending is not None]
    good = [history for history in seeds if history.ending is not None and not history.ending.diverged]
    steps, train_s = sum(ending.steps for ending in endings), sum(ending.train_s for ending in endings)
    distances = [ending.consensus_distance for ending in endings if ending.consensus_distance is not None]
    return Summary(
        method=method,
        lr=lr,
        losses=tuple(history.evaluations[-1].loss for history in good),
        diverged=tuple(ending.diverged for ending in endings if ending.diverged),
        curve=_mean_curve(good),
        # One that diverged before anything was counted took nothing.
        step_s=train_s / max(1, steps),
        tokens_per_s=sum(ending.tokens for ending in endings) / train_s if train_s else 0.0,
        sent_nbytes=sum(ending.sent_nbytes for ending in endings) / max(1, steps),
        gradient_elements=max(ending.gradient_elements for ending in endings),
        replicas_equal=all(ending.replicas_equal for ending in endings if not ending.diverged),
        compute_s=sum(ending.compute_s for ending in endings) / max(1, steps),
        consensus_distance=mean(distances) if distances else None,
    )


def _mean_curve(good: Sequence[History]) -> tuple[Point, ...]:
    columns = zip(*(history.evaluations for history in good), strict=True)
    return tuple(
        Point(
            step=seen[0].step,
            loss=mean(one.loss for one in seen),
            train_s=mean(one.train_s for one in seen),
            sent_nbytes=mean(one.sent_nbytes for one in seen),
        )
        for seen in columns
    )


def find_common_loss(summaries: Iterable[Summary]) -> float | None:
    """Return the least validation loss that all methods reached which did not diverge; None if there are none."""
    return max((min(point.loss for point in one.curve) for one in summaries if one.curve), default=None)


def seconds_to(curve: Sequence[Point], loss: float) -> float | None:
    """Return the seconds of training after which ``loss`` was first reached, on straight lines between evaluations."""
    if curve and curve[0].loss <= loss:
        return curve[0].train_s
    for before, after in pairwise(curve):
        if after.loss <= loss:
            share = (before.loss - loss) / (before.loss - after.loss)
            return before.train_s + share * (after.train_s - before.train_s)
    return None


def find_baseline(summaries: Iterable[Summary], name: str = BASELINE) -> Summary | None:
    """Return the baseline, if it was trained and did not diverge."""
    return next((one for one in summaries if one.method == name and one.curve), None)


def columns_for(common: float | None) -> tuple[str, ...]:
    """Return the column headings."""
    return (*COLUMNS, "s to a loss" if common is None else f"s to {common:.3f}")


def format_rows(summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    """Return the table's cells."""
    baseline, common = find_baseline(summaries), find_common_loss(summaries)
    return [_format_row(one, baseline, common) for one in summaries]


def _format_row(one: Summary, baseline: Summary | None, common: float | None) -> tuple[str, ...]:
    seconds = seconds_to(one.curve, common) if common is not None else None
    return (
        *format_losses(one, baseline),
        f"{one.sent_nbytes / 1e6:.4g}",
        f"{baseline.sent_nbytes / one.sent_nbytes:.1f}x" if baseline is not None and one.sent_nbytes else "-",
        f"{one.step_s:.3f}",
        f"{one.tokens_per_s:,.0f}",
        "-" if seconds is None else f"{seconds:.1f}",
    )


def format_losses(one: Summary, baseline: Summary | None) -> tuple[str, ...]:
    """Return the first five cells: method, learning rate, loss, its spread, and the loss beside the baseline's."""
    base_loss = baseline.loss if baseline is not None else None
    return (
        one.method,
        f"{one.lr:g}",
        _format_loss(one),
        f"{one.spread:.4f}" if len(one.losses) > 1 else "-",
        f"{one.loss / base_loss:.3f}" if one.loss is not None and base_loss else "-",
    )


def _format_loss(one: Summary) -> str:
    if one.loss is None:
        return "diverged"
    some = f" ({len(one.diverged)} diverged)" if one.diverged else ""
    return f"{one.loss:.4f}{some}"


_PANELS: Sequence[tuple[str, Callable[[Point], float]]] = (
    ("step", lambda point: point.step),
    ("sent by a node (MB)", lambda point: point.sent_nbytes / 1e6),
    ("training (s)", lambda point: point.train_s),
)
_BYTES_PANEL = 1


def can_draw() -> bool:
    """Return whether matplotlib, the extra ``report``, is installed."""
    try:
        import matplotlib  # noqa: F401  (only whether it can be had)
    except ModuleNotFoundError:
        return False
    return True


def draw_plot(summaries: Sequence[Summary], title: str, file: Path, baseline: str = BASELINE) -> None:
    """Draw loss over steps, bytes and seconds: means over seeds of every method that did not diverge."""
    # Not pyplot: that looks for a display, and keeps every figure it made.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5.5), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    for axes, (label, of) in zip(panels, _PANELS, strict=True):
        for number, one in enumerate(summary for summary in summaries if summary.curve):
            # A logarithmic axis has no zero, where nothing was sent yet.
            points = [point for point in one.curve if of(point) > 0 or axes is not panels[_BYTES_PANEL]]
            style = _style(number, one.method, is_baseline=one.method == baseline)
            axes.plot([of(point) for point in points], [point.loss for point in points], **style)
        axes.set_xlabel(label)
        axes.grid(visible=True, alpha=0.3)
    panels[_BYTES_PANEL].set_xscale("log")
    panels[0].set_ylabel("validation loss (nats per byte)")
    # Outside: inside, it would hide some line or other.
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(file, dpi=120)


def _style(number: int, method: str, *, is_baseline: bool) -> dict[str, str | float]:
    mark = "osD^vPX*<>"[number % 10]
    if is_baseline:
        return {"label": method, "color": "black", "linestyle": "--", "marker": mark, "markersize": 4.0}
    return {"label": method, "color": f"C{(number - 1) % 10}", "marker": mark, "markersize": 4.0}
