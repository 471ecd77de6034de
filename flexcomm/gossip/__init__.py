"""Mixing with a few nodes at a time instead of averaging over all."""

from __future__ import annotations

from flexcomm.gossip.base_graph import base
from flexcomm.gossip.custom import from_edges, from_matrix
from flexcomm.gossip.graphs import (
    alternating,
    alternating_exponential_ring,
    complete,
    directed_exponential,
    fixed_ring,
    one_peer_exponential,
    ring,
    static_exponential,
)
from flexcomm.gossip.random_schedule import RandomSchedule, random_matching
from flexcomm.gossip.schedule import Edge, Group, Phase, Schedule, ScheduleLike, ScheduleReport

__all__ = [
    "Edge",
    "Group",
    "Phase",
    "RandomSchedule",
    "Schedule",
    "ScheduleLike",
    "ScheduleReport",
    "alternating",
    "alternating_exponential_ring",
    "base",
    "complete",
    "directed_exponential",
    "fixed_ring",
    "from_edges",
    "from_matrix",
    "one_peer_exponential",
    "random_matching",
    "ring",
    "static_exponential",
]
