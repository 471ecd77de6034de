"""Averaging: whether the phases of a schedule reach all nodes, and how close they bring them to their mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from flexcomm.errors import InvalidArgumentError
from flexcomm.gossip.phase import ROUNDING, Edge, Group, Phase, first_few

Matrix = NDArray[np.float64]

MOST_NODES = 4096
"""Above this many nodes the matrix of a schedule takes too much memory and time."""


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
    product = np.eye(nodes)
    for phase in phases:
        product = _apply(phase, product)
    return product


def _stationary_distribution(product: Matrix) -> Matrix:
    """Return p with ``product @ p = p`` and sum 1, of a column stochastic matrix."""
    nodes = len(product)
    if np.abs(product.sum(axis=1) - 1.0).max() <= ROUNDING:
        return np.full(nodes, 1.0 / nodes)
    return np.linalg.solve(product - np.eye(nodes) + 1.0 / nodes, np.full(nodes, 1.0 / nodes))


def _apply(phase: Phase, x: Matrix) -> Matrix:
    """Return the product of a phase's matrix, of which few elements are not zero, and ``x``."""
    mixed = x.copy()
    for group in phase.groups:
        values = x[list(group.members)]
        kept = (group.own_weight - group.peer_weight) * values
        mixed[list(group.members)] = kept + group.peer_weight * values.sum(axis=0)
    for source in {edge.source for edge in phase.edges}:
        mixed[source] *= phase.self_weight(source)
    for edge in phase.edges:
        mixed[edge.target] += edge.weight * x[edge.source]
    return mixed


def check_strongly_connected(name: str, nodes: int, phases: Sequence[Phase]) -> None:
    """Raise unless repeating the phases brings the value of every node to every other node."""
    targets: list[set[int]] = [set() for _ in range(nodes)]
    sources: list[set[int]] = [set() for _ in range(nodes)]
    for source, target in _links(phases):
        targets[source].add(target)
        sources[target].add(source)
    alone = [node for node in range(nodes) if not targets[node] and not sources[node]]
    if nodes > 1 and alone:
        raise InvalidArgumentError(
            f"in {name} node {first_few(alone)} has no peer in any phase, so it never averages: give each of the "
            f"{nodes} nodes a group or an edge in some phase."
        )
    _check_all_reached(name, "the value of node 0 never reaches node {}", targets)
    _check_all_reached(name, "node 0 never receives the value of node {}", sources)


def _check_all_reached(name: str, problem: str, links: list[set[int]]) -> None:
    reached, waiting = {0}, [0]
    while waiting:
        fresh = links[waiting.pop()] - reached
        reached |= fresh
        waiting.extend(fresh)
    missing = [node for node in range(len(links)) if node not in reached]
    if missing:
        raise InvalidArgumentError(
            f"in {name} {problem.format(first_few(missing))}, however many periods pass, so the {len(links)} nodes "
            f"never converge to a common mean: add a phase, a group or edges that connect them."
        )


def _links(phases: Sequence[Phase]) -> Iterator[tuple[int, int]]:
    """Yield the source and target of every link; a group counts as a star around its first member."""
    for phase in phases:
        for edge in phase.edges:
            yield edge.source, edge.target
        for group in phase.groups:
            for member in group.members[1:]:
                yield group.members[0], member
                yield member, group.members[0]


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
