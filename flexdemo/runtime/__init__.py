"""Runtime model: the seconds of a training iteration by All-Reduce, decentralized training and FlexDeMo.

Everything is arithmetic: no tensors and no ranks, and 1,024 nodes take a second. The simulations follow from where
training starts an exchange and where it waits for it; docs/runtime-model.md writes them as formulas. The model is a
reconstruction of the one in "From promise to practice" (arXiv 2410.11998); the page lists what was checked, and how.

Example::

    from flexcomm import gossip
    from flexdemo.runtime import AlphaBeta, Cluster, Compression, plan_workload
    from flexdemo.runtime import simulate_all_reduce, simulate_decentralized, simulate_flexdemo

    cluster = Cluster(nodes=64, links=AlphaBeta(bytes_per_s=1.25e9, latency_s=50e-6))
    workload = plan_workload(500_000_000, bucket_nbytes=25 << 20, forward_s=0.2, backward_s=0.4)
    simulate_all_reduce(cluster, workload).iteration_s
    simulate_decentralized(cluster, workload, gossip.one_peer_exponential(64)).iteration_s
    simulate_flexdemo(cluster, workload, Compression(k=32, encode_s_per_element=3e-9)).iteration_s

Impossible numbers, such as a negative time, raise ``flexcomm.InvalidArgumentError``.
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

from flexcomm import InvalidArgumentError
from flexcomm.gossip import Group, Phase
from flexdemo.runtime.inputs import (
    AlphaBeta,
    Cluster,
    Compression,
    Links,
    LinkTable,
    MeasuredLinks,
    Straggler,
    Workload,
    check_range,
    crossings,
    fit_alpha_beta,
    plan_workload,
)

__all__ = [
    "Algorithm",
    "AllReduceSchedule",
    "AlphaBeta",
    "BreakEven",
    "Cluster",
    "Compression",
    "Horizon",
    "LinkTable",
    "Links",
    "MeasuredLinks",
    "Schedule",
    "SpeedupFactors",
    "Straggler",
    "Timing",
    "Updates",
    "Workload",
    "choose_algorithm",
    "explain_speedup",
    "find_break_evens",
    "fit_alpha_beta",
    "plan_workload",
    "sent_nbytes",
    "simulate_all_reduce",
    "simulate_decentralized",
    "simulate_flexdemo",
]

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
    """Simulate data parallelism as in DDP: each bucket is all-reduced while the backward pass goes on.

    Args:
        cluster: nodes and links.
        workload: buckets and compute times.
        horizon: how many iterations are simulated.

    """
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


class AllReduceGroup(Group):
    """A group that all-reduces, instead of averaging in the way that is fastest for its size."""

    link = "all-reduce"


@dataclass(frozen=True)
class AllReduceSchedule:
    """All nodes all-reduce in every step: All-Reduce's traffic with the overlap of decentralized training."""

    nodes: int
    period: int = 1

    def phase(self, step: int) -> Phase:  # noqa: ARG002  (the name is the protocol's)
        return Phase((AllReduceGroup(tuple(range(self.nodes))),))


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

    Args:
        cluster: nodes and links.
        workload: buckets and compute times.
        schedule: one of ``flexcomm.gossip`` for as many nodes.
        updates: "backward" steps as the backward pass completes a bucket, "step" on all buckets after it.
        horizon: how many iterations are simulated.

    """
    if schedule.nodes != cluster.nodes:
        raise InvalidArgumentError(
            f"got a schedule for {schedule.nodes} nodes, needed one for the cluster's {cluster.nodes}."
        )
    if updates not in get_args(Updates):
        raise InvalidArgumentError(f"got updates={updates!r}, needed one of {', '.join(get_args(Updates))}.")
    before_s, backward_s = 0.0, workload.backward_s
    if updates == "step":
        before_s, backward_s = sum(backward_s), (0.0,) * len(backward_s)
    # A phase is converted to arrays once: phases that repeat are used in many iterations.
    plan = lru_cache(schedule.period or 1)(lambda step: plan_phase(schedule.phase(step), cluster, workload))
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


@dataclass(frozen=True)
class PhasePlan:
    """A phase as arrays, with the seconds of its exchanges for each bucket b.

    Groups of one link and size form a class: a pair of their members, ``[groups, k]``, and their seconds, ``[b]``.
    ``sources`` and ``targets`` are the ends of the edges, ``edge_nodes`` the nodes that have any, and ``edge_s`` their
    seconds, ``[b, edge_nodes]``.
    """

    groups: tuple[tuple[NDArray[np.intp], list[float]], ...]
    sources: NDArray[np.intp]
    targets: NDArray[np.intp]
    edge_nodes: NDArray[np.intp]
    edge_s: NDArray[np.float64]

    def exchange(self, bucket: int, free_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return when each node's exchange ends, if node i can start at ``free_s[i]``; -inf if it has none."""
        end_s = np.full_like(free_s, -math.inf)
        for members, seconds in self.groups:
            end_s[members] = free_s[members].max(axis=1, keepdims=True) + seconds[bucket]
        if self.edge_nodes.size:
            # A node that is in a group, too, finishes that first.
            free_s = np.maximum(free_s, end_s)
            start_s = free_s.copy()
            np.maximum.at(start_s, self.targets, free_s[self.sources])
            end_s[self.edge_nodes] = start_s[self.edge_nodes] + self.edge_s[bucket]
        return end_s


def plan_phase(phase: Phase, cluster: Cluster, workload: Workload) -> PhasePlan:
    """Return the arrays and times of ``phase``."""
    sources = np.array([edge.source for edge in phase.edges], dtype=np.intp)
    targets = np.array([edge.target for edge in phase.edges], dtype=np.intp)
    in_groups = np.array([node for group in phase.groups for node in group.members], dtype=np.intp)
    named = np.concatenate([in_groups, sources, targets])
    unknown = named[(named < 0) | (named >= cluster.nodes)]
    if unknown.size:
        raise InvalidArgumentError(
            f"a phase names node {unknown[0]}, but there are {cluster.nodes} nodes, numbered from 0."
        )
    counts = np.bincount(in_groups, minlength=cluster.nodes)
    if counts.max() > 1:
        raise InvalidArgumentError(
            f"node {counts.argmax()} is in {counts.max()} groups of a phase, needed one or none."
        )
    tau = cluster.links.tau
    legs_s = [cluster.intra_legs_s(workload, size) for size in workload.bucket_nbytes]
    sizes = list(zip(workload.bucket_nbytes, legs_s, strict=True))
    classes: dict[tuple[str, int], list[tuple[int, ...]]] = defaultdict(list)
    for group in phase.groups:
        classes[getattr(group, "link", "group"), len(group.members)].append(tuple(group.members))
    groups = [
        (np.array(members, dtype=np.intp), [leg_s + tau(link, k, size) for size, leg_s in sizes])
        for (link, k), members in classes.items()
    ]
    # Nodes that exchange nothing with others still have their legs inside the node, if there are any.
    idle = np.setdiff1d(np.arange(cluster.nodes), named)
    if idle.size and any(legs_s):
        groups.append((idle[:, None], [leg_s or -math.inf for leg_s in legs_s]))
    # A node pays for its out-peers or its in-peers, whichever are more.
    peers = np.maximum(*(np.bincount(ends, minlength=cluster.nodes) for ends in (sources, targets)))
    edge_nodes = np.flatnonzero(peers)
    peer_counts, place = np.unique(peers[edge_nodes], return_inverse=True)
    edge_s = np.array([[leg_s + tau("edges", int(k), size) for k in peer_counts] for size, leg_s in sizes])
    return PhasePlan(tuple(groups), sources, targets, edge_nodes, edge_s[:, place])


# FlexDeMo


def simulate_flexdemo(
    cluster: Cluster,
    workload: Workload,
    compression: Compression,
    *,
    overlap: bool = True,
    horizon: Horizon = HORIZON,
) -> Timing:
    """Simulate FlexDeMo: encode, exchange payloads among all nodes, decode.

    All nodes wait for all others, as in All-Reduce. Buckets are decoded after the backward pass, in the order in which
    they arrive. The ranks of a node share encoding and decoding evenly.

    Args:
        cluster: nodes and links.
        workload: buckets and compute times.
        compression: sizes of payloads, and costs of encoding and decoding.
        overlap: encode a bucket as soon as its gradients are there, and exchange it during the backward pass. If
            False, all buckets are encoded after the backward pass, each exchanged while the next is encoded.
        horizon: how many iterations are simulated.

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
    """Return the inter-node algorithm in which a node sends the fewest bytes, as flexcomm's ``auto`` does.

    The bytes of ``gather`` grow with the number of nodes; among many, ``two_phase`` or ``dense`` sends less.
    """
    algorithms: tuple[Algorithm, ...] = get_args(Algorithm)
    return min(algorithms, key=lambda algorithm: sent_nbytes(algorithm, nodes, compression, nbytes))


def sent_nbytes(algorithm: Algorithm, nodes: int, compression: Compression, nbytes: float) -> float:
    """Return the bytes that a node sends to other nodes for a bucket of ``nbytes``."""
    return sum(crossings(link, nodes) * size for link, size in _collectives(algorithm, nodes, compression, nbytes))


def _collectives(algorithm: Algorithm, nodes: int, compression: Compression, nbytes: float) -> list[tuple[str, float]]:
    """Return link and bytes of each collective between nodes."""
    payload = compression.payload_nbytes(nbytes)
    averages = compression.averages_nbytes(nbytes, nodes)
    return {
        "gather": [("gather", payload)],
        "two_phase": [("gather", payload / nodes), ("gather", averages / nodes)],
        "dense": [("all-reduce", nbytes)],
    }[algorithm]


# Comparison with All-Reduce

_LOWEST_BYTES_PER_S, _HIGHEST_BYTES_PER_S = 1e5, 1e11
_POINTS_PER_DECADE = 3
_BISECTIONS = 12


@dataclass(frozen=True)
class BreakEven:
    """A rate at which two methods take the same time; on its ``faster_side`` the compared method is faster."""

    bytes_per_s: float
    faster_side: Literal["below", "above"]


def find_break_evens(
    method_s: Callable[[float], float],
    all_reduce_s: Callable[[float], float],
    *,
    speedup: float = 1.0,
) -> tuple[BreakEven, ...]:
    """Return the rates, ascending, at which All-Reduce takes ``speedup`` times as long as a method.

    Rates from 100 kB/s to 100 GB/s are searched; two of them within a third of a decade may be missed.

    Args:
        method_s: the method's seconds per iteration at a rate, in bytes per second between nodes.
        all_reduce_s: All-Reduce's seconds per iteration at a rate.
        speedup: the ratio of the two times that is searched for.

    """

    def is_faster(log_rate: float) -> bool:
        rate = math.exp(log_rate)
        return all_reduce_s(rate) > speedup * method_s(rate)

    low, high = math.log(_LOWEST_BYTES_PER_S), math.log(_HIGHEST_BYTES_PER_S)
    count = math.ceil((high - low) / math.log(10) * _POINTS_PER_DECADE)
    grid = [low + (high - low) * number / count for number in range(count + 1)]
    found = []
    for (low, faster), (high, faster_at_high) in pairwise([(log_rate, is_faster(log_rate)) for log_rate in grid]):
        if faster == faster_at_high:
            continue
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if is_faster(middle) == faster else (low, middle)
        found.append(BreakEven(math.exp((low + high) / 2), "below" if faster else "above"))
    return tuple(found)


@dataclass(frozen=True)
class SpeedupFactors:
    """The speedup of a schedule over All-Reduce as a product of three causes, each added to the ones before it.

    Args:
        overlap: All-Reduce's traffic, but with a whole iteration to arrive; no variation of compute times.
        links: the schedule's traffic instead of All-Reduce's; no variation.
        variation: the speedup with variation over the speedup without.

    """

    overlap: float
    links: float
    variation: float

    @property
    def speedup(self) -> float:
        """The product of the three factors."""
        return self.overlap * self.links * self.variation


def explain_speedup(
    cluster: Cluster,
    workload: Workload,
    schedule: Schedule,
    *,
    all_reduce_workload: Workload | None = None,
    updates: Updates = "backward",
    horizon: Horizon = HORIZON,
) -> SpeedupFactors:
    """Return how much overlap, cheaper exchanges and variation contribute to a schedule's speedup over All-Reduce.

    Args:
        cluster: nodes and links.
        workload: buckets and compute times of decentralized training.
        schedule: one of ``flexcomm.gossip`` for as many nodes.
        all_reduce_workload: that of All-Reduce, if its buckets are of another size.
        updates: see :func:`simulate_decentralized`.
        horizon: how many iterations are simulated.

    """

    def decentralized_s(load: Workload, which: Schedule) -> float:
        return simulate_decentralized(cluster, load, which, updates=updates, horizon=horizon).iteration_s

    reduced = all_reduce_workload or workload
    steady = workload.steady()
    steady_all_reduce_s = simulate_all_reduce(cluster, reduced.steady(), horizon).iteration_s
    overlapped_s = decentralized_s(steady, AllReduceSchedule(cluster.nodes))
    steady_s = decentralized_s(steady, schedule)
    speedup = simulate_all_reduce(cluster, reduced, horizon).iteration_s / decentralized_s(workload, schedule)
    return SpeedupFactors(
        overlap=steady_all_reduce_s / overlapped_s,
        links=overlapped_s / steady_s,
        variation=speedup * steady_s / steady_all_reduce_s,
    )
