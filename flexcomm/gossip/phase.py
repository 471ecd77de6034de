"""A phase: who mixes with whom at one step, and with which weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flexcomm.errors import InvalidArgumentError
from flexcomm.gossip.arguments import real_number, some_of, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

__all__ = ["ROUNDING", "Edge", "Group", "Phase"]

ROUNDING = 1e-12
"""Weights that differ by no more than this are taken for equal: it is what sums of rounded weights are off by."""


@dataclass(frozen=True)
class Group:
    """Nodes that all mix with each other; a group of one keeps what it has.

    A member takes ``own_weight`` of its own and ``peer_weight`` of every other's. Without a ``self_weight`` all count
    alike. ``members`` are in ascending order, whatever order they came in.
    """

    members: tuple[int, ...]
    self_weight: float | None = None

    def __post_init__(self) -> None:
        members = tuple(sorted(whole_number(member, "a member of a group") for member in self.members))
        object.__setattr__(self, "members", members)
        if self.self_weight is not None:
            object.__setattr__(self, "self_weight", real_number(self.self_weight, "the self_weight of a group"))
        if not members or members[0] < 0 or len(set(members)) < len(members):
            raise InvalidArgumentError(
                f"a group has members {some_of(members) or '(none)'}, but needs at least one node, all from 0 on and "
                f"each once."
            )
        # Written so that NaN is refused too.
        if self.self_weight is not None and len(members) > 1 and not 0.0 < self.self_weight < 1.0:
            raise InvalidArgumentError(
                f"the group of {some_of(members)} has self_weight {self.self_weight}, but it must lie between 0 and 1, "
                f"both excluded: at 1 nobody hears anybody, at 0 nodes may swap for ever what they have. Leave it out "
                f"for 1/{len(members)}."
            )

    @property
    def own_weight(self) -> float:
        """The weight of a member's own."""
        if len(self.members) == 1:
            return 1.0
        return 1.0 / len(self.members) if self.self_weight is None else self.self_weight

    @property
    def peer_weight(self) -> float:
        """The weight of every other member's; 0 in a group of one."""
        if len(self.members) == 1:
            return 0.0
        if self.self_weight is None:
            return 1.0 / len(self.members)
        return (1.0 - self.self_weight) / (len(self.members) - 1)


@dataclass(frozen=True)
class Edge:
    """``target`` adds ``weight`` times what ``source`` has; the source keeps what its edges leave of 1."""

    source: int
    target: int
    weight: float

    def __post_init__(self) -> None:
        if not (type(self.source) is type(self.target) is int and type(self.weight) is float):
            object.__setattr__(self, "source", whole_number(self.source, "the source of an edge"))
            object.__setattr__(self, "target", whole_number(self.target, "the target of an edge"))
            object.__setattr__(self, "weight", real_number(self.weight, "the weight of an edge"))
        if self.source == self.target or self.source < 0 or self.target < 0:
            raise InvalidArgumentError(
                f"an edge leads from node {self.source} to node {self.target}, but needs two different nodes from 0 "
                f"on. What a node keeps is what its edges leave of 1: it needs no edge to itself."
            )
        if not 0.0 < self.weight < 1.0:
            raise InvalidArgumentError(
                f"the edge from node {self.source} to node {self.target} has weight {self.weight}, but it must lie "
                f"between 0 and 1, both excluded. Leave out an edge of weight 0."
            )


class _Places(NamedTuple):
    """Where to find each node of a phase."""

    groups: dict[int, Group]
    sent: dict[int, tuple[Edge, ...]]
    heard: dict[int, tuple[Edge, ...]]


@dataclass(frozen=True)
class Phase:
    """Groups and edges of one step; a node in neither keeps what it has.

    A node is in one group at most, and then on no edge. As a matrix, ``W[i, j]`` being the weight with which node i
    takes what node j has, every column sums to 1: the mean over nodes stays. Every node keeps a part of its own
    (``W[i, i] > 0``). Without that, connected nodes could swap what they have for ever, or give all of it away and
    have nothing left to divide by in push-sum; with it, nodes that hear of each other do average.

    Groups and edges are in ascending order, whatever order they came in: phases that do the same are equal.
    """

    groups: tuple[Group, ...] = ()
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        groups = tuple(sorted(self.groups, key=lambda group: group.members))
        edges = tuple(sorted(self.edges, key=lambda edge: (edge.source, edge.target)))
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "edges", edges)
        _check_nodes_once(groups, edges)
        _check_edges_once(edges)
        _check_something_kept(edges)

    def group_of(self, node: int) -> Group | None:
        """Return the group in which ``node`` meets others, if there is one."""
        return self._places.groups.get(node)

    def out_edges(self, node: int) -> tuple[Edge, ...]:
        """Return the edges on which ``node`` sends, by target."""
        return self._places.sent.get(node, ())

    def in_edges(self, node: int) -> tuple[Edge, ...]:
        """Return the edges on which ``node`` hears, by source."""
        return self._places.heard.get(node, ())

    def self_weight(self, node: int) -> float:
        """Return the weight of ``node``'s own: 1 where it keeps all it has."""
        group = self.group_of(node)
        return _kept(self.out_edges(node)) if group is None else group.own_weight

    def peers(self, node: int) -> tuple[int, ...]:
        """Return everybody to whom ``node`` sends or whom it hears, in ascending order."""
        group = self.group_of(node)
        if group is not None:
            return tuple(member for member in group.members if member != node)
        sent, heard = self.out_edges(node), self.in_edges(node)
        return tuple(sorted({edge.target for edge in sent} | {edge.source for edge in heard}))

    @cached_property
    def most_peers(self) -> int:
        """The most others to whom a node sends, or whom it hears, in this phase."""
        sent = map(len, self._places.sent.values())
        heard = map(len, self._places.heard.values())
        return max(chain((len(group.members) - 1 for group in self.groups), sent, heard), default=0)

    @cached_property
    def highest(self) -> int:
        """The highest node in this phase; -1 where there is none."""
        ends = (max(edge.source, edge.target) for edge in self.edges)
        return max(chain((group.members[-1] for group in self.groups), ends), default=-1)

    def matrix(self, nodes: int) -> NDArray[np.float64]:
        """Return the phase as ``[nodes, nodes]``: row i says with which weight node i takes what each node has."""
        if nodes <= self.highest:
            raise InvalidArgumentError(
                f"a matrix of {nodes} nodes was asked for, but this phase has a node {self.highest}: ask for at least "
                f"{self.highest + 1}."
            )
        weights = np.eye(nodes)
        for group in self.groups:
            weights[np.ix_(group.members, group.members)] = group.peer_weight
            weights[group.members, group.members] = group.own_weight
        for edge in self.edges:
            weights[edge.target, edge.source] = edge.weight
            weights[edge.source, edge.source] = self.self_weight(edge.source)
        return weights

    @cached_property
    def _places(self) -> _Places:
        groups = {node: group for group in self.groups if len(group.members) > 1 for node in group.members}
        by_target = sorted(self.edges, key=lambda edge: (edge.target, edge.source))
        sent = {source: tuple(edges) for source, edges in groupby(self.edges, key=lambda edge: edge.source)}
        heard = {target: tuple(edges) for target, edges in groupby(by_target, key=lambda edge: edge.target)}
        return _Places(groups, sent, heard)

    # Kept, because phases of thousands of nodes are looked up at every step.
    @cached_property
    def _hash(self) -> int:
        return hash((self.groups, self.edges))

    def __hash__(self) -> int:
        return self._hash

    # A hash is good in its own process only, so nothing that was kept travels.
    def __reduce__(self) -> tuple[type[Phase], tuple[Any, ...]]:
        return Phase, (self.groups, self.edges)


def _kept(sent: Iterable[Edge]) -> float:
    return 1.0 - math.fsum(edge.weight for edge in sent)


def _check_nodes_once(groups: Sequence[Group], edges: Sequence[Edge]) -> None:
    grouped: set[int] = set()
    for group in groups:
        if not grouped.isdisjoint(group.members):
            twice = some_of(sorted(grouped.intersection(group.members)))
            raise InvalidArgumentError(
                f"node {twice} stands in two groups of one phase, but mixes in one at most: join the groups, or put "
                f"them into two phases."
            )
        grouped.update(group.members)
    both = grouped.intersection(chain.from_iterable((edge.source, edge.target) for edge in edges)) if grouped else None
    if both:
        raise InvalidArgumentError(
            f"node {some_of(sorted(both))} stands in a group and on an edge of one phase, but can mix in one way only: "
            f"write the group as edges, or put the two into two phases."
        )


def _check_edges_once(edges: Sequence[Edge]) -> None:
    for one, other in pairwise(edges):
        if (one.source, one.target) == (other.source, other.target):
            raise InvalidArgumentError(
                f"two edges lead from node {one.source} to node {one.target} in one phase, with weights {one.weight} "
                f"and {other.weight}: write one edge with the weight you mean."
            )


def _check_something_kept(edges: Sequence[Edge]) -> None:
    for source, sent in groupby(edges, key=lambda edge: edge.source):
        kept = _kept(sent)
        if kept <= ROUNDING:
            raise InvalidArgumentError(
                f"node {source} sends {1.0 - kept:.6g} of what it has in one phase and keeps {kept:.6g}, but must keep "
                f"more than nothing: give its edges weights that sum to less than 1."
            )
