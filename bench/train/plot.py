"""The plot of a command that trains: validation loss over steps, over bytes sent, and over seconds."""

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.train.methods import BASELINE
from bench.train.summary import Point, Summary

_PANELS: Sequence[tuple[str, Callable[[Point], float]]] = (
    ("step", lambda point: point.step),
    ("sent by a node (MB)", lambda point: point.sent_nbytes / 1e6),
    ("training (s)", lambda point: point.train_s),
)
_BYTES_PANEL = 1


def can_draw() -> bool:
    """Return whether matplotlib is there: the extra ``report``."""
    try:
        import matplotlib  # noqa: F401  (only whether it can be had)
    except ModuleNotFoundError:
        return False
    return True


def draw_plot(summaries: Sequence[Summary], title: str, file: Path, baseline: str = BASELINE) -> None:
    """Draw the mean over seeds of every method that did not diverge; methods keep their colours in all panels."""
    # Not pyplot: that looks for a display, and keeps every figure it made.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5.5), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    for axes, (label, of) in zip(panels, _PANELS, strict=True):
        for number, one in enumerate(summary for summary in summaries if summary.curve):
            # Where nothing was sent yet, there is no place on a logarithmic axis.
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
