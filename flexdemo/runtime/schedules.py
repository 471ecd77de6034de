"""Who exchanges with whom, as index arrays: what the recursion needs of a schedule, computed once for each phase.

Schedules are those of ``flexcomm.gossip``, or anything with the same attributes; this room does not import them. A
group may name the kind of link it uses in an attribute ``link``; without one it is a ``group`` of nodes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from flexdemo.runtime.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from flexdemo.runtime.workload import Cluster, Workload

__all__ = ["Edge", "Everybody", "Group", "Phase", "PhasePlan", "Schedule", "plan_phase"]


class Group(Protocol):
    """Nodes that average among themselves."""

    @property
    def members(self) -> tuple[int, ...]: ...


class Edge(Protocol):
    """A message from one node to another."""

    @property
    def source(self) -> int: ...

    @property
    def target(self) -> int: ...


class Phase(Protocol):
    """The exchanges of one step."""

    @property
    def groups(self) -> Sequence[Group]: ...

    @property
    def edges(self) -> Sequence[Edge]: ...


class Schedule(Protocol):
    """A phase for every step; it repeats after ``period`` steps, or never where that is None."""

    @property
    def nodes(self) -> int: ...

    @property
    def period(self) -> int | None: ...

    def phase(self, step: int) -> Phase:
        """Return who exchanges with whom in ``step``."""
        ...


@dataclass(frozen=True)
class _Together:
    members: tuple[int, ...]
    link: str = "all-reduce"


@dataclass(frozen=True)
class _OnePhase:
    groups: tuple[_Together, ...]
    edges: tuple[Edge, ...] = ()


@dataclass(frozen=True)
class Everybody:
    """All nodes average by all-reduce in every step: All-Reduce's traffic with decentralized training's overlap."""

    nodes: int
    period: int = 1

    def phase(self, step: int) -> _OnePhase:  # noqa: ARG002  (the name is the protocol's)
        return _OnePhase((_Together(tuple(range(self.nodes))),))


@dataclass(frozen=True)
class PhasePlan:
    """A phase as arrays, and the seconds of its exchanges for each bucket.

    ``groups[c]`` is ``[groups, k]``, ``group_s[b][c]`` the seconds of bucket b in them; ``sources`` and ``targets`` are
    the edges, ``senders`` the nodes that have any, ``edge_s[b]`` their seconds. ``silent`` nodes exchange nothing with
    others; ``silent_s[b]`` is what their own node's legs take.
    """

    groups: tuple[NDArray[np.intp], ...]
    group_s: tuple[tuple[float, ...], ...]
    sources: NDArray[np.intp]
    targets: NDArray[np.intp]
    senders: NDArray[np.intp]
    edge_s: tuple[NDArray[np.float64], ...]
    silent: NDArray[np.intp]
    silent_s: tuple[float, ...]


def plan_phase(phase: Phase, cluster: Cluster, workload: Workload) -> PhasePlan:
    """Return the arrays of ``phase``; moves nothing."""
    classes = _sort_groups(phase)
    groups = tuple(np.array(members, dtype=np.intp) for members in classes.values())
    sources = np.array([edge.source for edge in phase.edges], dtype=np.intp)
    targets = np.array([edge.target for edge in phase.edges], dtype=np.intp)
    _check_nodes(groups, sources, targets, cluster.nodes)
    peers = np.maximum(*(np.bincount(ends, minlength=cluster.nodes) for ends in (sources, targets)))
    senders = np.flatnonzero(peers)
    busy = np.zeros(cluster.nodes, dtype=bool)
    for members in (*groups, senders):
        busy[members] = True
    legs_s = tuple(cluster.intra_s(size) if workload.whole else 0.0 for size in workload.bucket_nbytes)
    sizes = list(zip(workload.bucket_nbytes, legs_s, strict=True))
    tau = cluster.links.tau
    return PhasePlan(
        groups=groups,
        group_s=tuple(tuple(leg_s + tau(link, k, size) for link, k in classes) for size, leg_s in sizes),
        sources=sources,
        targets=targets,
        senders=senders,
        edge_s=tuple(leg_s + _edge_seconds(peers[senders], cluster, size) for size, leg_s in sizes),
        silent=np.flatnonzero(~busy),
        silent_s=legs_s,
    )


def _sort_groups(phase: Phase) -> dict[tuple[str, int], list[tuple[int, ...]]]:
    """Return the groups by their kind of link and size: those of one class are computed at once."""
    classes: dict[tuple[str, int], list[tuple[int, ...]]] = defaultdict(list)
    for group in phase.groups:
        classes[getattr(group, "link", "group"), len(group.members)].append(tuple(group.members))
    return classes


def _edge_seconds(peers: NDArray[np.intp], cluster: Cluster, nbytes: int) -> NDArray[np.float64]:
    counts, place = np.unique(peers, return_inverse=True)
    seconds = np.array([cluster.links.tau("edges", int(count), nbytes) for count in counts], dtype=np.float64)
    return seconds[place]


def _check_nodes(
    groups: tuple[NDArray[np.intp], ...], sources: NDArray[np.intp], targets: NDArray[np.intp], nodes: int
) -> None:
    everybody = np.concatenate([*(members.ravel() for members in groups), sources, targets])
    strange = everybody[(everybody < 0) | (everybody >= nodes)]
    if strange.size:
        raise ModelError(f"a phase names node {int(strange[0])}, but there are {nodes} nodes, numbered from 0.")
    counts = np.bincount(np.concatenate([*(members.ravel() for members in groups), np.array([], dtype=np.intp)]))
    if counts.size and counts.max() > 1:
        raise ModelError(
            f"node {int(counts.argmax())} is in {int(counts.max())} groups of a phase, needed one or none."
        )
