"""The inputs of a simulation: the cluster, the workload with its varying compute times, and costs of compression."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flexcomm import InvalidArgumentError
from flexdemo.runtime.links import Links, check_at_least, check_between


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal nodes.

    Args:
        nodes: number of nodes.
        links: times of exchanges, such as ``AlphaBeta(bytes_per_s=1.25e9, latency_s=50e-6)``.
        ranks_per_node: ranks on each node; they share the node's network card and its work.

    """

    nodes: int
    links: Links
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        check_at_least("nodes", self.nodes, 1)
        check_at_least("ranks_per_node", self.ranks_per_node, 1)


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
    """One training iteration of a node, bucket by bucket, in the order in which the backward pass completes them.

    ``plan_workload`` makes one of equal buckets.

    Args:
        bucket_nbytes: a node's bytes of each bucket.
        forward_s: seconds of the forward pass.
        backward_s: seconds of the backward pass for each bucket.
        optimizer_s: seconds of the optimizer for each bucket, mixing included.
        sigma: standard deviation of a node's compute time from iteration to iteration, relative to its mean.
        slowness: each node's factor on its compute time; empty if all nodes are equally fast.
        straggler: occasional delays of single nodes.
        sharded: FSDP reduces inside a node, and its time is part of ``backward_s``. If False, every rank holds the
            whole model, so that every exchange has intra-node legs.

    ``sigma``, ``slowness`` and ``straggler`` apply to the forward and the backward pass, not to the optimizer.

    """

    bucket_nbytes: tuple[int, ...]
    forward_s: float
    backward_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]
    sigma: float = 0.0
    slowness: tuple[float, ...] = ()
    straggler: Straggler = Straggler()
    sharded: bool = True

    def __post_init__(self) -> None:
        lengths = {len(self.bucket_nbytes), len(self.backward_s), len(self.optimizer_s)}
        if len(lengths) != 1 or not self.bucket_nbytes:
            raise InvalidArgumentError(
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
        """Return the same workload without variation: every node takes the mean time in every iteration."""
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
        """Return each node's factor on its compute time in an iteration, a function of the arguments alone.

        All methods get the same factors, so their ratio does not depend on chance.
        """
        slowness = self.slowness or (1.0,) * nodes
        if len(slowness) != nodes:
            raise InvalidArgumentError(
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


def intra_legs_s(cluster: Cluster, workload: Workload, nbytes: float) -> float:
    """Return the seconds of an exchange's legs inside a node; FSDP's own count as compute time."""
    if workload.sharded or cluster.ranks_per_node == 1:
        return 0.0
    return cluster.links.tau("intra", cluster.ranks_per_node, nbytes)


def plan_workload(
    nbytes: int,
    *,
    bucket_nbytes: int,
    forward_s: float,
    backward_s: float,
    optimizer_s: float = 0.0,
    sigma: float = 0.0,
    slowness: tuple[float, ...] = (),
    straggler: Straggler = Straggler(),  # noqa: B008  (frozen)
    sharded: bool = True,
) -> Workload:
    """Return the workload of a model in equal buckets, with the compute times spread evenly over them.

    Args:
        nbytes: bytes of the model that the ranks of a node exchange together, such as 4 per fp32 parameter.
        bucket_nbytes: the largest size of a bucket: 25 MiB in DDP, ``flexcomm.BUCKET_BYTES`` in flexdemo.
        forward_s: seconds of the forward pass.
        backward_s: seconds of the backward pass.
        optimizer_s: seconds of the optimizer, mixing included.
        sigma: see :class:`Workload`, as for the other arguments.
        slowness: each node's factor on its compute time.
        straggler: occasional delays of single nodes.
        sharded: the model is sharded inside a node by FSDP.

    """
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
        slowness=slowness,
        straggler=straggler,
        sharded=sharded,
    )


@dataclass(frozen=True)
class Compression:
    """Sizes and costs of ``flexcomm.demo(k, chunk)``. Every node sends ``k`` of each ``chunk * chunk`` coefficients.

    Args:
        k: coefficients sent of each chunk.
        chunk: side of a chunk.
        bits_per_coefficient: bits of a sent coefficient, with its index and its share of the headers.
        encode_s_per_element: seconds to encode, per element of a rank's shard.
        decode_s_per_element: seconds to decode, per element of a rank's shard.
        decode_s_per_coefficient: seconds to decode, per coefficient received from any node.
        averaged_bits_per_coefficient: bits of an averaged coefficient in the second phase of ``two_phase``.
        element_nbytes: bytes of an element of the model.

    """

    k: int = 32
    chunk: int = 64
    bits_per_coefficient: float = 25.0
    encode_s_per_element: float = 0.0
    decode_s_per_element: float = 0.0
    decode_s_per_coefficient: float = 0.0
    averaged_bits_per_coefficient: float = 41.0
    element_nbytes: int = 4

    def __post_init__(self) -> None:
        check_between("k", self.k, 1, self.chunk * self.chunk)
        for name in ("encode_s_per_element", "decode_s_per_element", "decode_s_per_coefficient"):
            check_at_least(name, getattr(self, name), 0.0)
        for name in ("bits_per_coefficient", "averaged_bits_per_coefficient", "element_nbytes"):
            check_at_least(name, getattr(self, name), 1)

    def coefficients(self, nbytes: float) -> float:
        """Return the number of coefficients that a node sends of a bucket of ``nbytes``."""
        return nbytes / self.element_nbytes * self.k / self.chunk**2

    def payload_nbytes(self, nbytes: float) -> float:
        """Return the bytes of a node's payload for a bucket of ``nbytes``."""
        return self.coefficients(nbytes) * self.bits_per_coefficient / 8

    def averages_nbytes(self, nbytes: float, nodes: int) -> float:
        """Return the bytes of all averaged coefficients; nodes rarely select the same ones."""
        return min(nodes * self.coefficients(nbytes) * self.averaged_bits_per_coefficient / 8, nbytes)
