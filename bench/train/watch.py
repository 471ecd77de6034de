"""Progress of runs on the terminal: a line for every record that rank 0 writes, and a bar.

The process that started the ranks prints, not rank 0: launchers hide the terminal from their ranks.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Protocol

from bench.tables import is_terminal
from bench.train.methods import ALL_METHODS
from bench.train.plan import Plan, Run
from bench.train.records import Ending, Evaluation, Interval, Record, Start, file_of, read_records

_LOOK_EVERY_S = 0.2
_WIDTHS = {
    "step": 7,
    "train loss": 10,
    "val loss": 8,
    "tokens/s": 9,
    "ms/step": 8,
    "blocked ms": 10,
    "codec ms": 8,
    "MB/step": 9,
    "fewer": 7,
}
_HEADER = " ".join(f"{name:>{width}}" for name, width in _WIDTHS.items())


class Display(Protocol):
    """Receives lines and progress."""

    def show(self, line: str) -> None:
        """Show a line."""
        ...

    def advance(self, steps: int, run: Run) -> None:
        """Show that ``steps`` of all steps are done, the last ones of ``run``."""
        ...


class _Plain:
    def show(self, line: str) -> None:
        print(line, flush=True)

    def advance(self, steps: int, run: Run) -> None:
        """Show nothing: the lines have the step."""


@contextmanager
def watching(plan: Plan, folder: Path) -> Iterator[None]:
    """Show the records of ``folder`` as they are written until the block ends, and then the rest."""
    lines = Lines()

    def show(run: Run, steps: int, record: Record) -> None:
        for line in lines.of(record):
            display.show(line)
        display.advance(steps, run)

    with _display(len(plan.runs) * plan.settings.steps) as display, following(plan, folder, show):
        yield


@contextmanager
def following(plan: Plan, folder: Path, take: Callable[[Run, int, Record], None]) -> Iterator[None]:
    """Hand each new record in ``folder`` to ``take``, as :class:`Reader` yields them, until the block ends."""
    done = Event()
    watcher = Thread(target=_follow, args=(Reader(plan, folder), take, done), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


class Reader:
    """Reads each record of each run once, in order."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._taken = dict.fromkeys(plan.runs, 0)

    def take(self) -> Iterator[tuple[Run, int, Record]]:
        """Yield what is new: a run, how many steps of all runs are done, and the record."""
        for number, run in enumerate(self._plan.runs):
            for record in read_records(file_of(run, self._folder), self._taken[run]):
                self._taken[run] += 1
                yield run, number * self._plan.settings.steps + self._steps(record), record

    def _steps(self, record: Record) -> int:
        if isinstance(record, Start):
            return 0
        return record.step if isinstance(record, Interval | Evaluation) else self._plan.settings.steps


def _follow(reader: "Reader", take: Callable[[Run, int, Record], None], done: Event) -> None:
    finished = False
    while not finished:
        finished = done.wait(_LOOK_EVERY_S)
        for run, steps, record in reader.take():
            take(run, steps, record)


class Lines:
    """Formats records as lines; a validation loss is in the line of the interval that ends there."""

    def __init__(self) -> None:
        self._validated = Evaluation(0, 0.0, 0.0, 0.0)

    def of(self, record: Record) -> list[str]:
        """Return the lines that show a record."""
        match record:
            case Start():
                return _format_start(record)
            case Interval():
                is_here = self._validated.step == record.step
                return [_format_interval(record, f"{self._validated.loss:.4f}" if is_here else "")]
            case Evaluation():
                self._validated = record
                return []
            case Ending():
                return _format_ending(record)


def _format_start(start: Start) -> list[str]:
    summary = ALL_METHODS[start.method].summary if start.method in ALL_METHODS else ""
    held = f"{start.parameters:,} parameters, {start.parameters_per_rank:,} on a rank"
    return ["", f"{start.method}, lr {start.lr:g}, seed {start.seed}: {summary}; {held}", _HEADER]


def _format_interval(seen: Interval, validation: str) -> str:
    cells = (
        f"{seen.step}",
        f"{seen.loss:.4f}",
        validation,
        f"{seen.tokens_per_s:,.0f}",
        *(f"{1e3 * seconds:.1f}" for seconds in (seen.step_s, seen.waiting_s, seen.codec_s)),
        f"{seen.sent_nbytes / 1e6:.4f}",
        "-" if seen.fewer is None else f"{seen.fewer:.1f}x",
    )
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS.values(), strict=True))


def _format_ending(ending: Ending) -> list[str]:
    if ending.diverged:
        return [f"diverged {ending.diverged}"]
    return [] if ending.replicas_equal else ["the replicas DIFFER: nodes do not hold the same bits, or the same mean"]


@contextmanager
def _display(total: int) -> Iterator[Display]:
    if not is_terminal(sys.stdout):
        yield _Plain()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("starting ranks", total=total)
        yield _Drawn(
            lambda line: progress.console.print(line, markup=False, highlight=False, soft_wrap=True),
            lambda steps, run: progress.update(task, completed=steps, description=run.name),
        )


class _Drawn:
    def __init__(self, show: Callable[[str], None], advance: Callable[[int, Run], None]) -> None:
        self._show, self._advance = show, advance

    def show(self, line: str) -> None:
        self._show(line)

    def advance(self, steps: int, run: Run) -> None:
        self._advance(steps, run)
