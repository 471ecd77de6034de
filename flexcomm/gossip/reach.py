"""Reach: who hears of whom, at one step or over many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.errors import InvalidArgumentError
from flexcomm.gossip.arguments import some_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from flexcomm.gossip.phase import Edge, Group, Phase

__all__ = ["check_all_hear_of_all", "conversations"]


def check_all_hear_of_all(name: str, nodes: int, phases: Sequence[Phase]) -> None:
    """Raise unless, over the phases again and again, something of every node reaches every other."""
    sources, targets = _links(phases)
    alone = np.setdiff1d(np.arange(nodes), np.concatenate([sources, targets])).tolist()
    if nodes > 1 and alone:
        raise InvalidArgumentError(
            f"in {name} node {some_of(alone)} meets nobody in any phase, so it never averages: give each of the "
            f"{nodes} nodes a group or an edge in some phase."
        )
    _check_nobody_missing(name, "node {} never hears of node 0", _reached(0, nodes, sources, targets))
    _check_nobody_missing(name, "node 0 never hears of node {}", _reached(0, nodes, targets, sources))


def _check_nobody_missing(name: str, problem: str, reached: NDArray[np.bool_]) -> None:
    missing = np.flatnonzero(~reached).tolist()
    if missing:
        raise InvalidArgumentError(
            f"in {name} {problem.format(some_of(missing))}, however many periods pass, so the {len(reached)} nodes "
            f"never come to a common mean: add a phase, a group or edges that join them."
        )


def conversations(phase: Phase) -> list[list[Group | Edge]]:
    """Return the parts of a phase that have no node in common, by their lowest node.

    A group is one; so are edges that hang together. Nodes that meet nobody are in none.
    """
    by_lowest = _strands(phase.edges)
    by_lowest |= {group.members[0]: [group] for group in phase.groups if len(group.members) > 1}
    return [by_lowest[lowest] for lowest in sorted(by_lowest)]


def _strands(edges: Sequence[Edge]) -> dict[int, list[Group | Edge]]:
    """The edges that hang together, by the lowest node on them."""
    parents: dict[int, int] = {}
    for edge in edges:
        one, other = _lowest(parents, edge.source), _lowest(parents, edge.target)
        parents[max(one, other)] = min(one, other)
    strands: dict[int, list[Group | Edge]] = {}
    for edge in edges:
        strands.setdefault(_lowest(parents, edge.source), []).append(edge)
    return strands


def _lowest(parents: dict[int, int], node: int) -> int:
    while (parent := parents.setdefault(node, node)) != node:
        parents[node] = node = parents[parent]
    return node


def _links(phases: Sequence[Phase]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Who sends and who hears; in a group the first member stands between all others, which reaches as far."""
    edges = [(edge.source, edge.target) for phase in phases for edge in phase.edges]
    spokes = [(group.members[0], member) for phase in phases for group in phase.groups for member in group.members[1:]]
    links = np.array(edges + spokes, dtype=np.int64).reshape(-1, 2)
    back = links[len(edges) :, ::-1]
    both = np.concatenate([links, back])
    return both[:, 0], both[:, 1]


def _reached(start: int, nodes: int, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.bool_]:
    order = np.argsort(sources, kind="stable")
    bounds = np.searchsorted(sources[order], np.arange(nodes + 1)).tolist()
    heard_by = targets[order].tolist()
    reached = np.zeros(nodes, dtype=np.bool_)
    seen, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        fresh = set(heard_by[bounds[node] : bounds[node + 1]]) - seen
        seen |= fresh
        waiting.extend(fresh)
    reached[list(seen)] = True
    return reached
