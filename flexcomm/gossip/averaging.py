"""Averaging: whether the phases of a schedule reach all nodes, and how close they bring them to their mean."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flexcomm.errors import InvalidArgumentError
from flexcomm.gossip.phase import ROUNDING, first_few

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from flexcomm.gossip.phase import Edge, Group, Phase

    Matrix = NDArray[np.float64]
    Nodes = NDArray[np.int64]

__all__ = [
    "MOST_NODES",
    "averages_exactly",
    "check_strongly_connected",
    "connected_components",
    "contraction_of",
    "product_of",
]

MOST_NODES = 4096
"""Above this many nodes the matrix of a schedule takes too much memory and time."""

_COLUMNS = 256


def averages_exactly(phases: Sequence[Phase], nodes: int) -> bool:
    """Return whether every node holds the mean after the phases, to rounding.

    If phases are column stochastic only, the values that count are push-sum's: each row divided by its sum.
    """
    product = product_of(phases, nodes)
    debiased = product / product.sum(axis=1, keepdims=True)
    return bool(np.abs(debiased - 1.0 / nodes).max() <= ROUNDING)


def contraction_of(phases: Sequence[Phase], nodes: int) -> float:
    """Return an upper bound of the distance of all nodes from their mean after the phases, as a share of that before.

    With B the product of the phases and J = 11'/n, it is the largest singular value of B - J. If B is column stochastic
    only, the weights of push-sum converge to n*p, where B p = p. From then on, de-biased values are mixed by D^-1 B D,
    D = diag(n*p), and the distance is weighted by p: the factor is the largest singular value of
    D^-1/2 (B - p 1') D^1/2, which is the same number for p = 1/n.
    """
    if nodes == 1:
        return 0.0
    product = product_of(phases, nodes)
    stationary = _stationary_distribution(product)
    scale = np.sqrt(nodes * stationary)
    distance = (product - stationary[:, None]) * (scale / scale[:, None])
    largest = np.linalg.eigvalsh(distance.T @ distance)[-1]
    return float(np.sqrt(max(largest, 0.0)))


def product_of(phases: Sequence[Phase], nodes: int) -> Matrix:
    """Return the product of the phases' matrices, ``[nodes, nodes]``."""
    if nodes > MOST_NODES:
        raise InvalidArgumentError(
            f"the contraction of {nodes} nodes needs a matrix of {nodes} by {nodes}, which is built for {MOST_NODES} "
            f"nodes at most: ask the same recipe for fewer nodes."
        )
    arrays = [_as_arrays(phase, nodes) for phase in phases]
    blocks = []
    for first in range(0, nodes, _COLUMNS):
        block = np.eye(nodes, min(_COLUMNS, nodes - first), -first)
        for phase in arrays:
            block = _apply(phase, block)
        blocks.append(block)
    return np.concatenate(blocks, axis=1)


def _stationary_distribution(product: Matrix) -> Matrix:
    """Return p with ``product @ p = p`` and sum 1, of a column stochastic matrix."""
    nodes = len(product)
    if np.abs(product.sum(axis=1) - 1.0).max() <= ROUNDING:
        return np.full(nodes, 1.0 / nodes)
    return np.linalg.solve(product - np.eye(nodes) + 1.0 / nodes, np.full(nodes, 1.0 / nodes))


class _Arrays(NamedTuple):
    """A phase as arrays: ``self_weights * x``, plus the sum of each group for all its members, plus edges."""

    self_weights: Matrix
    members: Nodes
    sizes: Nodes
    peer_weights: Matrix
    sources: Nodes
    targets: Nodes
    weights: Matrix


def _as_arrays(phase: Phase, nodes: int) -> _Arrays:
    groups = [group for group in phase.groups if len(group.members) > 1]
    edges = sorted(phase.edges, key=lambda edge: edge.target)
    self_weights = np.ones(nodes)
    for group in groups:
        self_weights[list(group.members)] = group.own_weight - group.peer_weight
    for source in {edge.source for edge in edges}:
        self_weights[source] = phase.self_weight(source)
    return _Arrays(
        self_weights,
        _int64(chain.from_iterable(group.members for group in groups)),
        _int64(len(group.members) for group in groups),
        np.array([group.peer_weight for group in groups]),
        _int64(edge.source for edge in edges),
        _int64(edge.target for edge in edges),
        np.array([edge.weight for edge in edges]),
    )


def _int64(numbers: Iterable[int]) -> Nodes:
    return np.fromiter(numbers, dtype=np.int64)


def _apply(phase: _Arrays, x: Matrix) -> Matrix:
    mixed = phase.self_weights[:, None] * x
    if phase.members.size:
        starts = np.cumsum(phase.sizes) - phase.sizes
        sums = np.add.reduceat(x[phase.members], starts, axis=0) * phase.peer_weights[:, None]
        mixed[phase.members] += np.repeat(sums, phase.sizes, axis=0)
    if phase.targets.size:
        receivers, starts = np.unique(phase.targets, return_index=True)
        mixed[receivers] += np.add.reduceat(phase.weights[:, None] * x[phase.sources], starts, axis=0)
    return mixed


def check_strongly_connected(name: str, nodes: int, phases: Sequence[Phase]) -> None:
    """Raise unless repeating the phases brings the value of every node to every other node."""
    sources, targets = _links(phases)
    alone = np.setdiff1d(np.arange(nodes), np.concatenate([sources, targets])).tolist()
    if nodes > 1 and alone:
        raise InvalidArgumentError(
            f"in {name} node {first_few(alone)} has no peer in any phase, so it never averages: give each of the "
            f"{nodes} nodes a group or an edge in some phase."
        )
    _check_all_reached(name, "the value of node 0 never reaches node {}", _reached(0, nodes, sources, targets))
    _check_all_reached(name, "node 0 never receives the value of node {}", _reached(0, nodes, targets, sources))


def _check_all_reached(name: str, problem: str, reached: NDArray[np.bool_]) -> None:
    missing = np.flatnonzero(~reached).tolist()
    if missing:
        raise InvalidArgumentError(
            f"in {name} {problem.format(first_few(missing))}, however many periods pass, so the {len(reached)} nodes "
            f"never converge to a common mean: add a phase, a group or edges that connect them."
        )


def connected_components(phase: Phase) -> list[list[Group | Edge]]:
    """Return the connected components of a phase, each as its group or its edges, in the order of their lowest nodes.

    Nodes without a peer are in no component.
    """
    by_lowest = _edge_components(phase.edges)
    by_lowest |= {group.members[0]: [group] for group in phase.groups if len(group.members) > 1}
    return [by_lowest[lowest] for lowest in sorted(by_lowest)]


def _edge_components(edges: Sequence[Edge]) -> dict[int, list[Group | Edge]]:
    """Return the edges of each connected component, by its lowest node (union-find)."""
    parents: dict[int, int] = {}
    for edge in edges:
        one, other = _lowest(parents, edge.source), _lowest(parents, edge.target)
        parents[max(one, other)] = min(one, other)
    components: dict[int, list[Group | Edge]] = {}
    for edge in edges:
        components.setdefault(_lowest(parents, edge.source), []).append(edge)
    return components


def _lowest(parents: dict[int, int], node: int) -> int:
    while (parent := parents.setdefault(node, node)) != node:
        parents[node] = node = parents[parent]
    return node


def _links(phases: Sequence[Phase]) -> tuple[Nodes, Nodes]:
    """Return the sources and targets of all links; a group counts as a star around its first member."""
    edges = [(edge.source, edge.target) for phase in phases for edge in phase.edges]
    spokes = [(group.members[0], member) for phase in phases for group in phase.groups for member in group.members[1:]]
    links = np.array(edges + spokes, dtype=np.int64).reshape(-1, 2)
    back = links[len(edges) :, ::-1]
    both = np.concatenate([links, back])
    return both[:, 0], both[:, 1]


def _reached(start: int, nodes: int, sources: Nodes, targets: Nodes) -> NDArray[np.bool_]:
    order = np.argsort(sources, kind="stable")
    bounds = np.searchsorted(sources[order], np.arange(nodes + 1)).tolist()
    receivers = targets[order].tolist()
    reached = np.zeros(nodes, dtype=np.bool_)
    seen, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        fresh = set(receivers[bounds[node] : bounds[node + 1]]) - seen
        seen |= fresh
        waiting.extend(fresh)
    reached[list(seen)] = True
    return reached
