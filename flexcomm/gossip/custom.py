"""Schedules of a graph that the user brings."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from flexcomm.errors import InvalidArgumentError
from flexcomm.gossip.phase import Edge, Phase
from flexcomm.gossip.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike

__all__ = ["from_edges", "from_matrix"]

_SUM_TOLERANCE = 1e-6
"""By how much a column may miss 1: matrices come in float32, too."""


def from_edges(nodes: int, pairs: Iterable[tuple[int, int]], *, name: str = "from_edges") -> Schedule:
    """Return the fixed schedule in which the two nodes of every pair always mix, both ways.

    Weights are Metropolis-Hastings, ``1 / (1 + the larger number of neighbours)`` (Xiao and Boyd, 2004): symmetric, so
    the mean stays, and known from the neighbours alone. A pair may stand twice, or be turned round.
    """
    links = {(min(one, other), max(one, other)) for one, other in pairs}
    neighbours = Counter(chain.from_iterable(links))
    edges = []
    for one, other in links:
        weight = 1.0 / (1 + max(neighbours[one], neighbours[other]))
        edges += [Edge(one, other, weight), Edge(other, one, weight)]
    return Schedule(name, nodes, (Phase(edges=tuple(edges)),))


def from_matrix(*matrices: ArrayLike, name: str = "from_matrix") -> Schedule:
    """Return the schedule whose phases are these matrices, one after the other.

    ``matrix[i][j]`` is the weight with which node i takes what node j has. Columns sum to 1, and the diagonal is
    positive; what node j keeps is what the rest of its column leaves of 1.
    Rows that sum to 1 too, within 1e-12, make it doubly stochastic: build the matrix in float64.
    """
    arrays = [np.asarray(matrix, dtype=np.float64) for matrix in matrices]
    shapes = {array.shape for array in arrays}
    if len(shapes) != 1 or any(array.ndim != 2 or len(array) != array.shape[1] for array in arrays):
        raise InvalidArgumentError(
            f"{name} was given matrices of shapes {[array.shape for array in arrays]}, but needs at least one, all "
            f"[nodes, nodes] for the same number of nodes."
        )
    for number, array in enumerate(arrays):
        _check_columns(name, number, array)
    return Schedule(name, len(arrays[0]), tuple(_phase_of(array) for array in arrays))


def _check_columns(name: str, number: int, array: np.ndarray) -> None:
    if not np.isfinite(array).all() or (array < 0.0).any():
        raise InvalidArgumentError(f"matrix {number} of {name} has weights below 0 or not finite: none can be sent.")
    sums = array.sum(axis=0)
    worst = int(np.abs(sums - 1.0).argmax())
    if abs(sums[worst] - 1.0) > _SUM_TOLERANCE:
        raise InvalidArgumentError(
            f"column {worst} of matrix {number} of {name} sums to {sums[worst]:.6g}, but must to 1, or the mean over "
            f"nodes would drift. Rows say what a node takes: a matrix of what nodes send is the transpose."
        )


def _phase_of(array: np.ndarray) -> Phase:
    targets, sources = np.nonzero(array - np.diag(np.diag(array)))
    weights = array[targets, sources].tolist()
    return Phase(edges=tuple(map(Edge, sources.tolist(), targets.tolist(), weights)))
