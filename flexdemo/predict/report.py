"""Output of a prediction: what was assumed, the table, the recommendation, the JSON file and the plot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from matplotlib.axes import Axes

from flexdemo.predict import PredictError
from flexdemo.predict.calibration import ASSUMED_COMPRESSION, Calibration
from flexdemo.predict.methods import MIN_SPEEDUP, Curve, MethodPrediction
from flexdemo.predict.scenario import Scenario
from flexdemo.runtime import BreakEven, MeasuredLinks

SCHEMA = "flexdemo-prediction"
VERSION = 2
RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def format_bits_per_s(bits_per_s: float) -> str:
    """Return the rate in the largest unit in which it is at least 1, rounded."""
    unit = next((one for one in ("gbit", "mbit") if bits_per_s >= 0.9995 * RATE_UNITS[one]), "kbit")
    return f"{format_number(bits_per_s / RATE_UNITS[unit])}{unit}"


def format_ms(seconds: float) -> str:
    return format_number(1e3 * seconds)


def format_number(number: float) -> str:
    """Return three significant digits, or all digits before the point if there are more."""
    return f"{number:.3g}" if number < 99.95 else f"{number:.0f}"


def describe_scenario(scenario: Scenario, measured: Calibration | None) -> list[str]:
    """Return the lines above the table: the scenario, and which of its numbers are assumed."""
    load = scenario.workload
    times = " + ".join(format_ms(each) for each in (load.forward_s, sum(load.backward_s), sum(load.optimizer_s)))
    source = "assumed"
    if isinstance(scenario.links, MeasuredLinks):
        fitted = format_bits_per_s(8 * scenario.links.fitted.bytes_per_s)
        source = "measured" if scenario.links.requested is None else f"extrapolated from {fitted}, measured"
    rate = f"{format_bits_per_s(8 * scenario.links.bytes_per_s)} each way between nodes ({source})"
    buckets = f"{load.nbytes / 1e6:.4g} MB in {len(load.bucket_nbytes)} buckets"
    if scenario.all_reduce_workload != load:
        buckets += f" (all-reduce: {len(scenario.all_reduce_workload.bucket_nbytes)})"
    lines = [
        f"{scenario.nodes} nodes x {scenario.ranks_per_node} ranks, {rate}; {buckets}",
        f"forward + backward + optimizer: {times} ms, varying by {100 * load.sigma:.3g} %",
    ]
    if load.straggler.probability > 0:
        share, slower = 100 * load.straggler.probability, 100 * load.straggler.slowdown
        lines.append(f"in {share:.3g} % of its iterations a node is {slower:.3g} % slower")
    if measured is None or not measured.codec:
        lines.append(
            f"compression was not measured; assumed are {1e9 * ASSUMED_COMPRESSION.encode_s_per_element:.3g} ns to "
            f"encode an element, {1e9 * ASSUMED_COMPRESSION.decode_s_per_element:.3g} ns to decode one and "
            f"{1e9 * ASSUMED_COMPRESSION.decode_s_per_coefficient:.3g} ns for each coefficient received"
        )
    return lines


# The table

COLUMNS = (
    "method",
    "ms/iteration",
    "speedup",
    "MB sent/node",
    "faster",
    "5 % faster",
    "overlap x links x variation",
    "averaging",
)


def write_table(predictions: Sequence[MethodPrediction], stream: TextIO) -> None:
    """Write the table: with borders on a terminal, as plain text into a file or pipe."""
    cells = make_cells(predictions)
    if not stream.isatty():
        stream.write(format_plain(cells) + "\n")
        return
    # Only on a terminal: rich cuts or wraps to the width it guesses for anything else.
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if place == 0 else "right")
    for row in cells:
        table.add_row(*row)
    Console(file=stream).print(table)


def make_cells(predictions: Sequence[MethodPrediction]) -> list[tuple[str, ...]]:
    """Return the rows of the table as text; the first is All-Reduce's own."""
    cells: list[tuple[str, ...]] = []
    for one in predictions:
        rates = worthwhile_rates = factors = "-"
        if one.family != "all-reduce":
            rates = format_rates(one.break_evens, faster=one.speedup > 1)
            worthwhile_rates = format_rates(one.min_speedup_break_evens, faster=one.speedup > MIN_SPEEDUP)
        if one.factors is not None:
            factors = f"{one.factors.overlap:.2f} x {one.factors.links:.2f} x {one.factors.variation:.2f}"
        sent_mb = format_number(one.sent_nbytes / 1e6)
        times = one.method, format_ms(one.iteration_s), f"{one.speedup:.2f}"
        cells.append((*times, sent_mb, rates, worthwhile_rates, factors, one.averaging))
    return cells


def format_rates(break_evens: Sequence[BreakEven], *, faster: bool) -> str:
    """Return the rates between ``break_evens`` at which a method is faster; without any, ``faster`` is the answer."""
    if not break_evens:
        return "always" if faster else "never"
    rates = [format_bits_per_s(8 * one.bytes_per_s) for one in break_evens]
    ranges = []
    if break_evens[0].faster_side == "below":
        ranges.append(f"below {rates.pop(0)}")
    ranges += [f"{low} to {high}" for low, high in zip(rates[::2], rates[1::2], strict=False)]
    if len(rates) % 2:
        ranges.append(f"above {rates[-1]}")
    return ", ".join(ranges)


def format_plain(cells: Sequence[Sequence[str]]) -> str:
    """Return the table as lines of aligned text."""
    rows = [COLUMNS, *cells]
    widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(widths[place]) if place == 0 else cell.rjust(widths[place]) for place, cell in enumerate(row)
        ).rstrip()
        for row in rows
    )


# The recommendation

_TIE = 1.03
"""Methods within this factor of the fastest count as equally fast; the first of them is recommended."""

_REASONS = {
    "overlap": "an exchange has a whole iteration to arrive, not only a backward pass",
    "links": "nodes exchange with few others instead of with all",
    "variation": "nodes wait only for those they exchange with, not for the slowest of all",
}


@dataclass(frozen=True)
class Recommendation:
    """The recommended method, and a sentence with the reason."""

    method: str
    sentence: str


def recommend(predictions: Sequence[MethodPrediction]) -> Recommendation:
    """Return All-Reduce, the first prediction, unless another method is ``MIN_SPEEDUP`` times as fast.

    Else return the fastest; of several that are about as fast, the first, because methods that average best come first.
    """
    all_reduce, *others = predictions
    fastest_s = min(one.iteration_s for one in predictions)
    chosen = next((one for one in others if one.iteration_s <= _TIE * fastest_s), all_reduce)
    if chosen is all_reduce or all_reduce.iteration_s <= MIN_SPEEDUP * fastest_s:
        gain = max(all_reduce.iteration_s / fastest_s - 1, 0.0)
        return Recommendation(
            all_reduce.method,
            f"Stay with all-reduce: nothing is more than {gain:.0%} faster, which is less than the error of a "
            f"prediction.",
        )
    reason = (
        f"a node sends {format_number(chosen.sent_nbytes / 1e6)} MB an iteration instead of "
        f"{format_number(all_reduce.sent_nbytes / 1e6)}"
    )
    if chosen.factors is not None:
        factors = asdict(chosen.factors)
        reason = _REASONS[max(_REASONS, key=lambda name: float(factors[name]))]
    return Recommendation(
        chosen.method,
        f"Use {chosen.method}: {format_ms(chosen.iteration_s)} ms an iteration where all-reduce takes "
        f"{format_ms(all_reduce.iteration_s)} ms, {chosen.speedup:.2f} times as fast, mostly because {reason}.",
    )


# The JSON file


def write_json(
    file: Path,
    *,
    scenario: Scenario,
    predictions: Sequence[MethodPrediction],
    recommendation: Recommendation,
    skipped: Mapping[str, str],
    over_bandwidth: Sequence[Curve],
    over_nodes: Sequence[Curve],
) -> None:
    """Write all inputs and results; docs/predict.md describes the fields."""
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "scenario": _without_infinity(asdict(scenario)),
        "predictions": [asdict(one) for one in predictions],
        "recommendation": asdict(recommendation),
        "skipped": dict(skipped),
        "over_bandwidth": [asdict(curve) for curve in over_bandwidth],
        "over_nodes": [asdict(curve) for curve in over_nodes],
    }
    try:
        file.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise PredictError(f"cannot write to {file}: {error.strerror}. Give --json another file.") from error


def _without_infinity(value: object) -> object:
    """Return the value with None for infinity, an unlimited rate, which JSON cannot express."""
    if isinstance(value, dict):
        return {name: _without_infinity(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value


# The plot

_STYLES = {"all-reduce": "--", "decentralized": "-", "flexdemo": ":"}
_MARKERS = "osD^vP*X<>hp"
_COLOURS = (
    "black", "tab:blue", "tab:orange", "tab:red", "tab:brown", "tab:green", "tab:purple", "tab:cyan", "tab:olive",
    "tab:pink", "navy", "darkgreen", "gray",
)  # fmt: skip
_SAME_CURVE = 0.005


def check_plot_possible(file: Path) -> None:
    """Raise ``PredictError``, before anything is computed, unless a plot can be drawn into ``file``."""
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
class PlotEntry:
    """One entry of the legend: a method, or several that take the same time; ``curves`` over rates and over nodes."""

    label: str
    curves: tuple[Curve, Curve]


def draw_plot(
    over_bandwidth: Sequence[Curve], over_nodes: Sequence[Curve], *, bytes_per_s: float, nodes: int, file: Path
) -> None:
    """Draw seconds per iteration over the rate between nodes, and over the number of nodes.

    Both hold the same methods in the same order, All-Reduce first; ``bytes_per_s`` and ``nodes`` are marked.
    """
    # Not pyplot: that looks for a display, and keeps every figure it made.
    from matplotlib.figure import Figure

    entries = merge_curves(over_bandwidth, over_nodes)
    figure = Figure(figsize=(12, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_curves(left, entries, 0)
    left.set_xscale("log")
    left.set_xlabel("each way between nodes (bits per second)")
    left.axvline(bytes_per_s, color="gray", linewidth=0.8)
    left.set_title(f"{nodes} nodes")
    rates = over_bandwidth[0].xs
    left.set_xticks(rates[::2], [format_bits_per_s(8 * one) for one in rates[::2]], rotation=45, fontsize="small")
    _draw_curves(right, entries, 1)
    right.set_xscale("log", base=2)
    right.set_xlabel("nodes")
    right.axvline(nodes, color="gray", linewidth=0.8)
    right.set_title(f"{format_bits_per_s(8 * bytes_per_s)} between nodes")
    numbers = [x for x, y in zip(over_nodes[0].xs, (*over_nodes[0].xs[1:], math.inf), strict=True) if y > 1.5 * x]
    right.set_xticks(numbers, [f"{number:,.0f}" for number in numbers], rotation=45, fontsize="small")
    for axes in (left, right):
        axes.xaxis.set_tick_params(which="minor", bottom=False)
    # Outside the axes, where it covers no curve.
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise PredictError(f"cannot write the plot to {file}: {error.strerror}. Give --plot another file.") from error


def merge_curves(over_bandwidth: Sequence[Curve], over_nodes: Sequence[Curve]) -> list[PlotEntry]:
    """Return the entries to draw; methods of a family with the same times would cover each other, and share one."""
    entries: list[PlotEntry] = []
    for curves in zip(over_bandwidth, over_nodes, strict=True):
        same = next((entry for entry in entries if all(map(_are_same, entry.curves, curves))), None)
        if same is None or same.curves[0].family != curves[0].family:
            entries.append(PlotEntry(curves[0].method, curves))
            continue
        # The one with the most points stays: not every method exists for every number of nodes.
        longer = curves if len(curves[1].xs) > len(same.curves[1].xs) else same.curves
        entries[entries.index(same)] = PlotEntry(f"{same.label}, {curves[0].method}", longer)
    return entries


def _are_same(one: Curve, other: Curve) -> bool:
    others = dict(zip(other.xs, other.seconds, strict=True))
    both = [(y, others[x]) for x, y in zip(one.xs, one.seconds, strict=True) if x in others]
    return bool(both) and all(abs(a - b) <= _SAME_CURVE * a for a, b in both)


def _draw_curves(axes: Axes, entries: Sequence[PlotEntry], side: int) -> None:
    for number, entry in enumerate(entries):
        curve = entry.curves[side]
        axes.plot(
            curve.xs,
            [1e3 * y for y in curve.seconds],
            label=entry.label,
            linestyle=_STYLES[curve.family],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            color="black" if curve.family == "all-reduce" else _COLOURS[number % len(_COLOURS)],
        )
    axes.set_yscale("log")
    axes.set_ylabel("predicted iteration (ms)")
    axes.grid(visible=True, alpha=0.3)
