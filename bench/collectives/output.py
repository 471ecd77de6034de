"""Output of ``bench collectives``: the columns, as lines one by one, as a drawn table, as CSV, and as a plot."""

import csv
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TextIO

from bench.collectives.measure import Row
from bench.errors import UsageError
from bench.tables import is_terminal, print_table, show_size

ABSENT = "-"
_MOST_TICKS = 10


@dataclass(frozen=True)
class Column:
    """A heading, its unit, the format of a row's cell, and a width that is enough for later rows."""

    heading: str
    unit: str
    show: Callable[[Row], str]
    width: int
    is_key: bool = False


def show_number(number: float | None) -> str:
    """Return three significant digits, never with an exponent; a dash for None."""
    if number is None:
        return ABSENT
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"


def show_ms(seconds: float) -> str:
    """Return milliseconds, with more places for the short ones."""
    return show_number(1e3 * seconds) if seconds >= 1e-3 else f"{1e3 * seconds:.3f}"


def _share(share: float | None) -> str:
    return ABSENT if share is None else f"{share:.0%}"


def _mb_per_s(bytes_per_s: float | None) -> str:
    return show_number(None if bytes_per_s is None else bytes_per_s / 1e6)


COLUMNS = (
    Column("size", "bytes", lambda row: show_size(row.size_nbytes), 6, is_key=True),
    Column("count", "elements", lambda row: str(row.count), 9),
    Column("type", "", lambda row: row.dtype, 4),
    Column("compressor", "", lambda row: row.compressor, 10, is_key=True),
    Column("algorithm", "", lambda row: row.algorithm, 10),
    Column("min", "ms", lambda row: show_ms(row.time_min_s), 6),
    Column("median", "ms", lambda row: show_ms(row.time_median_s), 6),
    Column("p99", "ms", lambda row: show_ms(row.time_p99_s), 6),
    Column("wire", "bytes/rank", lambda row: f"{row.wire_nbytes:.0f}", 9),
    Column("bits", "/kept", lambda row: show_number(row.bits_per_kept), 5),
    Column("effbw", "MB/s", lambda row: _mb_per_s(row.effective_bytes_per_s), 6),
    Column("wirebw", "MB/s", lambda row: _mb_per_s(row.wire_bytes_per_s), 6),
    Column("link", "share", lambda row: _share(row.link_share), 5),
    Column("encode", "ms", lambda row: show_ms(row.encode_s), 6),
    Column("intra", "ms", lambda row: show_ms(row.intra_s), 6),
    Column("inter", "ms", lambda row: show_ms(row.inter_s), 6),
    Column("decode", "ms", lambda row: show_ms(row.decode_s), 6),
    Column("#wrong", "", lambda row: "N/A" if row.wrong is None else str(row.wrong), 6),
)


class Lines:
    """The table as plain lines, each as soon as it is known: widths are fixed beforehand."""

    def __init__(self, compressors: Sequence[str]) -> None:
        longest = {"compressor": max(map(len, compressors), default=0)}
        self._widths = [
            max(column.width, len(column.heading), len(column.unit), longest.get(column.heading, 0))
            for column in COLUMNS
        ]

    def heading(self) -> str:
        """Return two lines, marked as a comment: the columns and their units."""
        names, units = ([getattr(column, part) for column in COLUMNS] for part in ("heading", "unit"))
        return f"# {self._align(names)[2:]}\n# {self._align(units)[2:]}"

    def line(self, row: Row) -> str:
        return self._align([column.show(row) for column in COLUMNS])

    def _align(self, cells: Sequence[str]) -> str:
        aligned = (f"{cell:>{width}}" for cell, width in zip(cells, self._widths, strict=True))
        return "  " + "  ".join(aligned).rstrip()


def print_drawn(rows: Sequence[Row], stream: TextIO) -> None:
    """Print the rows for a terminal: in as many tables side under side as its width needs, each naming its rows."""
    cells = {column.heading: [column.show(row) for row in rows] for column in COLUMNS}
    for columns in split_columns(cells, shutil.get_terminal_size().columns):
        headings = [f"{column.heading}\n{column.unit}" for column in columns]
        lines = list(zip(*(cells[column.heading] for column in columns), strict=True))
        print_table("", headings, lines, stream)


def split_columns(cells: dict[str, list[str]], width: int) -> list[list[Column]]:
    """Return the columns in groups that fit side by side; each begins with those that name a row."""
    keys = [column for column in COLUMNS if column.is_key]
    groups = [list(keys)]
    for column in COLUMNS:
        if column.is_key:
            continue
        if _drawn_width([*groups[-1], column], cells) > width and len(groups[-1]) > len(keys):
            groups.append(list(keys))
        groups[-1].append(column)
    # The first group is where one reads: there every column stands where it stands in the plain table.
    return [[column for column in COLUMNS if column in group] for group in groups]


def _drawn_width(columns: Sequence[Column], cells: dict[str, list[str]]) -> int:
    frame, padding = 1, 3
    widths = (max(map(len, (column.heading, column.unit, *cells[column.heading]))) for column in columns)
    return frame + sum(width + padding for width in widths)


def write_csv(rows: Sequence[Row], file: Path) -> None:
    """Write all fields of all rows, in base units, under their names."""
    try:
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    except OSError as error:
        raise UsageError(f"cannot write the results to {file}: {error.strerror}. Give --csv another file.") from error


class Printer:
    """Rank 0's output: lines as they come, or, on a terminal, a bar while it lasts and a drawn table at the end."""

    def __init__(self, compressors: Sequence[str], total: int, stream: TextIO = sys.stdout) -> None:
        self._stream = stream
        self._drawn = is_terminal(stream)
        self._lines = Lines(compressors)
        self._total = total
        self._bar: _Bar | None = None

    def start(self, header: Sequence[str]) -> None:
        print(*(f"# {line}" for line in header), sep="\n", file=self._stream)
        if not self._drawn:
            print(self._lines.heading(), file=self._stream)
        self._stream.flush()
        self._bar = _Bar(self._total) if is_terminal(sys.stderr) else None

    def announce(self, what: str) -> None:
        if self._bar is not None:
            self._bar.say(what)

    def add(self, row: Row) -> None:
        if self._bar is not None:
            self._bar.advance()
        if not self._drawn:
            print(self._lines.line(row), file=self._stream, flush=True)

    def finish(self, rows: Sequence[Row], footer: Sequence[str]) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._drawn and rows:
            print_drawn(rows, self._stream)
        print(*(f"# {line}" for line in footer), sep="\n", file=self._stream, flush=True)


class _Bar:
    """A progress bar that is drawn between measurements only: a thread that draws meanwhile would be measured too."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=Console(file=sys.stderr), auto_refresh=False, transient=True)
        self._task = self._progress.add_task("", total=total)
        self._progress.start()

    def say(self, what: str) -> None:
        self._progress.update(self._task, description=what, refresh=True)

    def advance(self) -> None:
        self._progress.update(self._task, advance=1, refresh=True)

    def stop(self) -> None:
        self._progress.stop()


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
    """Draw all rows; a method has the same colour and mark in both halves."""
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
