"""Results of ``bench demo``: a table, a chart for the terminal, a plot, and one sentence."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes

from bench.cluster.links import parse_rate
from bench.train.comparison import Table
from bench.train.plan import Settings
from bench.train.summary import Point, Summary, find_baseline, seconds_to

BASELINE = "adamw-bf16"
HEADLINE = "flexdemo-k32"
"""FlexDeMo with the compressor that it has by default."""
LABELS: Mapping[str, str] = {
    BASELINE: "AdamW, all gradients sent (bf16)",
    HEADLINE: "FlexDeMo, demo(k=32)",
    "flexdemo-sign": "FlexDeMo, signs of demo(k=396)",
    "local-muon": "Muon, 5 local steps, 3 bits",
}
"""The methods, with their names for people."""

_COLORS = {BASELINE: "black", HEADLINE: "tab:blue", "flexdemo-sign": "tab:red", "local-muon": "tab:green"}
_MARKS = {BASELINE: "A", HEADLINE: "o", "flexdemo-sign": "#", "local-muon": "+"}
_ABOVE = 1.3
"""Range of losses above the baseline's last that is shown, in nats."""
_WIDTH, _HEIGHT = 72, 14
_LINKS = {
    "paced": "paced in software: what crosses nodes is held back by its bytes / rate",
    "namespaces": "of network namespaces, limited by the kernel",
}


def title(settings: Settings) -> str:
    """Return the model, nodes and links, for people."""
    mbit_per_s = parse_rate(str(settings.rate)) / 1e6
    ranks = f"{settings.ranks_per_node} rank{'s' if settings.ranks_per_node > 1 else ''}"
    return (
        f"A small GPT, {settings.nodes} nodes of {ranks}, {settings.seconds:g} s for each method\n"
        f"links of {mbit_per_s:g} Mbit/s, {_LINKS[settings.links]}"
    )


def sooner(summaries: Sequence[Summary]) -> dict[str, float]:
    """Return how many times sooner each method reached the baseline's last loss; those that did not are left out."""
    base = find_baseline(summaries, BASELINE)
    if base is None or base.loss is None:
        return {}
    reached = {one.method: seconds_to(one.curve, base.loss) for one in summaries}
    return {method: base.curve[-1].train_s / seconds for method, seconds in reached.items() if seconds}


def tabulate(summaries: Sequence[Summary]) -> Table:
    """Return the table of all methods."""
    base, times = find_baseline(summaries, BASELINE), sooner(summaries)
    target = "AdamW's" if base is None or base.loss is None else f"{base.loss:.2f}"
    columns = ("method", "loss at the end", "steps", "s/step", "kB/step", f"s to {target}", "times sooner")
    rows = [_row(one, base, times.get(one.method)) for one in summaries]
    legend = (
        "loss: nats per byte of Python sources not trained on; evaluating is not counted. kB/step: sent by a node.\n"
        f"times sooner: how soon a method has AdamW's last loss ({target}), beside AdamW. Same start, same data order; "
        "learning rates as above."
    )
    return Table(columns, rows, legend)


def _row(one: Summary, base: Summary | None, times: float | None) -> tuple[str, ...]:
    if not one.curve or base is None:
        return (LABELS[one.method], *["-"] * 6)
    last = base.curve[-1].train_s
    return (
        LABELS[one.method],
        f"{one.loss:.3f}",
        f"{one.curve[-1].step:.0f}",
        f"{one.step_s:.3f}",
        f"{one.sent_nbytes / 1e3:.1f}",
        "not reached" if times is None else f"{last / times:.1f}",
        "-" if times is None else f"{times:.1f}x",
    )


def conclusion(summaries: Sequence[Summary]) -> str:
    """Return the main result in a sentence."""
    base, times = find_baseline(summaries, BASELINE), sooner(summaries).get(HEADLINE)
    if base is None or base.loss is None:
        return "AdamW has no loss to compare with: see above."
    last = base.curve[-1].train_s
    if times is None:
        return f"FlexDeMo did not reach AdamW's loss of {base.loss:.2f} within {last:.1f} s."
    ours = last / times
    return f"FlexDeMo has AdamW's loss of {base.loss:.2f} after {ours:.1f} s, not {last:.1f}: {times:.1f} times sooner."


def chart(summaries: Sequence[Summary]) -> str:
    """Return a chart of loss over seconds, made of characters."""
    drawn = [one for one in summaries if one.curve]
    base = find_baseline(summaries, BASELINE)
    if base is None or base.loss is None:
        return ""
    losses = [point.loss for one in drawn for point in one.curve]
    top, bottom = min(base.loss + _ABOVE, max(losses)), min(losses)
    end_s = max(one.curve[-1].train_s for one in drawn)
    cells = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for one in reversed(drawn):
        for column in range(_WIDTH):
            loss = _loss_at(one.curve, end_s * column / (_WIDTH - 1))
            if loss is not None and loss <= top:
                row = round((top - loss) / (top - bottom) * (_HEIGHT - 1))
                cells[row][column] = _MARKS[one.method]
    ticks = (top - (top - bottom) * row / (_HEIGHT - 1) for row in range(_HEIGHT))
    lines = [f"{tick:5.2f} |{''.join(row).rstrip()}" for tick, row in zip(ticks, cells, strict=True)]
    axis = f"      +{'-' * _WIDTH}\n       0 s{f'{end_s:.0f} s':>{_WIDTH - 3}}"
    legend = [f"       {_MARKS[one.method]} {LABELS[one.method]}" for one in drawn]
    return "\n".join(["", "validation loss", *lines, axis, *legend, ""])


def _loss_at(curve: Sequence[Point], seconds: float) -> float | None:
    for before, after in pairwise(curve):
        if before.train_s <= seconds <= after.train_s:
            share = (seconds - before.train_s) / (after.train_s - before.train_s)
            return before.loss + share * (after.loss - before.loss)
    return None


def draw(summaries: Sequence[Summary], heading: str, file: Path, baseline: str) -> None:
    """Draw validation loss over seconds, and where each method has the baseline's last loss."""
    # Not pyplot: that looks for a display, and keeps every figure it made.
    from matplotlib.figure import Figure

    base, times = find_baseline(summaries, baseline), sooner(summaries)
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for one in (one for one in summaries if one.curve):
        seconds, losses = [point.train_s for point in one.curve], [point.loss for point in one.curve]
        label = f"{LABELS[one.method]}: {one.sent_nbytes / 1e3:,.0f} kB a step"
        style = "--" if one.method == baseline else "-"
        axes.plot(seconds, losses, style, color=_COLORS[one.method], marker=".", label=label, linewidth=1.8)
    if base is not None and base.loss is not None:
        _mark_times(axes, base, times)
        axes.set_ylim(top=base.loss + _ABOVE)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("validation loss (nats per byte)")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="upper right", fontsize="small")
    axes.set_title(heading, fontsize="medium")
    figure.savefig(file, dpi=120)


def _mark_times(axes: "Axes", base: Summary, times: Mapping[str, float]) -> None:
    last = base.curve[-1]
    axes.axhline(last.loss, color="gray", linewidth=1, linestyle=":")
    axes.annotate(
        f"AdamW after {last.train_s:.1f} s", (last.train_s, last.loss), (0, 8), textcoords="offset points", ha="right"
    )
    for number, (method, ratio) in enumerate(sorted(times.items(), key=lambda item: -item[1])):
        if method == base.method:
            continue
        reached_s = last.train_s / ratio
        axes.plot([reached_s], [last.loss], marker="o", markersize=8, fillstyle="none", color=_COLORS[method])
        axes.annotate(
            f"{ratio:.1f} times sooner",
            (reached_s, last.loss),
            (18, 70 - 18 * number),
            textcoords="offset points",
            color=_COLORS[method],
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
            arrowprops={"arrowstyle": "-", "color": _COLORS[method], "linewidth": 0.8},
        )
