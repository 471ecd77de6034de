"""Predicted beside measured: for people, and for docs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.errors import UsageError
from bench.runtime.cluster_runs import Place, Visited
from bench.runtime.fit import Fitted
from bench.runtime.found import seconds_per_iteration
from bench.runtime.plan import METHODS, Job
from bench.runtime.predict import period_of, predict

COLUMNS = ("method", "nodes", "rate", "compute", "held out", "predicted ms", "measured ms", "error")


@dataclass(frozen=True)
class Row:
    """One method on one cluster: seconds per iteration, and whether the cluster had no part in the prediction."""

    method: str
    nodes: int
    rate: str
    compute_s: float
    straggler: float
    sigma: float
    held_out: bool
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """By which share of what was measured the prediction is too long."""
        return self.predicted_s / self.measured_s - 1

    def is_at(self, place: Place) -> bool:
        return place.is_like(Place(self.nodes, self.rate))


def make_rows(visited: Sequence[Visited], fitted: Fitted) -> list[Row]:
    """Return a row for every method of every job, clusters in the order of nodes and rates."""
    in_order = sorted(visited, key=lambda one: (one.visit.place.rate_bits_per_s, one.visit.place.nodes))
    return [
        _row(method, job, one, finished_s, fitted)
        for one in in_order
        for job, found in zip(one.visit.jobs, one.found, strict=True)
        for method, finished_s in found.finished_s.items()
    ]


def _row(method: str, job: Job, visited: Visited, finished_s: Sequence[float], fitted: Fitted) -> Row:
    place = visited.visit.place
    return Row(
        method=method,
        nodes=place.nodes,
        rate=place.rate,
        compute_s=job.load.compute_s,
        straggler=job.load.straggler,
        sigma=job.load.sigma,
        held_out=visited.visit.held_out,
        predicted_s=predict(method, job, place.nodes, place.rate_bits_per_s, fitted),
        measured_s=seconds_per_iteration(finished_s, job.warmups, period_of(method, place.nodes)),
    )


def format_rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the table's cells."""
    return [
        (
            METHODS[row.method].title,
            str(row.nodes),
            row.rate,
            _compute(row),
            "yes" if row.held_out else "no",
            f"{1e3 * row.predicted_s:.0f}",
            f"{1e3 * row.measured_s:.0f}",
            f"{row.error:+.1%}",
        )
        for row in rows
    ]


def _compute(row: Row) -> str:
    words = [f"{1e3 * row.compute_s:.0f} ms"]
    words += [f"one +{row.straggler:.0%}"] if row.straggler else []
    words += [f"sigma {row.sigma:.0%}"] if row.sigma else []
    return ", ".join(words)


def format_markdown(rows: Sequence[Row]) -> str:
    """Return the table as docs have it."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *format_rows(rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_markdown(rows: Sequence[Row], file: Path) -> None:
    """Write the table to be pasted into docs."""
    try:
        file.write_text(format_markdown(rows))
    except OSError as error:
        raise UsageError(
            f"cannot write the table to {file}: {error.strerror}. Give --markdown another file."
        ) from error
