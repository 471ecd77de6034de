"""Recipes: schedules known by name. Each takes the number of nodes, and for one node does nothing."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from flexcomm.errors import InvalidArgumentError
from flexcomm.gossip.arguments import number_of
from flexcomm.gossip.base_graph import base
from flexcomm.gossip.custom import from_edges
from flexcomm.gossip.phase import Edge, Group, Phase
from flexcomm.gossip.reach import conversations
from flexcomm.gossip.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "alternating",
    "alternating_exponential_ring",
    "complete",
    "directed_exponential",
    "fixed_ring",
    "one_peer_exponential",
    "ring",
    "static_exponential",
]


def complete(nodes: int) -> Schedule:
    """Return the schedule in which all nodes average at every step: exact, and the most traffic."""
    nodes = number_of("nodes", nodes, "complete")
    return Schedule(f"complete({nodes})", nodes, (Phase((Group(tuple(range(nodes))),)),))


def ring(nodes: int) -> Schedule:
    """Return the schedule in which every node averages with one neighbour on a ring, then with the other.

    Of an odd number of nodes one stays alone at each step: node 0, then 1, then 2, so a period of three takes every
    link of the ring. Traffic crosses links between neighbours only; many nodes average slowly.
    """
    nodes = number_of("nodes", nodes, "ring")
    # A ring of two has one link; an odd one needs a third phase for the link that two matchings leave out.
    starts = range(min(2, nodes - 1)) if nodes % 2 == 0 else range(1, min(4, nodes + 1))
    phases = tuple(_neighbours(nodes, start) for start in starts)
    return Schedule(f"ring({nodes})", nodes, phases)


def fixed_ring(nodes: int) -> Schedule:
    """Return the schedule in which every node takes a third of its own and of both neighbours' on a ring, always.

    Mixing with compressed state needs a graph that stays. Two nodes, each other's only neighbour, take halves.
    """
    nodes = number_of("nodes", nodes, "fixed_ring")
    links = ((node, (node + 1) % nodes) for node in range(nodes) if nodes > 1)
    return from_edges(nodes, links, name=f"fixed_ring({nodes})")


def one_peer_exponential(nodes: int) -> Schedule:
    """Return the schedule in which node j averages with ``j ^ 1``, then ``j ^ 2``, ``j ^ 4``: exact in log2(nodes).

    The number of nodes is a power of two.
    """
    nodes = number_of("nodes", nodes, "one_peer_exponential")
    if nodes & (nodes - 1):
        raise InvalidArgumentError(
            f"one_peer_exponential was asked for {nodes} nodes, but needs a power of two: use base({nodes}), which is "
            f"exact for any number, or directed_exponential({nodes})."
        )
    phases = tuple(_pairs((node, node ^ hop) for node in range(nodes) if not node & hop) for hop in _hops(nodes))
    return Schedule(f"one_peer_exponential({nodes})", nodes, phases or (Phase(),))


def alternating(schedule: Schedule) -> Schedule:
    """Return the schedule in which every phase takes two steps, so that half of its links are in use at a time.

    Those who talk with each other in a phase are numbered by their lowest node: first the even ones talk, then the odd
    ones. They have no node in common, so a period does the same as before, bit for bit, in twice as many steps.
    """
    return Schedule(f"alternating({schedule.name})", schedule.nodes, _halved(schedule.phases))


def alternating_exponential_ring(nodes: int) -> Schedule:
    """Return the schedule of alternating exponential rings (AER): exact, and half of the nodes send at a time.

    Pairs of nodes at distance 1, 2, 4, ... average in turn, even pairs first, while the others rest. Ranks of a node
    average among themselves all the time, which makes it the AER of Wang et al. 2024 (arXiv 2410.11998) on ranks, where
    odd pairs come first. Where the number of nodes is no power of two, :func:`base` stands in for the pairs.
    """
    nodes = number_of("nodes", nodes, "alternating_exponential_ring")
    pairs = base(nodes) if nodes & (nodes - 1) else one_peer_exponential(nodes)
    return Schedule(f"alternating_exponential_ring({nodes})", nodes, _halved(pairs.phases))


def static_exponential(nodes: int) -> Schedule:
    """Return the schedule in which node i sends to i + 1, i + 2, i + 4, ... (modulo nodes), all at every step.

    Directed, yet doubly stochastic; fixed, so fit for compressed state. All count alike.
    """
    nodes = number_of("nodes", nodes, "static_exponential")
    hops = _hops(nodes)
    weight = 1.0 / (len(hops) + 1)
    edges = (Edge(node, (node + hop) % nodes, weight) for hop in hops for node in range(nodes))
    return Schedule(f"static_exponential({nodes})", nodes, (Phase(edges=tuple(edges)),))


def directed_exponential(nodes: int) -> Schedule:
    """Return the schedule in which node i sends half of what it has to i + 1, then to i + 2, i + 4, ... (modulo nodes).

    Doubly stochastic; exact for powers of two only (Assran et al. 2019, arXiv 1811.10792).
    """
    nodes = number_of("nodes", nodes, "directed_exponential")
    phases = tuple(
        Phase(edges=tuple(Edge(node, (node + hop) % nodes, 0.5) for node in range(nodes))) for hop in _hops(nodes)
    )
    return Schedule(f"directed_exponential({nodes})", nodes, phases or (Phase(),))


def _hops(nodes: int) -> list[int]:
    """The powers of two below the number of nodes."""
    return [1 << power for power in range((nodes - 1).bit_length())]


def _pairs(pairs: Iterable[tuple[int, int]]) -> Phase:
    return Phase(tuple(Group(pair) for pair in pairs))


def _neighbours(nodes: int, start: int) -> Phase:
    """Every node from ``start`` on with the next one round the ring; of an odd number the one before stays alone."""
    return _pairs(((start + step) % nodes, (start + step + 1) % nodes) for step in range(0, nodes - 1, 2))


def _halved(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    talks = [conversations(phase) for phase in phases]
    return tuple(_phase_of(half) for each in talks for half in (each[::2], each[1::2]))


def _phase_of(talks: Iterable[Iterable[Group | Edge]]) -> Phase:
    parts = list(chain.from_iterable(talks))
    return Phase(
        tuple(part for part in parts if isinstance(part, Group)),
        tuple(part for part in parts if isinstance(part, Edge)),
    )
