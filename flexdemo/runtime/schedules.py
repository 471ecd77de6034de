"""Schedules as index arrays: each phase is converted once, for the simulation to use in every iteration.

A group may name the type of its exchange in an attribute ``link``; the default is ``group``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from flexcomm import InvalidArgumentError
from flexcomm.gossip import Group, Phase
from flexdemo.runtime.workload import intra_legs_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flexdemo.runtime.workload import Cluster, Workload

__all__ = ["AllReduceSchedule", "PhasePlan", "Schedule", "plan_phase"]


class Schedule(Protocol):
    """A phase for every step, as those of ``flexcomm.gossip``; ``period`` is None if phases never repeat."""

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
