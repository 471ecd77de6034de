"""The simulations: when each node finishes each bucket of each iteration, by each method.

They follow from where training starts an exchange and where it waits for it; docs/runtime-model.md writes them as
formulas. Times are seconds since the start of training.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from flexcomm import InvalidArgumentError
from flexcomm.gossip import Group, Phase
from flexdemo.runtime.links import check_at_least, crossings
from flexdemo.runtime.workload import Cluster, Compression, Workload, intra_legs_s

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
        check_at_least("warmup", self.warmup, 0)
        check_at_least("iterations", self.iterations, self.warmup + 1)


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


def simulate_all_reduce(cluster: Cluster, workload: Workload, horizon: Horizon = HORIZON) -> Timing:
    """Simulate data parallelism as in DDP: each bucket is all-reduced while the backward pass goes on.

    Args:
        cluster: nodes and links.
        workload: buckets and compute times.
        horizon: how many iterations are simulated.

    """
    tau_s = [_all_reduce_s(cluster, workload, size) for size in workload.bucket_nbytes]
    computed_s = workload.forward_s + np.cumsum(workload.backward_s)
    # All-reduces queue: an iteration ends when, after the last bucket that was waited for, all later ones are done.
    remaining_s = np.cumsum(tau_s[::-1])[::-1]
    # All nodes wait for the slowest, whose factor applies to each of its buckets.
    slowest = [workload.draw(cluster.nodes, iteration, horizon.seed).max() for iteration in range(horizon.iterations)]
    lengths_s = np.max(np.outer(slowest, computed_s) + remaining_s, axis=1) + sum(workload.optimizer_s)
    return Timing(tuple(np.cumsum(lengths_s).tolist()), horizon.warmup)


def _all_reduce_s(cluster: Cluster, workload: Workload, nbytes: int) -> float:
    inter_s = cluster.links.tau("all-reduce", cluster.nodes, nbytes) if cluster.nodes > 1 else 0.0
    return intra_legs_s(cluster, workload, nbytes) + inter_s


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
    state = _NodeTimes(cluster.nodes, len(workload.bucket_nbytes))
    backward_s = workload.backward_s
    before_s = 0.0
    if updates == "step":
        before_s, backward_s = sum(backward_s), (0.0,) * len(backward_s)
    finished = []
    for iteration, plan in enumerate(_plan_phases(cluster, workload, schedule, horizon.iterations)):
        factors = workload.draw(cluster.nodes, iteration, horizon.seed)
        state.ready_s = state.ready_s + factors * (workload.forward_s + before_s)
        for bucket, (compute_s, step_s) in enumerate(zip(backward_s, workload.optimizer_s, strict=True)):
            arrived_s = state.exchanged_s[bucket]
            state.ready_s = np.maximum(state.ready_s + factors * compute_s, arrived_s) + step_s
            state.start_exchange(plan, bucket)
        finished.append(float(state.ready_s.max()))
    return Timing(tuple(finished), horizon.warmup, schedule.period or 1)


class _NodeTimes:
    """Times at which each node ends its work (u_i), its last exchange (q_i), and that of each bucket (fin_{i,b})."""

    def __init__(self, nodes: int, buckets: int) -> None:
        self.ready_s: NDArray[np.float64] = np.zeros(nodes)
        self.link_free_s: NDArray[np.float64] = np.zeros(nodes)
        self.exchanged_s: NDArray[np.float64] = np.full((buckets, nodes), -math.inf)

    def start_exchange(self, plan: PhasePlan, bucket: int) -> None:
        """Exchange ``bucket`` as soon as the nodes are ready and their earlier exchanges are done."""
        free_s = np.maximum(self.ready_s, self.link_free_s)
        end_s = np.full_like(free_s, -math.inf)
        for members, seconds in zip(plan.groups, plan.group_s[bucket], strict=True):
            end_s[members] = free_s[members].max(axis=1, keepdims=True) + seconds
        if plan.edge_nodes.size:
            # A node that is in a group, too, finishes that first.
            start_s = free_s = np.maximum(free_s, end_s)
            start_s = start_s.copy()
            np.maximum.at(start_s, plan.targets, free_s[plan.sources])
            end_s[plan.edge_nodes] = start_s[plan.edge_nodes] + plan.edge_s[bucket]
        if plan.idle_s[bucket] > 0:
            end_s[plan.idle] = free_s[plan.idle] + plan.idle_s[bucket]
        self.exchanged_s[bucket] = end_s
        self.link_free_s = np.maximum(self.link_free_s, end_s)


# Schedules as index arrays: each phase is converted once, and used in every iteration.


def _plan_phases(cluster: Cluster, workload: Workload, schedule: Schedule, iterations: int) -> Iterator[PhasePlan]:
    """Yield the plan of every iteration; phases that repeat are planned once."""
    known: dict[int, PhasePlan] = {}
    for iteration in range(iterations):
        if schedule.period is None:
            yield plan_phase(schedule.phase(iteration), cluster, workload)
            continue
        place = iteration % schedule.period
        if place not in known:
            known[place] = plan_phase(schedule.phase(place), cluster, workload)
        yield known[place]


@dataclass(frozen=True)
class PhasePlan:
    """A phase as arrays, with the seconds of its exchanges for each bucket b.

    Groups of one link and size form a class c: ``groups[c]`` is ``[groups, k]`` and ``group_s[b][c]`` their seconds.
    ``sources`` and ``targets`` are the ends of the edges, ``edge_nodes`` the nodes that have any, ``edge_s[b]`` their
    seconds. ``idle`` nodes exchange nothing with others; ``idle_s[b]`` are the seconds of their intra-node legs.
    """

    groups: tuple[NDArray[np.intp], ...]
    group_s: tuple[tuple[float, ...], ...]
    sources: NDArray[np.intp]
    targets: NDArray[np.intp]
    edge_nodes: NDArray[np.intp]
    edge_s: tuple[NDArray[np.float64], ...]
    idle: NDArray[np.intp]
    idle_s: tuple[float, ...]


def plan_phase(phase: Phase, cluster: Cluster, workload: Workload) -> PhasePlan:
    """Return the arrays and times of ``phase``."""
    classes: dict[tuple[str, int], list[tuple[int, ...]]] = defaultdict(list)
    for group in phase.groups:
        classes[getattr(group, "link", "group"), len(group.members)].append(tuple(group.members))
    groups = tuple(np.array(members, dtype=np.intp) for members in classes.values())
    sources = np.array([edge.source for edge in phase.edges], dtype=np.intp)
    targets = np.array([edge.target for edge in phase.edges], dtype=np.intp)
    _check_nodes(groups, sources, targets, cluster.nodes)
    peers = np.maximum(*(np.bincount(ends, minlength=cluster.nodes) for ends in (sources, targets)))
    edge_nodes = np.flatnonzero(peers)
    busy = np.zeros(cluster.nodes, dtype=bool)
    for members in (*groups, edge_nodes):
        busy[members] = True
    legs_s = tuple(intra_legs_s(cluster, workload, size) for size in workload.bucket_nbytes)
    sizes = list(zip(workload.bucket_nbytes, legs_s, strict=True))
    tau = cluster.links.tau
    return PhasePlan(
        groups=groups,
        group_s=tuple(tuple(leg_s + tau(link, k, size) for link, k in classes) for size, leg_s in sizes),
        sources=sources,
        targets=targets,
        edge_nodes=edge_nodes,
        edge_s=tuple(leg_s + _edges_s(peers[edge_nodes], cluster, size) for size, leg_s in sizes),
        idle=np.flatnonzero(~busy),
        idle_s=legs_s,
    )


def _edges_s(peers: NDArray[np.intp], cluster: Cluster, nbytes: int) -> NDArray[np.float64]:
    counts, place = np.unique(peers, return_inverse=True)
    seconds = np.array([cluster.links.tau("edges", int(count), nbytes) for count in counts], dtype=np.float64)
    return seconds[place]


def _check_nodes(
    groups: tuple[NDArray[np.intp], ...], sources: NDArray[np.intp], targets: NDArray[np.intp], nodes: int
) -> None:
    in_groups = np.concatenate([*(members.ravel() for members in groups), np.array([], dtype=np.intp)])
    named = np.concatenate([in_groups, sources, targets])
    unknown = named[(named < 0) | (named >= nodes)]
    if unknown.size:
        raise InvalidArgumentError(
            f"a phase names node {int(unknown[0])}, but there are {nodes} nodes, numbered from 0."
        )
    counts = np.bincount(in_groups)
    if counts.size and counts.max() > 1:
        raise InvalidArgumentError(
            f"node {int(counts.argmax())} is in {int(counts.max())} groups of a phase, needed one or none."
        )


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
    buckets = [_plan_bucket(cluster, workload, compression, nbytes) for nbytes in workload.bucket_nbytes]
    ready_s, finished = np.zeros(cluster.nodes), []
    for iteration in range(horizon.iterations):
        factors = workload.draw(cluster.nodes, iteration, horizon.seed)
        now_s = ready_s + factors * (workload.forward_s + (0.0 if overlap else sum(workload.backward_s)))
        end_s, arrived_s = 0.0, []
        for bucket, backward_s in zip(buckets, workload.backward_s, strict=True):
            now_s = now_s + factors * (backward_s if overlap else 0.0) + bucket.encode_s
            end_s = max(float(now_s.max()), end_s) + bucket.exchange_s
            arrived_s.append(end_s)
        for bucket, at_s, step_s in zip(buckets, arrived_s, workload.optimizer_s, strict=True):
            now_s = np.maximum(now_s, at_s) + bucket.decode_s + step_s
        ready_s = now_s
        finished.append(float(ready_s.max()))
    return Timing(tuple(finished), horizon.warmup)


def choose_algorithm(nodes: int, compression: Compression, nbytes: float) -> Algorithm:
    """Return the inter-node algorithm in which a node sends the fewest bytes, as flexcomm's ``auto`` does.

    The bytes of ``gather`` grow with the number of nodes; among many, ``two_phase`` or ``dense`` sends less.
    """
    sent: dict[Algorithm, float] = {one: sent_nbytes(one, nodes, compression, nbytes) for one in get_args(Algorithm)}
    return min(sent, key=lambda algorithm: sent[algorithm])


def sent_nbytes(algorithm: Algorithm, nodes: int, compression: Compression, nbytes: float) -> float:
    """Return the bytes that a node sends to other nodes for a bucket of ``nbytes``."""
    if algorithm == "dense":
        return crossings("all-reduce", nodes) * nbytes
    payload = compression.payload_nbytes(nbytes)
    if algorithm == "gather":
        return crossings("gather", nodes) * payload
    return crossings("gather", nodes) / nodes * (payload + compression.averages_nbytes(nbytes, nodes))


class _BucketTimes(NamedTuple):
    encode_s: float
    exchange_s: float
    decode_s: float


def _plan_bucket(cluster: Cluster, workload: Workload, compression: Compression, nbytes: int) -> _BucketTimes:
    nodes, ranks = cluster.nodes, cluster.ranks_per_node
    algorithm = choose_algorithm(nodes, compression, nbytes)
    exchange_s = _exchange_s(cluster, compression, algorithm, nbytes) + intra_legs_s(cluster, workload, nbytes)
    if algorithm == "dense":
        return _BucketTimes(0.0, exchange_s, 0.0)
    elements, sent = nbytes / compression.element_nbytes / ranks, compression.coefficients(nbytes) / ranks
    # In two_phase a node adds up its share of all payloads, as many coefficients as it sent, then reads all averages.
    received = nodes * sent if algorithm == "gather" else sent + min(nodes * sent, elements)
    return _BucketTimes(
        encode_s=elements * compression.encode_s_per_element,
        exchange_s=exchange_s,
        decode_s=elements * compression.decode_s_per_element + received * compression.decode_s_per_coefficient,
    )


def _exchange_s(cluster: Cluster, compression: Compression, algorithm: Algorithm, nbytes: int) -> float:
    nodes, tau = cluster.nodes, cluster.links.tau
    if nodes == 1:
        return 0.0
    if algorithm == "dense":
        return tau("all-reduce", nodes, nbytes)
    payload = compression.payload_nbytes(nbytes)
    if algorithm == "gather":
        return tau("gather", nodes, payload)
    averages = compression.averages_nbytes(nbytes, nodes)
    return tau("gather", nodes, payload / nodes) + tau("gather", nodes, averages / nodes)
