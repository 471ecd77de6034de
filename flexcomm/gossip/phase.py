"""Phases: the groups and edges along which nodes mix at one step, with their weights."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcomm.errors import InvalidArgumentError

ROUNDING = 1e-12
"""Weights that differ by no more than this count as equal: sums of rounded weights are off by that much."""

_SHOWN = 8


@dataclass(frozen=True)
class Group:
    """Nodes that all mix with each other; a group of one changes nothing.

    Args:
        members: node numbers, each once; stored in ascending order.
        self_weight: weight of a member's own value, between 0 and 1; equal weights for all members if not given. The
            other members share the rest equally.

    """

    members: tuple[int, ...]
    self_weight: float | None = None

    def __post_init__(self) -> None:
        members = tuple(sorted(as_int(member, "a member of a group") for member in self.members))
        object.__setattr__(self, "members", members)
        if self.self_weight is not None:
            object.__setattr__(self, "self_weight", as_float(self.self_weight, "the self_weight of a group"))
        if not members or members[0] < 0 or len(set(members)) < len(members):
            raise InvalidArgumentError(
                f"a group has members {first_few(members) or '(none)'}, but needs at least one node, all from 0 on and "
                f"each once."
            )
        # Written so that NaN is refused too.
        if self.self_weight is not None and len(members) > 1 and not 0.0 < self.self_weight < 1.0:
            raise InvalidArgumentError(
                f"the group of {first_few(members)} has self_weight {self.self_weight}, but it must lie between 0 and "
                f"1, both excluded: at 1 no member receives anything, at 0 nodes may swap their values for ever. Leave "
                f"it out for 1/{len(members)}."
            )

    @property
    def own_weight(self) -> float:
        """The weight of a member's own value."""
        if len(self.members) == 1:
            return 1.0
        return 1.0 / len(self.members) if self.self_weight is None else self.self_weight

    @property
    def peer_weight(self) -> float:
        """The weight of every other member's value; 0 in a group of one."""
        if len(self.members) == 1:
            return 0.0
        if self.self_weight is None:
            return 1.0 / len(self.members)
        return (1.0 - self.self_weight) / (len(self.members) - 1)


@dataclass(frozen=True)
class Edge:
    """A directed link: ``target`` adds ``weight`` times the value of ``source``.

    The source keeps the rest for itself: 1 minus the weights of all its outgoing edges.
    """

    source: int
    target: int
    weight: float

    def __post_init__(self) -> None:
        if not (type(self.source) is type(self.target) is int and type(self.weight) is float):
            object.__setattr__(self, "source", as_int(self.source, "the source of an edge"))
            object.__setattr__(self, "target", as_int(self.target, "the target of an edge"))
            object.__setattr__(self, "weight", as_float(self.weight, "the weight of an edge"))
        if self.source == self.target or self.source < 0 or self.target < 0:
            raise InvalidArgumentError(
                f"an edge leads from node {self.source} to node {self.target}, but needs two different nodes from 0 "
                f"on. A node keeps 1 minus the weights of its edges for itself, so it needs no edge to itself."
            )
        if not 0.0 < self.weight < 1.0:
            raise InvalidArgumentError(
                f"the edge from node {self.source} to node {self.target} has weight {self.weight}, but it must lie "
                f"between 0 and 1, both excluded. Leave out an edge of weight 0."
            )


@dataclass(frozen=True)
class Phase:
    """The groups and edges of one step; a node in neither keeps its value.

    A node is in at most one group, and then on no edge. Let ``W[i, j]`` be the weight with which node i adds the value
    of node j. Every column of ``W`` sums to 1, so the mean over nodes is preserved. Every ``W[i, i]`` is positive:
    otherwise connected nodes could swap their values for ever, or have nothing left to divide by in push-sum.

    Args:
        groups: nodes that all mix with each other; stored in ascending order.
        edges: directed links; stored in ascending order, so that phases that do the same are equal.

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
        _check_self_weights(edges)

    def group_of(self, node: int) -> Group | None:
        """Return the group in which ``node`` mixes with others, if there is one."""
        return self._groups.get(node)

    def out_edges(self, node: int) -> tuple[Edge, ...]:
        """Return the edges on which ``node`` sends, by target."""
        return self._out_edges.get(node, ())

    def in_edges(self, node: int) -> tuple[Edge, ...]:
        """Return the edges on which ``node`` receives, by source."""
        return self._in_edges.get(node, ())

    def self_weight(self, node: int) -> float:
        """Return the weight of ``node``'s own value: 1 if it mixes with no other."""
        group = self.group_of(node)
        return _self_weight(self.out_edges(node)) if group is None else group.own_weight

    def peers(self, node: int) -> tuple[int, ...]:
        """Return the nodes that ``node`` sends to or receives from, in ascending order."""
        group = self.group_of(node)
        if group is not None:
            return tuple(member for member in group.members if member != node)
        targets = {edge.target for edge in self.out_edges(node)}
        return tuple(sorted(targets | {edge.source for edge in self.in_edges(node)}))

    @cached_property
    def most_peers(self) -> int:
        """The largest number of nodes that one node sends to, or receives from, in this phase."""
        outgoing = map(len, self._out_edges.values())
        incoming = map(len, self._in_edges.values())
        return max(chain((len(group.members) - 1 for group in self.groups), outgoing, incoming), default=0)

    @cached_property
    def highest(self) -> int:
        """The highest node number in this phase; -1 if it has no nodes."""
        ends = (max(edge.source, edge.target) for edge in self.edges)
        return max(chain((group.members[-1] for group in self.groups), ends), default=-1)

    def matrix(self, nodes: int) -> NDArray[np.float64]:
        """Return the weights as ``[nodes, nodes]``: row i holds the weight of every node's value in node i's sum."""
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

    # Cached, here and below, because phases of thousands of nodes are looked up at every step.
    @cached_property
    def _groups(self) -> dict[int, Group]:
        return {node: group for group in self.groups if len(group.members) > 1 for node in group.members}

    @cached_property
    def _out_edges(self) -> dict[int, tuple[Edge, ...]]:
        return {source: tuple(edges) for source, edges in groupby(self.edges, key=lambda edge: edge.source)}

    @cached_property
    def _in_edges(self) -> dict[int, tuple[Edge, ...]]:
        by_target = sorted(self.edges, key=lambda edge: (edge.target, edge.source))
        return {target: tuple(edges) for target, edges in groupby(by_target, key=lambda edge: edge.target)}

    @cached_property
    def _hash(self) -> int:
        return hash((self.groups, self.edges))

    def __hash__(self) -> int:
        return self._hash

    # A hash is valid in its own process only, so no cached value is pickled.
    def __reduce__(self) -> tuple[type[Phase], tuple[Any, ...]]:
        return Phase, (self.groups, self.edges)


def _self_weight(outgoing: Iterable[Edge]) -> float:
    return 1.0 - math.fsum(edge.weight for edge in outgoing)


def _check_nodes_once(groups: Sequence[Group], edges: Sequence[Edge]) -> None:
    grouped: set[int] = set()
    for group in groups:
        if not grouped.isdisjoint(group.members):
            twice = first_few(sorted(grouped.intersection(group.members)))
            raise InvalidArgumentError(
                f"node {twice} is in two groups of one phase, but can be in one at most: join the groups, or put "
                f"them into two phases."
            )
        grouped.update(group.members)
    both = grouped.intersection(chain.from_iterable((edge.source, edge.target) for edge in edges)) if grouped else None
    if both:
        raise InvalidArgumentError(
            f"node {first_few(sorted(both))} is in a group and on an edge of one phase, but can be in one only: "
            f"write the group as edges, or put the two into two phases."
        )


def _check_edges_once(edges: Sequence[Edge]) -> None:
    for one, other in pairwise(edges):
        if (one.source, one.target) == (other.source, other.target):
            raise InvalidArgumentError(
                f"two edges lead from node {one.source} to node {one.target} in one phase, with weights {one.weight} "
                f"and {other.weight}: write one edge with the weight you mean."
            )


def _check_self_weights(edges: Sequence[Edge]) -> None:
    for source, outgoing in groupby(edges, key=lambda edge: edge.source):
        self_weight = _self_weight(outgoing)
        if self_weight <= ROUNDING:
            raise InvalidArgumentError(
                f"the outgoing edges of node {source} have weights that sum to {1.0 - self_weight:.6g} in one phase, "
                f"which leaves {self_weight:.6g} for its own value: give them weights that sum to less than 1."
            )


# Any, here and below: callers pass whatever the user gave. Equal schedules must compare, hash and print alike, so
# numbers of numpy and torch become Python's own.
def as_int(value: Any, what: str) -> int:
    """Return ``value`` as an int; ``what`` names it in the error."""
    try:
        return int(operator.index(value))
    except TypeError as error:
        raise InvalidArgumentError(f"{what} is {value!r}, but must be a whole number.") from error


def as_float(value: Any, what: str) -> float:
    """Return ``value`` as a float; ``what`` names it in the error."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{what} is {value!r}, but must be a number.") from error


def as_count(things: str, value: Any, recipe: str) -> int:
    """Return ``value`` as an int of at least 1; ``things`` and ``recipe`` name it in the error."""
    number = as_int(value, f"the number of {things} of {recipe}")
    if number < 1:
        raise InvalidArgumentError(f"{recipe} was asked for {number} {things}, but needs at least one.")
    return number


def first_few(nodes: Sequence[int]) -> str:
    """Return the first few node numbers as text, and how many more there are."""
    shown = ", ".join(str(node) for node in nodes[:_SHOWN])
    return shown + (f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else "")
