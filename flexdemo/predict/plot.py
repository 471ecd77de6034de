"""The plot: iteration time over bandwidth and over nodes, one line for each method."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexdemo.predict.arguments import format_bits_per_s
from flexdemo.predict.errors import PredictError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from flexdemo.predict.prediction import Curve

__all__ = ["check_plot_possible", "draw_plot", "merge_alike"]

_STYLES = {"all-reduce": "--", "decentralized": "-", "flexdemo": ":"}
_MARKS = "osD^vP*X<>hp"
_COLOURS = (
    "black", "tab:blue", "tab:orange", "tab:red", "tab:brown", "tab:green", "tab:purple", "tab:cyan", "tab:olive",
    "tab:pink", "navy", "darkgreen", "gray",
)  # fmt: skip
_ALIKE = 0.005


def check_plot_possible(file: Path) -> None:
    """Raise, before anything is computed, unless a plot can be drawn into ``file``."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise PredictError(
            "--plot needs matplotlib, the extra `report`: `pip install 'flexcomm[report]'`, or leave --plot out and "
            "draw from --json."
        ) from error
    known = Figure().canvas.get_supported_filetypes()
    if file.suffix.lstrip(".") not in known:
        raise PredictError(f"got --plot {file}, needed a name that ends in one of {', '.join(sorted(known))}.")
    if not file.parent.is_dir():
        raise PredictError(f"got --plot {file}, but there is no folder {file.parent}. Make it, or give another.")


@dataclass(frozen=True)
class _Line:
    """A line in both halves, for one method or for several that take the same time."""

    label: str
    kind: str
    halves: tuple[Curve, Curve]


def draw_plot(
    over_bandwidth: Sequence[Curve], over_nodes: Sequence[Curve], here: tuple[float, int], file: Path
) -> None:
    """Draw both halves; ``here`` is the rate, in bytes per second, and the number of nodes predicted for."""
    # Not pyplot: that looks for a display, and keeps every figure it made.
    from matplotlib.figure import Figure

    rate, nodes = here
    lines = merge_alike(over_bandwidth, over_nodes)
    figure = Figure(figsize=(12, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_half(left, lines, 0)
    _draw_half(right, lines, 1)
    left.set_xscale("log")
    left.set_xlabel("each way between nodes (bits per second)")
    left.axvline(rate, color="gray", linewidth=0.8)
    left.set_title(f"{nodes} nodes")
    rates = over_bandwidth[0].xs
    left.set_xticks(rates[::2], [format_bits_per_s(8 * one) for one in rates[::2]], rotation=45, fontsize="small")
    right.set_xscale("log", base=2)
    right.set_xlabel("nodes")
    right.axvline(nodes, color="gray", linewidth=0.8)
    right.set_title(f"{format_bits_per_s(8 * rate)} between nodes")
    numbers = [x for x, y in zip(over_nodes[0].xs, (*over_nodes[0].xs[1:], math.inf), strict=True) if y > 1.5 * x]
    right.set_xticks(numbers, [f"{number:,.0f}" for number in numbers], rotation=45, fontsize="small")
    for axes in (left, right):
        axes.xaxis.set_tick_params(which="minor", bottom=False)
    # Outside: inside, it would hide some line or other.
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise PredictError(f"cannot write the plot to {file}: {error.strerror}. Give --plot another file.") from error


def merge_alike(over_bandwidth: Sequence[Curve], over_nodes: Sequence[Curve]) -> list[_Line]:
    """Return the lines to draw: methods that take the same time everywhere would hide each other."""
    lines: list[_Line] = []
    for halves in zip(over_bandwidth, over_nodes, strict=True):
        same = next((line for line in lines if all(map(_are_alike, line.halves, halves))), None)
        if same is None or same.kind != halves[0].kind:
            lines.append(_Line(halves[0].method, halves[0].kind, halves))
            continue
        # The one with the most points stays: not every method is possible for every number of nodes.
        longer = halves if len(halves[1].xs) > len(same.halves[1].xs) else same.halves
        lines[lines.index(same)] = _Line(f"{same.label}, {halves[0].method}", same.kind, longer)
    return lines


def _are_alike(one: Curve, other: Curve) -> bool:
    others = dict(zip(other.xs, other.seconds, strict=True))
    both = [(y, others[x]) for x, y in zip(one.xs, one.seconds, strict=True) if x in others]
    return bool(both) and all(abs(a - b) <= _ALIKE * a for a, b in both)


def _draw_half(axes: Axes, lines: Sequence[_Line], half: int) -> None:
    for number, line in enumerate(lines):
        curve = line.halves[half]
        axes.plot(
            curve.xs,
            [1e3 * y for y in curve.seconds],
            label=line.label,
            linestyle=_STYLES[line.kind],
            marker=_MARKS[number % len(_MARKS)],
            markersize=4,
            color="black" if line.kind == "all-reduce" else _COLOURS[number % len(_COLOURS)],
        )
    axes.set_yscale("log")
    axes.set_ylabel("predicted iteration (ms)")
    axes.grid(visible=True, alpha=0.3)
