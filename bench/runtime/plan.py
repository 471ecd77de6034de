"""Jobs of ``bench runtime`` and their results: read by the ranks that measure and by the model that predicts.

Computing is a *sleep*, as on an accelerator that leaves the host's cores idle: all nodes of an emulated cluster share
this machine's cores, and real computation would measure how they slow each other down. Optimizer steps, encoding,
decoding, mixing and all communication are real.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcomm import gossip
from flexcomm.gossip import Schedule
from flexdemo.runtime import LinkTable, Updates, Workload

ELEMENT_NBYTES = 4
_ROW = 1024
_CHUNK = 64


class MethodSpec(NamedTuple):
    """Title of a method, and its options within its family.

    ``schedule`` makes decentralized Adam's; methods without one synchronise all nodes. ``updates`` says when buckets
    step, ``overlap`` whether FlexDeMo's are sent during the backward pass.
    """

    title: str
    family: str
    schedule: Callable[[int], Schedule] | None = None
    updates: Updates = "step"
    overlap: bool = False


METHODS: Mapping[str, MethodSpec] = {
    "all-reduce": MethodSpec("All-Reduce", "all-reduce"),
    "exponential": MethodSpec("decentralized, exponential", "decentralized", gossip.base),
    "aer": MethodSpec("decentralized, AER", "decentralized", gossip.alternating_exponential_ring),
    "flexdemo": MethodSpec("FlexDeMo", "flexdemo"),
    "flexdemo-overlap": MethodSpec("FlexDeMo, overlapped", "flexdemo", overlap=True),
    "exponential-backward": MethodSpec(
        "decentralized, exponential, in backward", "decentralized", gossip.base, updates="backward"
    ),
    "ring": MethodSpec("decentralized, ring", "decentralized", gossip.ring),
    "complete": MethodSpec("decentralized, complete", "decentralized", gossip.complete),
}
"""Values of ``--methods``."""

USUAL_METHODS = "all-reduce,exponential,aer,flexdemo,flexdemo-overlap"


@dataclass(frozen=True)
class Load:
    """A model in equal buckets, and the seconds that an iteration of it computes, that is, sleeps.

    ``straggler`` is the share of its time by which one node, another one in every iteration, is slower; ``sigma`` the
    standard deviation of every node's time. ``k`` is DeMo's, of every chunk of 64 x 64.
    """

    parameters: int = 2_500_000
    buckets: int = 4
    forward_s: float = 0.29
    backward_s: float = 0.58
    straggler: float = 0.0
    sigma: float = 0.0
    seed: int = 0
    k: int = 32

    @property
    def shape(self) -> tuple[int, int]:
        """The one tensor of a bucket: as near to its share of the parameters as whole chunks come."""
        rows = self.parameters / self.buckets / _ROW
        return max(1, round(rows / _CHUNK)) * _CHUNK, _ROW

    @property
    def bucket_nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * ELEMENT_NBYTES

    @property
    def nbytes(self) -> int:
        return self.buckets * self.bucket_nbytes

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s

    def workload(self, optimizer_s: float = 0.0) -> "PacedWorkload":
        """Return the workload of the model; ``optimizer_s`` is that of all buckets."""
        return PacedWorkload(
            bucket_nbytes=(self.bucket_nbytes,) * self.buckets,
            forward_s=self.forward_s,
            backward_s=(self.backward_s / self.buckets,) * self.buckets,
            optimizer_s=(optimizer_s / self.buckets,) * self.buckets,
            sigma=self.sigma,
            one_slower=self.straggler,
        )


@dataclass(frozen=True)
class PacedWorkload(Workload):
    """A workload in which, in every iteration, one node takes ``1 + one_slower`` times as long."""

    one_slower: float = 0.0

    def draw(self, nodes: int, iteration: int, seed: int) -> NDArray[np.float64]:
        """Return each node's factor, the same for the ranks that sleep and for the model that predicts."""
        factors = super().draw(nodes, iteration, seed)
        slow_node = np.random.default_rng((seed, iteration, nodes)).integers(nodes)
        factors[slow_node] *= 1 + self.one_slower
        return factors


@dataclass(frozen=True)
class Job:
    """Work of the ranks of one cluster, in the same processes: calibration, if ``rounds`` is not 0, then training."""

    load: Load
    methods: tuple[str, ...]
    iterations: int
    warmups: int
    rounds: int = 0

    @property
    def steps(self) -> int:
        return self.warmups + self.iterations


def write_jobs(jobs: Sequence[Job], folder: Path) -> None:
    """Write the jobs of the ranks to ``folder``."""
    _job_file(folder).write_text(json.dumps([asdict(job) for job in jobs]))


def read_jobs(folder: Path) -> list[Job]:
    """Return the jobs that :func:`write_jobs` wrote."""
    return [
        Job(**{**words, "load": Load(**words["load"]), "methods": tuple(words["methods"])})
        for words in json.loads(_job_file(folder).read_text())
    ]


def _job_file(folder: Path) -> Path:
    return folder / "jobs.json"


@dataclass(frozen=True)
class HostCosts:
    """Seconds of one iteration on this host, of all buckets together, with all ranks at work.

    ``all_reduce_s`` and ``decentralized_s`` are iterations without sleep and without peers, of the slowest rank.
    ``mix_s`` is what averaging with a peer's parameters adds; ``flexdemo_s`` is an iteration without ``encode_s``,
    ``decode_s`` and waiting for messages: all of the average rank, because parts of an iteration are not slowest on
    the same one. ``payload_nbytes`` is FlexDeMo's payload of one bucket.
    """

    all_reduce_s: float
    decentralized_s: float
    mix_s: float
    encode_s: float
    decode_s: float
    flexdemo_s: float
    payload_nbytes: float


@dataclass(frozen=True)
class JobResult:
    """Results of one job: its calibration, if it has one, and the end of each iteration of each method."""

    tables: tuple[LinkTable, ...] = ()
    costs: HostCosts | None = None
    finished_s: dict[str, list[float]] = field(default_factory=dict)


def write_results(results: Sequence[JobResult], folder: Path) -> None:
    """Write the results of all jobs to ``folder``."""
    _result_file(folder).write_text(json.dumps([asdict(one) for one in results]))


def read_results(folder: Path) -> list[JobResult]:
    """Return the results that :func:`write_results` wrote."""
    return [
        JobResult(
            tuple(_table(words) for words in one["tables"]),
            HostCosts(**one["costs"]) if one["costs"] else None,
            one["finished_s"],
        )
        for one in json.loads(_result_file(folder).read_text())
    ]


def seconds_per_iteration(finished_s: Sequence[float], warmups: int, period: int) -> float:
    """Return the median, after warm-up, of the seconds of an iteration by the last node to finish.

    Phases of a schedule differ in cost, so ``period`` iterations count as one, whichever is the first; predictions
    follow the same rule.
    """
    length = min(period, len(finished_s) - warmups)
    ends = range(warmups + length - 1, len(finished_s))
    before_s = [finished_s[end - length] if end >= length else 0.0 for end in ends]
    return median((finished_s[end] - began_s) / length for end, began_s in zip(ends, before_s, strict=True))


def _table(words: dict[str, Any]) -> LinkTable:
    return LinkTable(words["link"], words["k"], tuple(words["nbytes"]), tuple(words["seconds"]))


def _result_file(folder: Path) -> Path:
    return folder / "results.json"
