"""Averaging: how close phases, taken one after the other, bring nodes to their mean."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flexcomm.errors import InvalidArgumentError
from flexcomm.gossip.phase import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from flexcomm.gossip.phase import Phase

    Matrix = NDArray[np.float64]

__all__ = ["MOST_NODES", "averages_exactly", "contraction_of", "product_of"]

MOST_NODES = 4096
"""Above this many nodes a matrix of all by all takes too much memory and time to be looked at."""

_COLUMNS = 256


def averages_exactly(phases: Sequence[Phase], nodes: int) -> bool:
    """Return whether every node holds the mean after the phases, to rounding.

    Where phases are column stochastic only, what counts is what push-sum shows: each row divided by its sum.
    """
    product = product_of(phases, nodes)
    shown = product / product.sum(axis=1, keepdims=True)
    return bool(np.abs(shown - 1.0 / nodes).max() <= ROUNDING)


def contraction_of(phases: Sequence[Phase], nodes: int) -> float:
    """Return the factor by which the phases at least shrink the distance of all nodes from their mean.

    With B the product of the phases and J = 11'/n this is the largest singular value of B - J. Where B is column
    stochastic only, push-sum settles on weights n*p, where B p = p; from there on its de-biased values mix by
    D^-1 B D, D = diag(n*p), and the distance is the one weighted by p: the largest singular value of
    D^-1/2 (B - p 1') D^1/2, which is the same number where p = 1/n.
    """
    if nodes == 1:
        return 0.0
    product = product_of(phases, nodes)
    settled = _settled_shares(product)
    scale = np.sqrt(nodes * settled)
    distance = (product - settled[:, None]) * (scale / scale[:, None])
    largest = np.linalg.eigvalsh(distance.T @ distance)[-1]
    return float(np.sqrt(max(largest, 0.0)))


def product_of(phases: Sequence[Phase], nodes: int) -> Matrix:
    """Return what the phases do together, as ``[nodes, nodes]``."""
    if nodes > MOST_NODES:
        raise InvalidArgumentError(
            f"how well {nodes} nodes average takes a matrix of {nodes} by {nodes}, which is built for {MOST_NODES} "
            f"nodes at most: ask the same recipe for fewer nodes."
        )
    steps = [_as_arrays(phase, nodes) for phase in phases]
    blocks = []
    for first in range(0, nodes, _COLUMNS):
        block = np.eye(nodes, min(_COLUMNS, nodes - first), -first)
        for step in steps:
            block = _mixed(step, block)
        blocks.append(block)
    return np.concatenate(blocks, axis=1)


def _settled_shares(product: Matrix) -> Matrix:
    """The shares that a column stochastic matrix leaves as they are; they sum to 1."""
    nodes = len(product)
    if np.abs(product.sum(axis=1) - 1.0).max() <= ROUNDING:
        return np.full(nodes, 1.0 / nodes)
    return np.linalg.solve(product - np.eye(nodes) + 1.0 / nodes, np.full(nodes, 1.0 / nodes))


class _Arrays(NamedTuple):
    """A phase for many values at once: ``own * x``, plus sums over members that all of them get, plus edges."""

    own: Matrix
    members: NDArray[np.int64]
    sizes: NDArray[np.int64]
    peer_weights: Matrix
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    weights: Matrix


def _as_arrays(phase: Phase, nodes: int) -> _Arrays:
    groups = [group for group in phase.groups if len(group.members) > 1]
    edges = sorted(phase.edges, key=lambda edge: edge.target)
    own = np.ones(nodes)
    for group in groups:
        own[list(group.members)] = group.own_weight - group.peer_weight
    for source in {edge.source for edge in edges}:
        own[source] = phase.self_weight(source)
    return _Arrays(
        own,
        _whole(chain.from_iterable(group.members for group in groups)),
        _whole(len(group.members) for group in groups),
        np.array([group.peer_weight for group in groups]),
        _whole(edge.source for edge in edges),
        _whole(edge.target for edge in edges),
        np.array([edge.weight for edge in edges]),
    )


def _whole(numbers: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(numbers, dtype=np.int64)


def _mixed(step: _Arrays, x: Matrix) -> Matrix:
    mixed = step.own[:, None] * x
    if step.members.size:
        starts = np.cumsum(step.sizes) - step.sizes
        sums = np.add.reduceat(x[step.members], starts, axis=0) * step.peer_weights[:, None]
        mixed[step.members] += np.repeat(sums, step.sizes, axis=0)
    if step.targets.size:
        heard, starts = np.unique(step.targets, return_index=True)
        mixed[heard] += np.add.reduceat(step.weights[:, None] * x[step.sources], starts, axis=0)
    return mixed
