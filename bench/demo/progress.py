"""What a person sees while ``bench demo`` trains: for each method a line with its steps, seconds and loss."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.demo.results import LABELS
from bench.tables import is_terminal
from bench.train.plan import Plan, Run
from bench.train.records import Ending, Evaluation, Interval, Record, Start
from bench.train.watch import following


class Progress:
    """How far a run has come: its steps, seconds of training, and the losses that were last heard of."""

    def __init__(self) -> None:
        self.step, self.train_s = 0, 0.0
        self.losses: dict[str, float] = {}
        self.diverged = ""

    def add(self, record: Record) -> None:
        """Take a record of the run into account."""
        match record:
            case Start():
                pass
            case Evaluation():
                self.step, self.train_s = record.step, record.train_s
                self.losses["validation loss"] = record.loss
            case Interval():
                # None of these steps is new if an evaluation, which is noted first, ended there.
                self.train_s += (record.step - self.step) * record.step_s
                self.step = record.step
                self.losses["training loss"] = record.loss
            case Ending():
                self.diverged = f"diverged {record.diverged}" if record.diverged else ""

    def __str__(self) -> str:
        losses = ", ".join(f"{name} {loss:.2f}" for name, loss in self.losses.items())
        return f"{self.train_s:5.1f} s  step {self.step:4d}  {self.diverged or losses}"


@contextmanager
def watching(plan: Plan, folder: Path) -> Iterator[None]:
    """Show what the ranks note in ``folder`` until the block ends: a bar for each run, or lines where none is seen."""
    seen = {run: Progress() for run in plan.runs}
    with _bars(plan) if is_terminal(sys.stdout) else _lines() as show:

        def take(run: Run, _steps: int, record: Record) -> None:
            seen[run].add(record)
            show(run, seen[run], record)

        with following(plan, folder, take):
            yield


@contextmanager
def _lines() -> Iterator[Callable[[Run, Progress, Record], None]]:
    def show(run: Run, progress: Progress, record: Record) -> None:
        if isinstance(record, Evaluation):
            print(f"{LABELS[run.method]:{_width()}}  {progress}", flush=True)

    print("starting the ranks ...", flush=True)
    yield show


@contextmanager
def _bars(plan: Plan) -> Iterator[Callable[[Run, Progress, Record], None]]:
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (SpinnerColumn(finished_text=" "), TextColumn("{task.description}"), BarColumn(bar_width=20))
    with Bars(*columns, TextColumn("{task.fields[said]}")) as bars:
        tasks = {
            run: bars.add_task(f"{LABELS[run.method]:{_width()}}", total=plan.settings.seconds, said="waiting")
            for run in plan.runs
        }
        bars.update(tasks[plan.runs[0]], said="starting the ranks")

        def show(run: Run, progress: Progress, _record: Record) -> None:
            bars.update(tasks[run], completed=progress.train_s, said=str(progress))

        yield show


def _width() -> int:
    return max(map(len, LABELS.values()))
