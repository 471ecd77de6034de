"""Iteration times that the model predicts, beside measured ones, for people and for docs.

Predictions are made from fitted figures alone: nothing measured on a predicted cluster is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.errors import UsageError
from bench.runtime.cluster_runs import Place, Visited
from bench.runtime.fit import Fitted
from bench.runtime.plan import METHODS, Job, seconds_per_iteration
from flexcomm.gossip import Schedule
from flexdemo.runtime import (
    Cluster,
    Horizon,
    Timing,
    simulate_all_reduce,
    simulate_decentralized,
    simulate_flexdemo,
)


def predict(method: str, job: Job, nodes: int, rate_bits_per_s: float, fitted: Fitted) -> float:
    """Return the seconds per iteration, of the same iterations, with the same draws, that are measured."""
    timing = _simulate(method, job, nodes, rate_bits_per_s, fitted)
    return seconds_per_iteration(timing.finished_s, job.warmups, period_of(method, nodes))


def period_of(method: str, nodes: int) -> int:
    """Return after how many iterations a method's exchanges repeat."""
    make_schedule = METHODS[method].schedule
    return 1 if make_schedule is None else make_schedule(nodes).period


def _simulate(method: str, job: Job, nodes: int, rate_bits_per_s: float, fitted: Fitted) -> Timing:
    recipe, load, host = METHODS[method], job.load, fitted.host
    crowd = fitted.crowd(nodes)
    horizon = Horizon(job.steps, job.warmups, load.seed)
    if recipe.schedule is not None:
        schedule = recipe.schedule(nodes)
        cluster = Cluster(nodes, fitted.links_at(rate_bits_per_s, busy_nodes(schedule)))
        # Nodes that wait for few others do not all step at the same time.
        workload = load.workload(fitted.turn_s(host.decentralized_s, load.compute_s, nodes))
        return simulate_decentralized(cluster, workload, schedule, updates=recipe.updates, horizon=horizon)
    cluster = Cluster(nodes, fitted.links_at(rate_bits_per_s, nodes))
    if recipe.family == "all-reduce":
        return simulate_all_reduce(cluster, load.workload(crowd * host.all_reduce_s), horizon)
    workload, compression = load.workload(crowd * host.flexdemo_s), fitted.compression(load, nodes)
    return simulate_flexdemo(cluster, workload, compression, overlap=recipe.overlap, horizon=horizon)


def busy_nodes(schedule: Schedule) -> float:
    """Return how many nodes exchange at a time, on average over the phases in which any do."""
    counts = [sum(bool(phase.peers(node)) for node in range(schedule.nodes)) for phase in schedule.phases]
    busy = [count for count in counts if count]
    return sum(busy) / len(busy) if busy else schedule.nodes


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
