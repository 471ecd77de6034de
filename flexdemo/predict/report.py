"""Output of a prediction: what was assumed, the table, the recommendation and the plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from flexcomm import InvalidArgumentError
from flexdemo.predict import MIN_SPEEDUP, Curve, MethodPrediction, Scenario
from flexdemo.predict.calibration import ASSUMED_COMPRESSION, Calibration
from flexdemo.runtime import BreakEven, MeasuredLinks

RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def format_bits_per_s(bits_per_s: float) -> str:
    """Return the rate in the largest unit in which it is at least 1, rounded."""
    unit = next((one for one in ("gbit", "mbit") if bits_per_s >= 0.9995 * RATE_UNITS[one]), "kbit")
    return f"{format_number(bits_per_s / RATE_UNITS[unit])}{unit}"


def format_number(number: float) -> str:
    """Return three significant digits, or all digits before the point if there are more."""
    return f"{number:.3g}" if number < 99.95 else f"{number:.0f}"


def describe_scenario(scenario: Scenario, measured: Calibration) -> list[str]:
    """Return the lines above the table: the scenario, and which of its numbers are assumed."""
    load, links = scenario.workload, scenario.links
    times = [format_number(1e3 * one) for one in (load.forward_s, sum(load.backward_s), sum(load.optimizer_s))]
    source = "assumed"
    if isinstance(links, MeasuredLinks):
        fitted = format_bits_per_s(8 * links.fitted.bytes_per_s)
        source = "measured" if links.requested is None else f"extrapolated from {fitted}, measured"
    rate = f"{format_bits_per_s(8 * links.bytes_per_s)} each way between nodes ({source})"
    buckets = f"{load.nbytes / 1e6:.4g} MB in {len(load.bucket_nbytes)} buckets"
    if scenario.all_reduce_workload != load:
        buckets += f" (all-reduce: {len(scenario.all_reduce_workload.bucket_nbytes)})"
    lines = [
        f"{scenario.nodes} nodes x {scenario.ranks_per_node} ranks, {rate}; {buckets}",
        f"forward + backward + optimizer: {' + '.join(times)} ms, varying by {100 * load.sigma:.3g} %",
    ]
    if load.straggler.probability > 0:
        share, slower = 100 * load.straggler.probability, 100 * load.straggler.slowdown
        lines.append(f"in {share:.3g} % of its iterations a node is {slower:.3g} % slower")
    if not measured.codec:
        lines.append(
            f"compression was not measured; assumed are {1e9 * ASSUMED_COMPRESSION.encode_s_per_element:.3g} ns to "
            f"encode an element, {1e9 * ASSUMED_COMPRESSION.decode_s_per_element:.3g} ns to decode one and "
            f"{1e9 * ASSUMED_COMPRESSION.decode_s_per_coefficient:.3g} ns for each coefficient received"
        )
    return lines


# The table


def write_table(predictions: Sequence[MethodPrediction], stream: TextIO) -> None:
    """Write the table: with borders on a terminal, as plain text into a file or pipe."""
    table, width = Table(), None
    if not stream.isatty():
        # Plain, and wide enough for any row: rich would wrap to the width that it guesses.
        table, width = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0)), 1000
    rows = [_cells_of(one) for one in predictions]
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(*row.values())
    Console(file=stream, width=width, force_terminal=False if width else None).print(table)


def _cells_of(one: MethodPrediction) -> dict[str, str]:
    faster = faster_by_5_percent = factors = "-"
    if one.family != "all-reduce":
        faster = format_rates(one.break_evens, faster=one.speedup > 1)
        faster_by_5_percent = format_rates(one.min_speedup_break_evens, faster=one.speedup > MIN_SPEEDUP)
    if one.factors is not None:
        factors = " x ".join(f"{factor:.2f}" for factor in vars(one.factors).values())
    return {
        "method": one.method,
        "ms/iteration": format_number(1e3 * one.iteration_s),
        "speedup": f"{one.speedup:.2f}",
        "MB sent/node": format_number(one.sent_nbytes / 1e6),
        "faster": faster,
        "5 % faster": faster_by_5_percent,
        "overlap x links x variation": factors,
        "averaging": one.averaging,
    }


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


# The recommendation

_TIE = 1.03
"""Methods within this factor of the fastest count as equally fast; the first of them is recommended."""

_REASONS = {
    "overlap": "an exchange has a whole iteration to arrive, not only a backward pass",
    "links": "nodes exchange with few others instead of with all",
    "variation": "nodes wait only for those they exchange with, not for the slowest of all",
}


def recommend(predictions: Sequence[MethodPrediction]) -> tuple[str, str]:
    """Return a method and a sentence: All-Reduce, the first, unless another is ``MIN_SPEEDUP`` times as fast.

    Else return the fastest; of several that are about as fast, the first, because methods that average best come first.
    """
    all_reduce, *others = predictions
    fastest_s = min(one.iteration_s for one in predictions)
    chosen = next((one for one in others if one.iteration_s <= _TIE * fastest_s), all_reduce)
    if chosen is all_reduce or all_reduce.iteration_s <= MIN_SPEEDUP * fastest_s:
        gain = max(all_reduce.iteration_s / fastest_s - 1, 0.0)
        sentence = f"Stay with all-reduce: nothing is more than {gain:.0%} faster, less than the error of a prediction."
        return all_reduce.method, sentence
    sent, all_reduce_sent = (format_number(one.sent_nbytes / 1e6) for one in (chosen, all_reduce))
    taken, all_reduce_taken = (format_number(1e3 * one.iteration_s) for one in (chosen, all_reduce))
    reason = f"a node sends {sent} MB an iteration instead of {all_reduce_sent}"
    if chosen.factors is not None:
        reason = _REASONS[max(_REASONS, key=vars(chosen.factors).__getitem__)]
    return chosen.method, (
        f"Use {chosen.method}: {taken} ms an iteration where all-reduce takes {all_reduce_taken} ms, "
        f"{chosen.speedup:.2f} times as fast, mostly because {reason}."
    )


# The plot

_STYLES = {"all-reduce": "--", "decentralized": "-", "flexdemo": ":"}
_MARKERS = "osD^vP*X<>hp"
_COLOURS = (
    "black", "tab:blue", "tab:orange", "tab:red", "tab:brown", "tab:green", "tab:purple", "tab:cyan", "tab:olive",
    "tab:pink", "navy", "darkgreen", "gray",
)  # fmt: skip
_SAME_CURVE = 0.005


def check_plot_possible(file: Path) -> None:
    """Raise, before anything is computed, unless a plot can be drawn into ``file``."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InvalidArgumentError("--plot needs matplotlib: `pip install 'flexcomm[report]'`.") from error
    known = Figure().canvas.get_supported_filetypes()
    if file.suffix.lstrip(".") not in known:
        raise InvalidArgumentError(f"got --plot {file}, needed a name that ends in one of {', '.join(sorted(known))}.")
    if not file.parent.is_dir():
        raise InvalidArgumentError(f"got --plot {file}, but there is no folder {file.parent}: make it.")


def draw_plot(scenario: Scenario, over_bandwidth: Sequence[Curve], over_nodes: Sequence[Curve], file: Path) -> None:
    """Draw seconds per iteration over the rate between nodes, and over the number of nodes; mark the scenario's."""
    # Not pyplot: that looks for a display, and keeps every figure it made.
    from matplotlib.figure import Figure

    bytes_per_s, nodes = scenario.links.bytes_per_s, over_nodes[0].xs
    rate_ticks = {rate: format_bits_per_s(8 * rate) for rate in over_bandwidth[0].xs[::2]}
    # Without the last power of two, if the largest number of nodes is close to it.
    node_ticks = {x: f"{x:,.0f}" for x, y in zip(nodes, (*nodes[1:], math.inf), strict=True) if y > 1.5 * x}
    figure = Figure(figsize=(12, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set_xscale("log")
    left.set(title=f"{scenario.nodes} nodes", xlabel="each way between nodes (bits per second)")
    right.set_xscale("log", base=2)
    right.set(title=f"{format_bits_per_s(8 * bytes_per_s)} between nodes", xlabel="nodes")
    for number, (label, curves) in enumerate(merge_curves(over_bandwidth, over_nodes)):
        for axes, curve in zip((left, right), curves, strict=True):
            axes.plot(
                curve.xs,
                [1e3 * y for y in curve.seconds],
                label=label,
                linestyle=_STYLES[curve.family],
                marker=_MARKERS[number % len(_MARKERS)],
                markersize=4,
                color=_COLOURS[number % len(_COLOURS)],
            )
    for axes, mark, ticks in ((left, bytes_per_s, rate_ticks), (right, scenario.nodes, node_ticks)):
        axes.axvline(mark, color="gray", linewidth=0.8)
        axes.set_xticks(list(ticks), list(ticks.values()), rotation=45, fontsize="small")
        axes.xaxis.set_tick_params(which="minor", bottom=False)
        axes.set(yscale="log", ylabel="predicted iteration (ms)")
        axes.grid(visible=True, alpha=0.3)
    # Outside the axes, where it covers no curve.
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise InvalidArgumentError(f"cannot write to {file}: {error.strerror}. Give --plot another file.") from error


def merge_curves(over_bandwidth: Sequence[Curve], over_nodes: Sequence[Curve]) -> list[tuple[str, tuple[Curve, Curve]]]:
    """Return labels and curves to draw; methods of a family with the same times share one."""
    merged: list[tuple[str, tuple[Curve, Curve]]] = []
    for curves in zip(over_bandwidth, over_nodes, strict=True):
        same = next((place for place, (_, others) in enumerate(merged) if all(map(_are_same, others, curves))), None)
        if same is None:
            merged.append((curves[0].method, curves))
            continue
        label, others = merged[same]
        # The one with the most points stays: not every method exists for every number of nodes.
        longer = curves if len(curves[1].xs) > len(others[1].xs) else others
        merged[same] = f"{label}, {curves[0].method}", longer
    return merged


def _are_same(one: Curve, other: Curve) -> bool:
    others = dict(zip(other.xs, other.seconds, strict=True))
    both = [(y, others[x]) for x, y in zip(one.xs, one.seconds, strict=True) if x in others]
    return one.family == other.family and bool(both) and all(abs(a - b) <= _SAME_CURVE * a for a, b in both)
