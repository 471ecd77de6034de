"""Runtime model: the seconds of a training iteration by All-Reduce, decentralized training and FlexDeMo.

Everything is arithmetic, without tensors and ranks. docs/runtime-model.md has the formulas, and what they were compared
with. Each ``simulate_...`` takes a cluster (nodes and links), a workload (buckets and compute times) and a horizon (how
many iterations). Impossible numbers, such as a negative time, raise ``flexcomm.InvalidArgumentError``.

Example::

    from flexcomm import gossip
    from flexdemo.runtime import AlphaBeta, Cluster, Compression, plan_workload
    from flexdemo.runtime import simulate_all_reduce, simulate_decentralized, simulate_flexdemo

    cluster = Cluster(nodes=64, links=AlphaBeta(bytes_per_s=1.25e9, latency_s=50e-6))
    workload = plan_workload(500_000_000, bucket_nbytes=25 << 20, forward_s=0.2, backward_s=0.4)
    simulate_all_reduce(cluster, workload).iteration_s
    simulate_decentralized(cluster, workload, gossip.one_peer_exponential(64)).iteration_s
    simulate_flexdemo(cluster, workload, Compression(k=32, encode_s_per_element=3e-9)).iteration_s
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from flexcomm import InvalidArgumentError, gossip
from flexcomm.gossip import Group, Phase
from flexdemo.runtime.inputs import AlphaBeta as AlphaBeta
from flexdemo.runtime.inputs import Cluster as Cluster
from flexdemo.runtime.inputs import Compression as Compression
from flexdemo.runtime.inputs import Links as Links
from flexdemo.runtime.inputs import LinkTable as LinkTable
from flexdemo.runtime.inputs import MeasuredLinks as MeasuredLinks
from flexdemo.runtime.inputs import Straggler as Straggler
from flexdemo.runtime.inputs import Workload as Workload
from flexdemo.runtime.inputs import check_range, crossings
from flexdemo.runtime.inputs import plan_workload as plan_workload

Updates = Literal["backward", "step"]
Algorithm = Literal["gather", "two_phase", "dense"]
"""Inter-node algorithms of a compressed bucket. ``two_phase`` is a reduce-scatter and an all-gather of payloads."""


@dataclass(frozen=True)
class Horizon:
    """Length of a simulation: its iterations, how many of the first do not count, and the seed of all draws."""

    iterations: int = 120
    warmup: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(0, warmup=self.warmup)
        check_range(self.warmup + 1, iterations=self.iterations)


HORIZON = Horizon()


@dataclass(frozen=True)
class Timing:
    """Result of a simulation: ``finished_s[t]`` is when the last node finishes iteration t."""

    finished_s: tuple[float, ...]
    warmup: int
    period: int = 1

    @property
    def iteration_s(self) -> float:
        """The mean seconds per iteration after warm-up, over as many whole periods of the schedule as fit."""
        count = len(self.finished_s) - self.warmup
        count = count // self.period * self.period or count
        begin = len(self.finished_s) - count
        began_s = self.finished_s[begin - 1] if begin else 0.0
        return (self.finished_s[-1] - began_s) / count


def simulate_all_reduce(cluster: Cluster, workload: Workload, horizon: Horizon = HORIZON) -> Timing:
    """Simulate data parallelism as in DDP: each bucket is all-reduced while the backward pass goes on."""
    nodes, tau = cluster.nodes, cluster.links.tau
    tau_s = [cluster.intra_legs_s(workload, size) + tau("all-reduce", nodes, size) for size in workload.bucket_nbytes]
    computed_s = workload.forward_s + np.cumsum(workload.backward_s)
    # All-reduces queue: an iteration ends when, after the last bucket that was waited for, all later ones are done.
    remaining_s = np.cumsum(tau_s[::-1])[::-1]
    # All nodes wait for the slowest, whose factor applies to each of its buckets.
    slowest = [workload.draw(nodes, iteration, horizon.seed).max() for iteration in range(horizon.iterations)]
    lengths_s = np.max(np.outer(slowest, computed_s) + remaining_s, axis=1) + sum(workload.optimizer_s)
    return Timing(tuple(np.cumsum(lengths_s).tolist()), horizon.warmup)


# Decentralized training


class Schedule(Protocol):
    """A phase for every step, as those of ``flexcomm.gossip``; ``period`` is None if phases never repeat.

    A group may name the type of its exchange in an attribute ``link``; the default is ``group``.
    """

    @property
    def nodes(self) -> int: ...
    @property
    def period(self) -> int | None: ...
    def phase(self, step: int) -> Phase: ...


class _AllReduceGroup(Group):
    link = "all-reduce"


def all_reduce_schedule(nodes: int) -> gossip.Schedule:
    """Return a schedule with All-Reduce's traffic, which has the overlap of decentralized training."""
    return gossip.Schedule("all-reduce", nodes, (Phase((_AllReduceGroup(tuple(range(nodes))),)),))


def simulate_decentralized(
    cluster: Cluster,
    workload: Workload,
    schedule: Schedule,
    *,
    updates: Updates = "backward",
    horizon: Horizon = HORIZON,
) -> Timing:
    """Simulate decentralized training, in which an exchange has a whole iteration to arrive.

    For each bucket a node waits for the exchange that it started an iteration ago, mixes, steps, and starts the next.
    With ``updates="backward"`` it does so when the backward pass completes the bucket, with "step" after that pass.
    """
    if schedule.nodes != cluster.nodes:
        needed = f"needed one for the cluster's {cluster.nodes}"
        raise InvalidArgumentError(f"got a schedule for {schedule.nodes} nodes, {needed}.")
    if updates not in get_args(Updates):
        raise InvalidArgumentError(f"got updates={updates!r}, needed one of {', '.join(get_args(Updates))}.")
    before_s, backward_s = 0.0, workload.backward_s
    if updates == "step":
        before_s, backward_s = sum(backward_s), (0.0,) * len(backward_s)
    # A phase is converted to arrays once: phases that repeat are used in many iterations.
    plan = lru_cache(schedule.period or 1)(lambda step: PhasePlan(schedule.phase(step), cluster, workload))
    # u_i, q_i and fin_{i,b}: when a node ends its work, its last exchange, and its last exchange of each bucket.
    ready_s, link_free_s = np.zeros(cluster.nodes), np.zeros(cluster.nodes)
    exchanged_s = np.full((len(backward_s), cluster.nodes), -math.inf)
    finished = []
    for iteration in range(horizon.iterations):
        phase = plan(iteration % schedule.period if schedule.period else iteration)
        factors = workload.draw(cluster.nodes, iteration, horizon.seed)
        ready_s = ready_s + factors * (workload.forward_s + before_s)
        for bucket, (compute_s, step_s) in enumerate(zip(backward_s, workload.optimizer_s, strict=True)):
            ready_s = np.maximum(ready_s + factors * compute_s, exchanged_s[bucket]) + step_s
            exchanged_s[bucket] = phase.exchange(bucket, np.maximum(ready_s, link_free_s))
            link_free_s = np.maximum(link_free_s, exchanged_s[bucket])
        finished.append(float(ready_s.max()))
    return Timing(tuple(finished), horizon.warmup, schedule.period or 1)


class PhasePlan:
    """A phase as arrays, with the seconds of its exchanges for each bucket b."""

    def __init__(self, phase: Phase, cluster: Cluster, workload: Workload) -> None:
        nodes, tau = cluster.nodes, cluster.links.tau
        self.sources = np.array([edge.source for edge in phase.edges], dtype=np.intp)
        self.targets = np.array([edge.target for edge in phase.edges], dtype=np.intp)
        if phase.highest >= nodes:
            raise InvalidArgumentError(f"a phase names node {phase.highest}, but there are {nodes} nodes, from 0 on.")
        legs_s = [cluster.intra_legs_s(workload, size) for size in workload.bucket_nbytes]
        sizes = list(zip(workload.bucket_nbytes, legs_s, strict=True))
        # Groups of one link and size: their members, [groups, k], and their seconds, [b].
        classes: dict[tuple[str, int], list[tuple[int, ...]]] = defaultdict(list)
        for group in phase.groups:
            classes[getattr(group, "link", "group"), len(group.members)].append(tuple(group.members))
        self.groups = [
            (np.array(members, dtype=np.intp), [leg_s + tau(link, k, size) for size, leg_s in sizes])
            for (link, k), members in classes.items()
        ]
        # Nodes that exchange nothing with others still have their legs inside the node, if there are any.
        self.idle_s = [leg_s or -math.inf for leg_s in legs_s]
        # A node pays for its out-peers or its in-peers, whichever are more: seconds are [b, edge_nodes].
        peers = np.maximum(*(np.bincount(ends, minlength=nodes) for ends in (self.sources, self.targets)))
        self.edge_nodes = np.flatnonzero(peers)
        peer_counts, place = np.unique(peers[self.edge_nodes], return_inverse=True)
        edge_s = np.array([[leg_s + tau("edges", int(k), size) for k in peer_counts] for size, leg_s in sizes])
        self.edge_s = edge_s[:, place]

    def exchange(self, bucket: int, free_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return when each node's exchange ends, if node i can start at ``free_s[i]``; -inf if it has none."""
        end_s = free_s + self.idle_s[bucket]
        for members, seconds in self.groups:
            end_s[members] = free_s[members].max(axis=1, keepdims=True) + seconds[bucket]
        if self.edge_nodes.size:
            start_s = free_s.copy()
            np.maximum.at(start_s, self.targets, free_s[self.sources])
            end_s[self.edge_nodes] = start_s[self.edge_nodes] + self.edge_s[bucket]
        return end_s


# FlexDeMo


def simulate_flexdemo(
    cluster: Cluster, workload: Workload, compression: Compression, *, overlap: bool = True, horizon: Horizon = HORIZON
) -> Timing:
    """Simulate FlexDeMo: encode, exchange payloads among all nodes, decode.

    All nodes wait for all others, as in All-Reduce. With ``overlap`` a bucket is encoded and exchanged as soon as its
    gradients are there; else after the backward pass, each exchanged while the next is encoded. Buckets are decoded
    after the backward pass, in the order in which they arrive. The ranks of a node share encoding and decoding evenly.
    """
    buckets = [_bucket_times(cluster, workload, compression, nbytes) for nbytes in workload.bucket_nbytes]
    ready_s, finished = np.zeros(cluster.nodes), []
    for iteration in range(horizon.iterations):
        factors = workload.draw(cluster.nodes, iteration, horizon.seed)
        ready_s = ready_s + factors * (workload.forward_s + (0.0 if overlap else sum(workload.backward_s)))
        end_s, arrived_s = 0.0, []
        for (encode_s, exchange_s, _), backward_s in zip(buckets, workload.backward_s, strict=True):
            ready_s = ready_s + factors * (backward_s if overlap else 0.0) + encode_s
            end_s = max(float(ready_s.max()), end_s) + exchange_s
            arrived_s.append(end_s)
        for (_, _, decode_s), at_s, step_s in zip(buckets, arrived_s, workload.optimizer_s, strict=True):
            ready_s = np.maximum(ready_s, at_s) + decode_s + step_s
        finished.append(float(ready_s.max()))
    return Timing(tuple(finished), horizon.warmup)


def _bucket_times(
    cluster: Cluster, workload: Workload, compression: Compression, nbytes: int
) -> tuple[float, float, float]:
    """Return the seconds to encode, exchange and decode a bucket."""
    nodes, ranks = cluster.nodes, cluster.ranks_per_node
    algorithm = choose_algorithm(nodes, compression, nbytes)
    collectives = _collectives(algorithm, nodes, compression, nbytes)
    exchange_s = sum(cluster.links.tau(link, nodes, size) for link, size in collectives)
    exchange_s += cluster.intra_legs_s(workload, nbytes)
    if algorithm == "dense":
        return 0.0, exchange_s, 0.0
    elements, sent = nbytes / compression.element_nbytes / ranks, compression.coefficients(nbytes) / ranks
    # In two_phase a node adds up its share of all payloads, as many coefficients as it sent, then reads all averages.
    received = nodes * sent if algorithm == "gather" else sent + min(nodes * sent, elements)
    decode_s = elements * compression.decode_s_per_element + received * compression.decode_s_per_coefficient
    return elements * compression.encode_s_per_element, exchange_s, decode_s


def choose_algorithm(nodes: int, compression: Compression, nbytes: float) -> Algorithm:
    """Return the inter-node algorithm in which a node sends the fewest bytes, as flexcomm's ``auto`` does."""
    algorithms: tuple[Algorithm, ...] = get_args(Algorithm)
    return min(algorithms, key=lambda algorithm: sent_nbytes(algorithm, nodes, compression, nbytes))


def sent_nbytes(algorithm: Algorithm, nodes: int, compression: Compression, nbytes: float) -> float:
    """Return the bytes that a node sends to other nodes for a bucket of ``nbytes``."""
    return sum(crossings(link, nodes) * size for link, size in _collectives(algorithm, nodes, compression, nbytes))


def _collectives(algorithm: Algorithm, nodes: int, compression: Compression, nbytes: float) -> list[tuple[str, float]]:
    """Return link and bytes of each collective between nodes."""
    payload, averages = compression.payload_nbytes(nbytes), compression.averages_nbytes(nbytes, nodes)
    return {
        "gather": [("gather", payload)],
        "two_phase": [("gather", payload / nodes), ("gather", averages / nodes)],
        "dense": [("all-reduce", nbytes)],
    }[algorithm]


# Comparison with All-Reduce

_BISECTIONS = 12


@dataclass(frozen=True)
class BreakEven:
    """A rate at which two methods take the same time; on its ``faster_side`` the compared method is faster."""

    bytes_per_s: float
    faster_side: Literal["below", "above"]


def find_break_evens(
    method_s: Callable[[float], float], all_reduce_s: Callable[[float], float], *, speedup: float = 1.0
) -> tuple[BreakEven, ...]:
    """Return the rates, ascending, at which All-Reduce takes ``speedup`` times as long as a method.

    ``method_s`` and ``all_reduce_s`` give seconds per iteration at a rate, in bytes per second between nodes. Rates
    from 100 kB/s to 100 GB/s are searched; two of them within a third of a decade may be missed.
    """

    def is_faster(rate: float) -> bool:
        return all_reduce_s(rate) > speedup * method_s(rate)

    found = []
    rates = np.geomspace(1e5, 1e11, 19).tolist()
    for (low, faster), (high, faster_at_high) in pairwise([(rate, is_faster(rate)) for rate in rates]):
        if faster == faster_at_high:
            continue
        for _ in range(_BISECTIONS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if is_faster(middle) == faster else (low, middle)
        found.append(BreakEven(math.sqrt(low * high), "below" if faster else "above"))
    return tuple(found)


@dataclass(frozen=True)
class SpeedupFactors:
    """The speedup of a schedule over All-Reduce as a product of three causes, each added to the ones before it.

    ``overlap``: All-Reduce's traffic has a whole iteration to arrive. ``links``: the schedule's traffic instead of
    All-Reduce's. Both without variation of compute times; ``variation``: the speedup with it over that without.
    """

    overlap: float
    links: float
    variation: float


def explain_speedup(
    cluster: Cluster,
    workload: Workload,
    schedule: Schedule,
    all_reduce_workload: Workload | None = None,
    *,
    updates: Updates = "backward",
    horizon: Horizon = HORIZON,
) -> SpeedupFactors:
    """Return how much overlap, cheaper exchanges and variation contribute to a schedule's speedup over All-Reduce.

    ``all_reduce_workload`` is that of All-Reduce, if its buckets are of another size.
    """

    def decentralized_s(load: Workload, which: Schedule) -> float:
        return simulate_decentralized(cluster, load, which, updates=updates, horizon=horizon).iteration_s

    reduced, steady = all_reduce_workload or workload, workload.steady()
    steady_all_reduce_s = simulate_all_reduce(cluster, reduced.steady(), horizon).iteration_s
    overlapped_s = decentralized_s(steady, all_reduce_schedule(cluster.nodes))
    steady_s = decentralized_s(steady, schedule)
    speedup = simulate_all_reduce(cluster, reduced, horizon).iteration_s / decentralized_s(workload, schedule)
    return SpeedupFactors(
        overlap=steady_all_reduce_s / overlapped_s,
        links=overlapped_s / steady_s,
        variation=speedup * steady_s / steady_all_reduce_s,
    )
