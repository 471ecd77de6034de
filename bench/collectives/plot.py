"""The plot of ``bench collectives``: time and effective bandwidth over size, one line for each method."""

from collections.abc import Sequence
from pathlib import Path

from bench.collectives.measure import Row
from bench.collectives.output import show_size
from bench.errors import UsageError

_MOST_TICKS = 10


def check_plot_possible(file: Path) -> None:
    """Raise, before anything is measured, unless a plot can be drawn into ``file``."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError(
            "--plot needs matplotlib, the extra `report`: `pip install '.[report]'` in the checkout, or leave --plot "
            "out and draw from --csv."
        ) from error
    known = Figure().canvas.get_supported_filetypes()
    if file.suffix.lstrip(".") not in known:
        raise UsageError(f"got --plot {file}, needed a name that ends in one of {', '.join(sorted(known))}.")
    if not file.parent.is_dir():
        raise UsageError(f"got --plot {file}, but there is no folder {file.parent}. Make it, or give another.")


def draw_plot(rows: Sequence[Row], title: str, file: Path) -> None:
    """Draw what was measured; methods keep their colours and marks in both halves."""
    # Not pyplot: that looks for a display, and keeps every figure it made.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    time_axes, bandwidth_axes = figure.subplots(1, 2)
    for number, method in enumerate(dict.fromkeys(row.compressor for row in rows)):
        own = [row for row in rows if row.compressor == method]
        sizes = [row.size_nbytes for row in own]
        style = {"marker": "osD^vPX*"[number % 8], "linestyle": "--" if method.startswith("all-reduce") else "-"}
        time_axes.plot(sizes, [1e3 * row.time_median_s for row in own], label=method, **style)
        bandwidth_axes.plot(sizes, [row.effective_bytes_per_s / 1e6 for row in own], label=method, **style)
    ticks = sorted({row.size_nbytes for row in rows})
    ticks = ticks[:: -(-len(ticks) // _MOST_TICKS)]
    for axes, label in ((time_axes, "time, median of the slowest rank (ms)"), (bandwidth_axes, "dense bytes (MB/s)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [show_size(size) for size in ticks])
        axes.minorticks_off()
        axes.set_xlabel("tensor (bytes)")
        axes.set_ylabel(label)
        axes.grid(visible=True, alpha=0.3)
    time_axes.set_title("time")
    bandwidth_axes.set_title("effective bandwidth = dense bytes / time")
    # Outside: inside, it would hide some line or other.
    figure.legend(*time_axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise UsageError(f"cannot write the plot to {file}: {error.strerror}. Give --plot another file.") from error
