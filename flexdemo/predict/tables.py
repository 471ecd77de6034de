"""The prediction for people: drawn on a terminal, plain text in a file or pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexdemo.predict.arguments import format_bits_per_s, format_number, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from flexdemo.predict.prediction import Row
    from flexdemo.runtime import BreakEven

__all__ = ["COLUMNS", "format_plain", "make_cells", "show_rates", "write_table"]

COLUMNS = (
    "method",
    "ms/iteration",
    "speedup",
    "MB sent/node",
    "pays",
    "pays 5 %",
    "overlap x links x variation",
    "mean",
)


def make_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the rows as text; the first is All-Reduce's own."""
    return [
        (
            row.method,
            format_seconds(row.iteration_s),
            f"{row.speedup:.2f}",
            format_number(row.sent_nbytes / 1e6),
            "-" if row.kind == "all-reduce" else show_rates(row.break_even, faster=row.speedup > 1),
            "-" if row.kind == "all-reduce" else show_rates(row.worth, faster=row.speedup > 1.05),
            "-"
            if row.factors is None
            else f"{row.factors.overlap:.2f} x {row.factors.links:.2f} x {row.factors.variation:.2f}",
            row.averaging,
        )
        for row in rows
    ]


def show_rates(crossings: Sequence[BreakEven], *, faster: bool) -> str:
    """Return at which rates a method is faster; ``faster`` counts where it is so, or not, at all of them."""
    if not crossings:
        return "always" if faster else "never"
    rates = [format_bits_per_s(8 * one.bytes_per_s) for one in crossings]
    words = []
    if crossings[0].faster_side == "below":
        words.append(f"below {rates.pop(0)}")
    words += [f"{low} to {high}" for low, high in zip(rates[::2], rates[1::2], strict=False)]
    if len(rates) % 2:
        words.append(f"above {rates[-1]}")
    return ", ".join(words)


def write_table(rows: Sequence[Row], stream: TextIO) -> None:
    """Write the rows under their columns, the first column to the left and numbers to the right."""
    if stream.isatty():
        _write_drawn(make_cells(rows), stream)
    else:
        stream.write(format_plain(make_cells(rows)) + "\n")


def format_plain(cells: Sequence[Sequence[str]]) -> str:
    """Return the table as lines of text, whose width no terminal decides."""
    lines = [COLUMNS, *cells]
    widths = [max(len(line[place]) for line in lines) for place in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(widths[place]) if place == 0 else cell.rjust(widths[place]) for place, cell in enumerate(line)
        ).rstrip()
        for line in lines
    )


def _write_drawn(cells: Sequence[Sequence[str]], stream: TextIO) -> None:
    # Only on a terminal: rich cuts or wraps to the width it guesses for anything else.
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if place == 0 else "right")
    for row in cells:
        table.add_row(*row)
    Console(file=stream).print(table)
