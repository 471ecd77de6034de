"""What is computed in an iteration, and by whom: buckets, seconds, and how the seconds vary."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from flexdemo.runtime.errors import ModelError, check_at_least, check_between

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flexdemo.runtime.links import Links

__all__ = ["Cluster", "Straggler", "Workload", "plan_workload"]


@dataclass(frozen=True)
class Cluster:
    """``nodes`` of ``ranks_per_node`` each, joined by ``links``."""

    nodes: int
    links: Links
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        check_at_least("nodes", self.nodes, 1)
        check_at_least("ranks_per_node", self.ranks_per_node, 1)

    def intra_s(self, nbytes: float) -> float:
        """Return the seconds of the legs inside a node, before and after an exchange."""
        return self.links.tau("intra", self.ranks_per_node, nbytes) if self.ranks_per_node > 1 else 0.0


@dataclass(frozen=True)
class Straggler:
    """In every iteration each node, with ``probability``, takes ``1 + slowdown`` times as long to compute."""

    probability: float = 0.0
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        check_between("the straggler's probability", self.probability, 0.0, 1.0)
        check_at_least("the straggler's slowdown", self.slowdown, 0.0)


@dataclass(frozen=True)
class Workload:
    """One iteration of training, in buckets of the model, in the order the backward pass completes them.

    ``sigma`` is the standard deviation of a node's compute time from iteration to iteration, relative to its mean; it
    and ``slowness`` (a factor for each node; empty: all alike) act on the forward and the backward pass, as the
    straggler does. ``whole`` says that every rank holds the whole model, so that every exchange has legs inside the
    node; of sharded models (FSDP) the wrapper does that, and its time belongs into ``backward_s``.
    """

    bucket_nbytes: tuple[int, ...]
    forward_s: float
    backward_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]
    sigma: float = 0.0
    slowness: tuple[float, ...] = ()
    straggler: Straggler = Straggler()
    whole: bool = False

    def __post_init__(self) -> None:
        lengths = {len(self.bucket_nbytes), len(self.backward_s), len(self.optimizer_s)}
        if len(lengths) != 1 or not self.bucket_nbytes:
            raise ModelError(
                f"got {len(self.bucket_nbytes)} buckets, {len(self.backward_s)} backward times and "
                f"{len(self.optimizer_s)} optimizer times, needed as many of each, and at least one."
            )
        check_at_least("forward_s", self.forward_s, 0.0)
        check_at_least("sigma", self.sigma, 0.0)
        for name in ("bucket_nbytes", "backward_s", "optimizer_s", "slowness"):
            for number in getattr(self, name):
                check_at_least(f"a number in {name}", number, 0.0)

    @property
    def nbytes(self) -> int:
        """The bytes of the model, S."""
        return sum(self.bucket_nbytes)

    @property
    def compute_s(self) -> float:
        """The seconds of an iteration without communication, C = F + B + o, of a node of slowness 1."""
        return self.forward_s + sum(self.backward_s) + sum(self.optimizer_s)

    def steady(self) -> Workload:
        """Return the same without variation: no noise, no straggler, all nodes alike, at their mean time."""
        mean = sum(self.slowness) / len(self.slowness) if self.slowness else 1.0
        mean *= 1 + self.straggler.probability * self.straggler.slowdown
        return replace(
            self,
            forward_s=self.forward_s * mean,
            backward_s=tuple(mean * one for one in self.backward_s),
            sigma=0.0,
            slowness=(),
            straggler=Straggler(),
        )

    def draw(self, nodes: int, iteration: int, seed: int) -> NDArray[np.float64]:
        """Return each node's factor on its compute time in this iteration: a function of the arguments alone.

        All methods see the same draws, so their ratio does not depend on luck.
        """
        slowness = self.slowness or (1.0,) * nodes
        if len(slowness) != nodes:
            raise ModelError(
                f"got {len(slowness)} factors of slowness for {nodes} nodes, needed one for each, or none."
            )
        if not (self.sigma > 0 or self.straggler.probability > 0):
            return np.array(slowness, np.float64)
        return _draw(slowness, self.sigma, self.straggler, iteration, seed).copy()


@lru_cache(maxsize=4096)  # A fit simulates the same iterations hundreds of times.
def _draw(
    slowness: tuple[float, ...], sigma: float, straggler: Straggler, iteration: int, seed: int
) -> NDArray[np.float64]:
    generator = np.random.default_rng((seed, iteration))
    # A normal draw of many sigma could be negative; time cannot.
    factors = np.array(slowness, np.float64) * np.maximum(1 + sigma * generator.standard_normal(len(slowness)), 0.0)
    hit = generator.random(len(slowness)) < straggler.probability
    return factors * (1 + straggler.slowdown * hit)


def plan_workload(
    nbytes: int,
    *,
    bucket_nbytes: int = 25 * 2**20,
    forward_s: float,
    backward_s: float,
    optimizer_s: float = 0.0,
    sigma: float = 0.0,
    straggler: Straggler = Straggler(),  # noqa: B008  (frozen)
    whole: bool = False,
) -> Workload:
    """Return a model of ``nbytes`` in equal buckets of at most ``bucket_nbytes``, and its seconds spread evenly."""
    check_at_least("nbytes", nbytes, 1)
    check_at_least("bucket_nbytes", bucket_nbytes, 1)
    count = math.ceil(nbytes / bucket_nbytes)
    ends = [nbytes * number // count for number in range(count + 1)]
    return Workload(
        bucket_nbytes=tuple(end - begin for begin, end in pairwise(ends)),
        forward_s=forward_s,
        backward_s=(backward_s / count,) * count,
        optimizer_s=(optimizer_s / count,) * count,
        sigma=sigma,
        straggler=straggler,
        whole=whole,
    )
