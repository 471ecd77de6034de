"""Phases: the groups and edges along which nodes mix at one step, and what one node does in a phase."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcomm.errors import InvalidArgumentError

Matrix = NDArray[np.float64]

ROUNDING = 1e-12
"""Weights that differ by no more than this count as equal: sums of rounded weights are off by that much."""
_SHOWN = 8
_PAIR = 2


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
        # Written so that NaN is refused, too.
        if self.self_weight is not None and len(members) > 1 and not 0.0 < self.self_weight < 1.0:
            raise InvalidArgumentError(
                f"the group of {first_few(members)} has self_weight {self.self_weight}, but it must lie between 0 and "
                f"1, both excluded: at 1 no member receives anything, at 0 nodes may swap their values for ever. Leave "
                f"it out for 1/{len(members)}."
            )

    @property
    def own_weight(self) -> float:
        """The weight of a member's own value."""
        if self.self_weight is None or len(self.members) == 1:
            return 1.0 / len(self.members)
        return self.self_weight

    @property
    def peer_weight(self) -> float:
        """The weight of every other member's value; 0 in a group of one."""
        others = len(self.members) - 1
        if self.self_weight is None and others:
            return 1.0 / len(self.members)
        return (1.0 - self.own_weight) / max(others, 1)


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
            for name, as_number in (("source", as_int), ("target", as_int), ("weight", as_float)):
                object.__setattr__(self, name, as_number(getattr(self, name), f"the {name} of an edge"))
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
class Round:
    """The sends and receives of one node in a phase, and its weights.

    Afterwards the node holds ``self_weight * x + sum of weights[j] * (x of receives_from[j])``. If ``group`` is not
    empty, it holds more than two nodes, this one included, that all-reduce instead: then the node holds
    ``self_weight * x + weights[0] * (sum over the group)``.
    """

    sends_to: tuple[int, ...] = ()
    receives_from: tuple[int, ...] = ()
    self_weight: float = 1.0
    weights: tuple[float, ...] = ()
    group: tuple[int, ...] = ()

    @property
    def weight_sum(self) -> float:
        """The sum of all weights: 1, unless a directed graph gives the node more or less than it sends."""
        return self.self_weight + (len(self.group) or 1) * sum(self.weights)

    @property
    def is_idle(self) -> bool:
        """Whether the node has no peer."""
        return not (self.sends_to or self.receives_from or self.group)


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
    # Cached, here and below, because phases of thousands of nodes are looked up at every step.
    rounds: dict[tuple[int, bool], Round] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(sorted(self.groups, key=attrgetter("members"))))
        object.__setattr__(self, "edges", tuple(sorted(self.edges, key=attrgetter("source", "target"))))
        grouped = list(chain.from_iterable(group.members for group in self.groups))
        if len(set(grouped)) < len(grouped):
            twice = sorted(node for node, count in Counter(grouped).items() if count > 1)
            raise InvalidArgumentError(
                f"node {first_few(twice)} is in two groups of one phase, but can be in one at most: join the groups, "
                f"or put them into two phases."
            )
        both = (
            sorted({node for edge in self.edges for node in (edge.source, edge.target)} & {*grouped}) if grouped else []
        )
        if both:
            raise InvalidArgumentError(
                f"node {first_few(both)} is in a group and on an edge of one phase, but can be in one only: write the "
                f"group as edges, or put the two into two phases."
            )
        for one, other in pairwise(self.edges):
            if (one.source, one.target) == (other.source, other.target):
                raise InvalidArgumentError(
                    f"two edges lead from node {one.source} to node {one.target} in one phase, with weights "
                    f"{one.weight} and {other.weight}: write one edge with the weight you mean."
                )
        for source, outgoing in self._out_edges.items():
            total = math.fsum(edge.weight for edge in outgoing)
            if 1.0 - total <= ROUNDING:
                raise InvalidArgumentError(
                    f"the outgoing edges of node {source} have weights that sum to {total:.6g} in one phase, which "
                    f"leaves {1.0 - total:.6g} for its own value: give them weights that sum to less than 1."
                )

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
        return 1.0 - math.fsum(edge.weight for edge in self.out_edges(node)) if group is None else group.own_weight

    def peers(self, node: int) -> tuple[int, ...]:
        """Return the nodes that ``node`` sends to or receives from, in ascending order."""
        group = self.group_of(node)
        if group is not None:
            return tuple(member for member in group.members if member != node)
        targets = {edge.target for edge in self.out_edges(node)}
        return tuple(sorted(targets | {edge.source for edge in self.in_edges(node)}))

    def links(self) -> Iterator[tuple[int, int]]:
        """Yield the source and target of every link; a group counts as a star around its first member."""
        for edge in self.edges:
            yield edge.source, edge.target
        for group in self.groups:
            for member in group.members[1:]:
                yield group.members[0], member
                yield member, group.members[0]

    @cached_property
    def most_peers(self) -> int:
        """The largest number of nodes that one node sends to, or receives from, in this phase."""
        edges = map(len, chain(self._out_edges.values(), self._in_edges.values()))
        return max(chain((len(group.members) - 1 for group in self.groups), edges), default=0)

    @cached_property
    def highest(self) -> int:
        """The highest node number in this phase; -1 if it has no nodes."""
        ends = (max(edge.source, edge.target) for edge in self.edges)
        return max(chain((group.members[-1] for group in self.groups), ends), default=-1)

    def matrix(self, nodes: int) -> Matrix:
        """Return the weights as ``[nodes, nodes]``: row i holds the weight of every node's value in node i's sum."""
        if nodes <= self.highest:
            raise InvalidArgumentError(
                f"a matrix of {nodes} nodes was asked for, but this phase has a node {self.highest}: ask for at least "
                f"{self.highest + 1}."
            )
        return self.apply(np.eye(nodes))

    def apply(self, x: Matrix) -> Matrix:
        """Return ``W x`` for the values ``x`` of all nodes; few elements of ``W`` are not zero."""
        mixed = x.copy()
        for group in self.groups:
            members = list(group.members)
            values = x[members]
            total = values.sum(axis=0)
            if group.self_weight is None:
                mixed[members] = group.own_weight * total
            else:
                mixed[members] = group.own_weight * values + group.peer_weight * (total - values)
        for source in self._out_edges:
            mixed[source] *= self.self_weight(source)
        for edge in self.edges:
            mixed[edge.target] += edge.weight * x[edge.source]
        return mixed

    @cached_property
    def _groups(self) -> dict[int, Group]:
        return {node: group for group in self.groups if len(group.members) > 1 for node in group.members}

    @cached_property
    def _out_edges(self) -> dict[int, tuple[Edge, ...]]:
        return {source: tuple(edges) for source, edges in groupby(self.edges, key=attrgetter("source"))}

    @cached_property
    def _in_edges(self) -> dict[int, tuple[Edge, ...]]:
        by_target = sorted(self.edges, key=attrgetter("target", "source"))
        return {target: tuple(edges) for target, edges in groupby(by_target, key=attrgetter("target"))}


def round_of(phase: Phase, node: int, *, reduces: bool = True) -> Round:
    """Return the round of ``node`` in ``phase``; unless it ``reduces``, it has a message for each node of a group."""
    found = phase.rounds.get((node, reduces))
    if found is not None:
        return found
    group, edges = phase.group_of(node), phase.in_edges(node)
    if group is None:
        targets, sources = (edge.target for edge in phase.out_edges(node)), (edge.source for edge in edges)
        made = Round(tuple(targets), tuple(sources), phase.self_weight(node), tuple(edge.weight for edge in edges))
    elif len(group.members) > _PAIR and reduces:
        self_weight = group.own_weight - group.peer_weight
        made = Round(self_weight=self_weight, weights=(group.peer_weight,), group=group.members)
    else:
        others = phase.peers(node)
        made = Round(others, others, group.own_weight, (group.peer_weight,) * len(others))
    phase.rounds[node, reduces] = made
    return made


# Any, here and below: callers pass whatever the user gave. Equal schedules must compare, hash and print alike, so
# numbers of numpy and torch become Python's own.
def as_int(value: Any, what: str) -> int:
    try:
        return int(operator.index(value))
    except TypeError as error:
        raise InvalidArgumentError(f"{what} is {value!r}, but must be a whole number.") from error


def as_float(value: Any, what: str) -> float:
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
