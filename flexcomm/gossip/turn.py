"""Turns: what one node does in a phase, as numbers: whom it sends to, whom it hears, and how that joins what it has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexcomm.gossip.schedule import Phase

__all__ = ["Turn", "turn_of"]

_PAIR = 2


@dataclass(frozen=True)
class Turn:
    """A node's part of a phase: ``keep * x + sum of weights[j] * x of hears[j]`` is what it has afterwards.

    ``group``, if there is one, holds more than two nodes, this one among them, which add up by sharing the work: then
    ``keep`` is what a node adds of its own to the sum of all, of which every node counts with the one weight given.
    """

    sends_to: tuple[int, ...] = ()
    hears: tuple[int, ...] = ()
    keep: float = 1.0
    weights: tuple[float, ...] = ()
    group: tuple[int, ...] = ()

    @property
    def total(self) -> float:
        """All weights together: 1, unless the graph is directed and its nodes hear more or less than they send."""
        return self.keep + (len(self.group) or 1) * sum(self.weights)

    @property
    def is_idle(self) -> bool:
        return not (self.sends_to or self.hears or self.group)


@lru_cache(maxsize=4096)
def turn_of(phase: Phase, node: int) -> Turn:
    """Return what ``node`` does in ``phase``."""
    group = phase.group_of(node)
    if group is not None and len(group.members) > 1:
        own, peers = group.own_weight, group.peer_weight
        if len(group.members) == _PAIR:
            other = tuple(member for member in group.members if member != node)
            return Turn(other, other, own, (peers,))
        return Turn(keep=own - peers, weights=(peers,), group=group.members)
    incoming = phase.in_edges(node)
    return Turn(
        tuple(edge.target for edge in phase.out_edges(node)),
        tuple(edge.source for edge in incoming),
        phase.self_weight(node),
        tuple(edge.weight for edge in incoming),
    )
