"""What ``bench runtime`` runs and predicts: one description, read by the ranks that measure and by the model.

Computing is a *sleep*, as on an accelerator that leaves the host's cores idle: all nodes of an emulated cluster share
this machine's cores, and real computation would measure how they get in each other's way. Optimizer steps, encoding,
decoding, mixing and all communication are real.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcomm import gossip
from flexcomm.gossip import Schedule
from flexdemo.runtime import Updates, Workload

ELEMENT_NBYTES = 4
_ROW = 1024
_CHUNK = 64


class Recipe(NamedTuple):
    """What a method is called, and how it differs from others of its family.

    ``schedule`` makes decentralized Adam's; methods without one have all nodes meet. ``updates`` says when its buckets
    step, ``overlap`` whether FlexDeMo's leave during the backward pass.
    """

    title: str
    family: str
    schedule: Callable[[int], Schedule] | None = None
    updates: Updates = "step"
    overlap: bool = False


METHODS: Mapping[str, Recipe] = {
    "all-reduce": Recipe("All-Reduce", "all-reduce"),
    "exponential": Recipe("decentralized, exponential", "decentralized", gossip.base),
    "aer": Recipe("decentralized, AER", "decentralized", gossip.alternating_exponential_ring),
    "flexdemo": Recipe("FlexDeMo", "flexdemo"),
    "flexdemo-overlap": Recipe("FlexDeMo, overlapped", "flexdemo", overlap=True),
    "exponential-backward": Recipe(
        "decentralized, exponential, in backward", "decentralized", gossip.base, updates="backward"
    ),
    "ring": Recipe("decentralized, ring", "decentralized", gossip.ring),
    "complete": Recipe("decentralized, complete", "decentralized", gossip.complete),
}
"""What ``--methods`` takes, and what it means."""

USUAL_METHODS = "all-reduce,exponential,aer,flexdemo,flexdemo-overlap"


@dataclass(frozen=True)
class Load:
    """A model in equal buckets, and what an iteration of it computes, or rather sleeps.

    ``straggler`` is by which share of its own time one node, another one in every iteration, is slower; ``sigma`` the
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
        """Return it in the model's terms; ``optimizer_s`` is that of all buckets."""
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
        """Return each node's factor; ranks that sleep and the model that predicts ask here, and hear the same."""
        factors = super().draw(nodes, iteration, seed)
        slow_node = np.random.default_rng((seed, iteration, nodes)).integers(nodes)
        factors[slow_node] *= 1 + self.one_slower
        return factors


@dataclass(frozen=True)
class Job:
    """What the ranks of one cluster do, in the same processes: calibrate, if ``rounds`` is not 0, then train."""

    load: Load
    methods: tuple[str, ...]
    iterations: int
    warmups: int
    rounds: int = 0

    @property
    def steps(self) -> int:
        return self.warmups + self.iterations


def write_jobs(jobs: Sequence[Job], folder: Path) -> None:
    """Lay down what the ranks shall do."""
    _job_file(folder).write_text(json.dumps([asdict(job) for job in jobs]))


def read_jobs(folder: Path) -> list[Job]:
    """Return what :func:`write_jobs` was given."""
    return [
        Job(**{**words, "load": Load(**words["load"]), "methods": tuple(words["methods"])})
        for words in json.loads(_job_file(folder).read_text())
    ]


def _job_file(folder: Path) -> Path:
    return folder / "jobs.json"
