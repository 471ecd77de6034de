"""Phases: the groups and edges along which nodes mix at one step, and what one node does in a phase."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise
from operator import attrgetter
from reprlib import repr as few
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcomm.errors import InvalidArgumentError

Matrix = NDArray[np.float64]

ROUNDING = 1e-12
"""Weights that differ by no more than this count as equal: sums of rounded weights are off by that much."""


@dataclass(frozen=True)
class Group:
    """Nodes that all mix with each other; a group of one changes nothing. ``members`` are stored in ascending order.

    ``self_weight``, between 0 and 1, is the weight of a member's own value; the others share the rest equally. If it is
    not given, all members have equal weights.
    """

    members: tuple[int, ...]
    self_weight: float | None = None

    def __post_init__(self) -> None:
        members = tuple(sorted(as_int(member, "a member of a group") for member in self.members))
        weight = None if self.self_weight is None else as_float(self.self_weight, "the self_weight of a group")
        if not members or members[0] < 0 or len(set(members)) < len(members):
            raise InvalidArgumentError(f"members {few(members)} of a group must be at least one, from 0 on, each once.")
        if len(members) == 1:
            weight = None
        # Not "<= 0 or >= 1", which NaN would pass.
        if weight is not None and not 0.0 < weight < 1.0:
            raise InvalidArgumentError(
                f"the group of {few(members)} has self_weight {weight}, but it must lie between 0 and 1, both "
                f"excluded: at 0 nodes may swap their values for ever. Leave it out for 1/{len(members)}."
            )
        object.__setattr__(self, "members", members)
        object.__setattr__(self, "self_weight", weight)

    @property
    def own_weight(self) -> float:
        return 1.0 / len(self.members) if self.self_weight is None else self.self_weight

    @property
    def peer_weight(self) -> float:
        return self.own_weight if self.self_weight is None else (1.0 - self.self_weight) / (len(self.members) - 1)


@dataclass(frozen=True)
class Edge:
    """A directed link: ``target`` adds ``weight`` times the value of ``source``, which keeps what edges leave of 1."""

    source: int
    target: int
    weight: float

    def __post_init__(self) -> None:
        if not (type(self.source) is type(self.target) is int and type(self.weight) is float):
            for name, as_number in (("source", as_int), ("target", as_int), ("weight", as_float)):
                object.__setattr__(self, name, as_number(getattr(self, name), f"the {name} of an edge"))
        if self.source == self.target or min(self.source, self.target) < 0 or not 0.0 < self.weight < 1.0:
            raise InvalidArgumentError(
                f"an edge leads from node {self.source} to node {self.target} with weight {self.weight}, but needs two "
                f"different nodes from 0 on, and a weight between 0 and 1, both excluded. Leave out edges of weight 0."
            )


@dataclass(frozen=True)
class Round:
    """The sends and receives of one node in a phase: ``x`` becomes ``self_weight * x + sum of weights[j] * x_j``.

    ``x_j`` is the value of ``receives_from[j]``; or, if there is a ``group``, the one sum over all its nodes, this one
    included, which all-reduce.
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
        return not (self.sends_to or self.receives_from or self.group)


@dataclass(frozen=True)
class Phase:
    """The groups and edges of one step, in ascending order; a node in neither keeps its value.

    A node is in at most one group, and then on no edge. Let ``W[i, j]`` be the weight with which node i adds the value
    of node j. Every column of ``W`` sums to 1, so the mean over nodes is preserved. Every ``W[i, i]`` is positive:
    otherwise connected nodes could swap their values for ever, or have nothing left to divide by in push-sum.
    """

    groups: tuple[Group, ...] = ()
    edges: tuple[Edge, ...] = ()
    # Those of :func:`round_of`: every bucket of a step asks, and there may be thousands of edges to look through.
    rounds: dict[tuple[int, bool], Round] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(sorted(self.groups, key=attrgetter("members"))))
        object.__setattr__(self, "edges", tuple(sorted(self.edges, key=attrgetter("source", "target"))))
        on_edges = {node for edge in self.edges for node in (edge.source, edge.target)}
        places = Counter(chain(*(group.members for group in self.groups), on_edges))
        twice = sorted(node for node, count in places.items() if count > 1)
        if twice:
            raise InvalidArgumentError(
                f"nodes {few(twice)} are in two groups, or in a group and on an edge, of one phase: join the groups, "
                f"write them as edges, or put them into two phases."
            )
        for one, other in pairwise(self.edges):
            if (one.source, one.target) == (other.source, other.target):
                raise InvalidArgumentError(
                    f"two edges lead from node {one.source} to node {one.target} in one phase, with weights "
                    f"{one.weight} and {other.weight}: write one edge with the weight you mean."
                )
        for source, total in self._sent_weights():
            if 1.0 - total <= ROUNDING:
                raise InvalidArgumentError(
                    f"the outgoing edges of node {source} have weights that sum to {total:.6g} in one phase, which "
                    f"leaves {1.0 - total:.6g} for its own value: give them weights that sum to less than 1."
                )

    def links(self) -> Iterator[tuple[int, int]]:
        """Yield the source and target of every link; a group counts as a star around its first member."""
        for edge in self.edges:
            yield edge.source, edge.target
        for group in self.groups:
            for member in group.members[1:]:
                yield group.members[0], member
                yield member, group.members[0]

    def _sent_weights(self) -> Iterator[tuple[int, float]]:
        """Yield every node that sends on edges, and the sum of their weights."""
        for source, outgoing in groupby(self.edges, key=attrgetter("source")):
            yield source, math.fsum(edge.weight for edge in outgoing)

    @property
    def most_peers(self) -> int:
        """The largest number of nodes that one node sends to, or receives from, in this phase."""
        ends = (Counter(map(attrgetter(end), self.edges)).values() for end in ("source", "target"))
        return max(chain((len(group.members) - 1 for group in self.groups), *ends), default=0)

    @property
    def highest(self) -> int:
        """The highest node number in this phase; -1 if it has no nodes."""
        ends = (max(edge.source, edge.target) for edge in self.edges)
        return max(chain((group.members[-1] for group in self.groups), ends), default=-1)

    def matrix(self, nodes: int) -> Matrix:
        """Return the weights as ``[nodes, nodes]``: row i holds the weight of every node's value in node i's sum."""
        least = self.highest + 1
        if nodes < least:
            raise InvalidArgumentError(
                f"a phase with node {least - 1} has no matrix of {nodes} nodes: ask for at least {least}."
            )
        return self.apply(np.eye(nodes))

    def apply(self, x: Matrix) -> Matrix:
        """Return ``W x`` for the values ``x`` of all nodes; few elements of ``W`` are not zero."""
        mixed = x.copy()
        for group in self.groups:
            members = list(group.members)
            values = x[members]
            mixed[members] = group.own_weight * values + group.peer_weight * (values.sum(axis=0) - values)
        for source, sent in self._sent_weights():
            mixed[source] *= 1.0 - sent
        for edge in self.edges:
            mixed[edge.target] += edge.weight * x[edge.source]
        return mixed


def round_of(phase: Phase, node: int, *, reduces: bool = True) -> Round:
    """Return the round of ``node`` in ``phase``; unless it ``reduces``, it has a message for each node of a group."""
    if (node, reduces) in phase.rounds:
        return phase.rounds[node, reduces]
    group = next((group for group in phase.groups if node in group.members and len(group.members) > 1), None)
    if group is None:
        outgoing = [edge for edge in phase.edges if edge.source == node]
        incoming = [edge for edge in phase.edges if edge.target == node]
        self_weight = 1.0 - math.fsum(edge.weight for edge in outgoing)
        targets, sources = tuple(edge.target for edge in outgoing), tuple(edge.source for edge in incoming)
        made = Round(targets, sources, self_weight, tuple(edge.weight for edge in incoming))
    elif len(group.members) > 2 and reduces:
        self_weight = group.own_weight - group.peer_weight
        made = Round(self_weight=self_weight, weights=(group.peer_weight,), group=group.members)
    else:
        others = tuple(member for member in group.members if member != node)
        made = Round(others, others, group.own_weight, (group.peer_weight,) * len(others))
    phase.rounds[node, reduces] = made
    return made


# Any: whatever the user gave. Numbers of numpy and torch become Python's own: equal schedules print alike.
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
