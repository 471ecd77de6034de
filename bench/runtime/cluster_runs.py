"""Runs on the clusters of ``bench runtime``: the jobs of each cluster, and their results."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.cluster import ClusterSpec, open_cluster
from bench.cluster.launchers import Launcher
from bench.cluster.links import parse_rate
from bench.errors import UsageError
from bench.runtime.fit import Calibration
from bench.runtime.plan import Job, JobResult, Load, read_results, write_jobs

FIGURE_METHODS = ("all-reduce", "exponential")
FIGURE_STRAGGLER = 0.2
_TIMEOUT_S = 1800.0


class ClusterShape(NamedTuple):
    """A number of nodes, on links of a rate."""

    nodes: int
    rate: str

    @property
    def rate_bits_per_s(self) -> int:
        return parse_rate(self.rate)

    def is_like(self, other: "ClusterShape") -> bool:
        return (self.nodes, self.rate_bits_per_s) == (other.nodes, other.rate_bits_per_s)

    def is_among(self, others: Sequence["ClusterShape"]) -> bool:
        return any(self.is_like(other) for other in others)


FIGURE_CLUSTER = ClusterShape(4, "100mbit")


def parse_clusters(option: str, words: Sequence[str]) -> list[ClusterShape]:
    """Return the clusters that words such as ``4:100mbit`` name."""
    clusters = []
    for word in words:
        nodes, _, rate = word.partition(":")
        if not nodes.isdecimal() or not rate:
            raise UsageError(f"got {option} {word!r}, needed nodes and a rate, as in 4:100mbit.")
        clusters.append(ClusterShape(int(nodes), rate))
    return clusters


@dataclass(frozen=True)
class ClusterRun:
    """A cluster, and the jobs of its ranks; the first of them calibrates, if it is not held out."""

    cluster: ClusterShape
    jobs: tuple[Job, ...]
    held_out: bool


@dataclass(frozen=True)
class ClusterResult:
    """Results of the jobs of a cluster run, in their order."""

    cluster_run: ClusterRun
    jobs: tuple[JobResult, ...]

    def calibration(self) -> Calibration | None:
        """Return the measurements that predictions may use; None of a cluster that is held out."""
        first = self.jobs[0]
        if self.cluster_run.held_out or first.costs is None:
            return None
        cluster = self.cluster_run.cluster
        return Calibration(cluster.nodes, cluster.rate_bits_per_s, first.tables, first.costs)


def plan_cluster_runs(
    clusters: Sequence[ClusterShape], calibrated: Sequence[ClusterShape], job: Job, rounds: int
) -> list[ClusterRun]:
    """Return the clusters to open: those to calibrate on first, then all others, which are held out."""
    first = [ClusterRun(cluster, _jobs_at(cluster, clusters, job, rounds), held_out=False) for cluster in calibrated]
    others = [cluster for cluster in clusters if not cluster.is_among(calibrated)]
    return first + [ClusterRun(cluster, _jobs_at(cluster, clusters, job, 0), held_out=True) for cluster in others]


def _jobs_at(cluster: ClusterShape, clusters: Sequence[ClusterShape], job: Job, rounds: int) -> tuple[Job, ...]:
    if not cluster.is_among(clusters):
        return (replace(job, methods=(), rounds=rounds),)
    jobs = figure_jobs(job) if cluster.is_like(FIGURE_CLUSTER) else ()
    return (replace(job, rounds=rounds), *jobs)


def figure_jobs(job: Job) -> tuple[Job, Job]:
    """Return the jobs of the figures: computing lasts as long as swapping the model, and no node, or one, is slower."""
    whole_s = swap_s(job.load, FIGURE_CLUSTER)
    steady = replace(job.load, forward_s=whole_s / 3, backward_s=whole_s * 2 / 3, straggler=0.0, sigma=0.0)
    slower = replace(steady, straggler=FIGURE_STRAGGLER)
    return replace(job, load=steady, methods=FIGURE_METHODS[1:]), replace(job, load=slower, methods=FIGURE_METHODS)


def swap_s(load: Load, cluster: ClusterShape) -> float:
    """Return the seconds of swapping the whole model with another node at the link's full rate."""
    return 8 * load.nbytes / cluster.rate_bits_per_s


def run_clusters(cluster_runs: Sequence[ClusterRun], launcher: Launcher) -> Iterator[ClusterResult]:
    """Run the jobs of each cluster, one cluster after the other, and yield their results."""
    for cluster_run in cluster_runs:
        role = "held out" if cluster_run.held_out else "calibrates"
        print(
            f"{cluster_run.cluster.nodes} nodes, {cluster_run.cluster.rate} ({role}) ...", file=sys.stderr, flush=True
        )
        yield ClusterResult(cluster_run, tuple(_run(cluster_run, launcher)))


def _run(cluster_run: ClusterRun, launcher: Launcher) -> list[JobResult]:
    with (
        open_cluster(ClusterSpec(cluster_run.cluster.nodes, 1, cluster_run.cluster.rate)) as cluster,
        TemporaryDirectory(prefix="flexcomm-runtime-") as name,
    ):
        folder = Path(name)
        write_jobs(cluster_run.jobs, folder)
        command = [sys.executable, "-m", "bench.runtime.rank", name]
        cluster.run_to_end(command, launcher=launcher, timeout_s=_TIMEOUT_S)
        return read_results(folder)
