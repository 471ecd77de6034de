"""Tables of results: drawn on a terminal, plain text in a file or pipe."""

import os
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    """Print the rows under their columns, the first column to the left and numbers to the right."""
    table, width = Table(title=title, title_justify="left"), None
    if not is_terminal(stream):
        # Plain, and wide enough for any row: rich would wrap to the width that it guesses.
        print(title, file=stream)
        table, width = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0)), 1000
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # Names of compressors may look like markup or emoji.
    Console(file=stream, width=width, force_terminal=False if width else None, markup=False, emoji=False).print(table)


def is_terminal(stream: TextIO) -> bool:
    """Return whether the output is seen on a terminal; Open MPI gives every rank one, wherever its output goes."""
    return stream.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ


def show_size(nbytes: int) -> str:
    """Return whole multiples of K, M or G by their letter, as the options take them."""
    for unit, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if nbytes % unit == 0 and nbytes >= unit:
            return f"{nbytes // unit}{letter}"
    return str(nbytes)
