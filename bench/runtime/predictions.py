"""Iteration times that the model predicts, beside measured ones, for people and for docs.

Predictions are made from fitted figures alone: nothing measured on a predicted cluster is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.errors import UsageError
from bench.runtime.cluster_runs import ClusterResult, ClusterShape
from bench.runtime.fit import Fitted
from bench.runtime.plan import METHODS, Job, seconds_per_iteration
from flexcomm.gossip import Schedule, round_of
from flexdemo.runtime import (
    Cluster,
    Horizon,
    Timing,
    simulate_all_reduce,
    simulate_decentralized,
    simulate_flexdemo,
)


def predict(method: str, job: Job, nodes: int, rate_bits_per_s: float, fitted: Fitted) -> float:
    """Return the seconds per iteration, for the same iterations and draws as the measured ones."""
    timing = _simulate(method, job, nodes, rate_bits_per_s, fitted)
    return seconds_per_iteration(timing.finished_s, job.warmups, period_of(method, nodes))


def period_of(method: str, nodes: int) -> int:
    """Return the number of iterations after which a method's schedule repeats."""
    make_schedule = METHODS[method].schedule
    return 1 if make_schedule is None else make_schedule(nodes).period


def _simulate(method: str, job: Job, nodes: int, rate_bits_per_s: float, fitted: Fitted) -> Timing:
    spec, load, host = METHODS[method], job.load, fitted.host
    share = fitted.nodes_per_core(nodes)
    horizon = Horizon(job.steps, job.warmups, load.seed)
    if spec.schedule is not None:
        schedule = spec.schedule(nodes)
        cluster = Cluster(nodes, fitted.links_at(rate_bits_per_s, busy_nodes(schedule)))
        # Nodes that wait for few others do not all step at the same time.
        workload = load.workload(fitted.queued_s(host.decentralized_s, load.compute_s, nodes))
        return simulate_decentralized(cluster, workload, schedule, updates=spec.updates, horizon=horizon)
    cluster = Cluster(nodes, fitted.links_at(rate_bits_per_s, nodes))
    if spec.family == "all-reduce":
        return simulate_all_reduce(cluster, load.workload(share * host.all_reduce_s), horizon)
    workload, compression = load.workload(share * host.flexdemo_s), fitted.compression(load, nodes)
    return simulate_flexdemo(cluster, workload, compression, overlap=spec.overlap, horizon=horizon)


def busy_nodes(schedule: Schedule) -> float:
    """Return how many nodes communicate at a time, on average over the phases in which any do."""
    counts = [sum(not round_of(phase, node).is_idle for node in range(schedule.nodes)) for phase in schedule.phases]
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
        """The relative error of the prediction; positive if it is too long."""
        return self.predicted_s / self.measured_s - 1

    def is_at(self, cluster: ClusterShape) -> bool:
        return cluster.is_like(ClusterShape(self.nodes, self.rate))


def make_rows(results: Sequence[ClusterResult], fitted: Fitted) -> list[Row]:
    """Return a row for every method of every job, clusters in the order of nodes and rates."""
    in_order = sorted(results, key=lambda one: (one.cluster_run.cluster.rate_bits_per_s, one.cluster_run.cluster.nodes))
    return [
        _row(method, job, one, finished_s, fitted)
        for one in in_order
        for job, done in zip(one.cluster_run.jobs, one.jobs, strict=True)
        for method, finished_s in done.finished_s.items()
    ]


def _row(method: str, job: Job, result: ClusterResult, finished_s: Sequence[float], fitted: Fitted) -> Row:
    cluster = result.cluster_run.cluster
    return Row(
        method=method,
        nodes=cluster.nodes,
        rate=cluster.rate,
        compute_s=job.load.compute_s,
        straggler=job.load.straggler,
        sigma=job.load.sigma,
        held_out=result.cluster_run.held_out,
        predicted_s=predict(method, job, cluster.nodes, cluster.rate_bits_per_s, fitted),
        measured_s=seconds_per_iteration(finished_s, job.warmups, period_of(method, cluster.nodes)),
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
    """Return the table in Markdown, for the docs."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *format_rows(rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_markdown(rows: Sequence[Row], file: Path) -> None:
    """Write the table in Markdown to ``file``."""
    try:
        file.write_text(format_markdown(rows))
    except OSError as error:
        raise UsageError(
            f"cannot write the table to {file}: {error.strerror}. Give --markdown another file."
        ) from error
