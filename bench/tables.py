"""Tables of results: drawn on a terminal, plain text in a file or pipe."""

import os
from collections.abc import Sequence
from typing import TextIO


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    """Print the rows under their columns, the first column to the left and numbers to the right."""
    if is_terminal(stream):
        _print_drawn(title, columns, rows, stream)
    else:
        print(format_plain(title, columns, rows), file=stream)


def is_terminal(stream: TextIO) -> bool:
    """Return whether the output is seen on a terminal; Open MPI gives every rank one, wherever its output goes."""
    return stream.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ


def format_plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as lines of text, whose width no terminal decides."""
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    texts = ("  ".join(_align(cell, widths, i) for i, cell in enumerate(line)).rstrip() for line in lines)
    return "\n".join([title, *texts])


def _align(cell: str, widths: Sequence[int], index: int) -> str:
    return cell.ljust(widths[index]) if index == 0 else cell.rjust(widths[index])


def _print_drawn(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    # Only on a terminal: rich cuts or wraps to the width it guesses for anything else.
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(file=stream).print(table)


def show_size(nbytes: int) -> str:
    """Return whole multiples of K, M or G by their letter, as the options take them."""
    for unit, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if nbytes % unit == 0 and nbytes >= unit:
            return f"{nbytes // unit}{letter}"
    return str(nbytes)
