"""Gossip: nodes mix with a few others at a time, instead of averaging over all."""

from __future__ import annotations

from flexcomm.gossip.api import plan_mix
from flexcomm.gossip.graphs import (
    alternating,
    alternating_exponential_ring,
    base,
    complete,
    directed_exponential,
    fixed_ring,
    one_peer_exponential,
    random_matching,
    ring,
    static_exponential,
)
from flexcomm.gossip.phase import Edge, Group, Phase, Round, round_of
from flexcomm.gossip.schedule import RandomSchedule, Schedule, ScheduleLike, ScheduleReport, from_edges, from_matrix

__all__ = [
    "Edge",
    "Group",
    "Phase",
    "RandomSchedule",
    "Round",
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
    "plan_mix",
    "random_matching",
    "ring",
    "round_of",
    "static_exponential",
]
