"""When a method pays: the bandwidth at which it equals All-Reduce, and what each of three causes is worth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from flexdemo.runtime.errors import ModelError
from flexdemo.runtime.recursion import HORIZON, Horizon, Updates, simulate_all_reduce, simulate_decentralized
from flexdemo.runtime.schedules import Everybody

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexdemo.runtime.schedules import Schedule
    from flexdemo.runtime.workload import Cluster, Workload

__all__ = ["BreakEven", "Factors", "explain", "find_break_even", "find_break_evens"]

_PER_DECADE = 3
_BISECTIONS = 12


@dataclass(frozen=True)
class BreakEven:
    """At ``bytes_per_s`` both take the same time; at rates ``faster_side`` of it the method is faster."""

    bytes_per_s: float
    faster_side: Literal["below", "above"]


def find_break_evens(
    method_s: Callable[[float], float],
    all_reduce_s: Callable[[float], float],
    *,
    lowest_bytes_per_s: float = 1e5,
    highest_bytes_per_s: float = 1e11,
    gain: float = 1.0,
) -> tuple[BreakEven, ...]:
    """Return the rates, in ascending order, at which All-Reduce takes ``gain`` times as long as the method.

    Both arguments say how long an iteration takes at a rate in bytes per second between nodes. Two such rates within
    a third of a decade may be missed.
    """
    if not 0 < lowest_bytes_per_s < highest_bytes_per_s:
        raise ModelError(f"got rates from {lowest_bytes_per_s} to {highest_bytes_per_s}, needed 0 < lowest < highest.")

    def is_faster(log_rate: float) -> bool:
        rate = math.exp(log_rate)
        return all_reduce_s(rate) > gain * method_s(rate)

    low, high = math.log(lowest_bytes_per_s), math.log(highest_bytes_per_s)
    count = max(2, math.ceil((high - low) / math.log(10) * _PER_DECADE))
    grid = [low + (high - low) * number / count for number in range(count + 1)]
    faster = [is_faster(log_rate) for log_rate in grid]
    return tuple(
        BreakEven(math.exp(_bisect(is_faster, grid[place], grid[place + 1])), "below" if before else "above")
        for place, (before, after) in enumerate(pairwise(faster))
        if before != after
    )


def find_break_even(
    method_s: Callable[[float], float], all_reduce_s: Callable[[float], float], *, gain: float = 1.0
) -> BreakEven | None:
    """Return the highest rate at which All-Reduce takes ``gain`` times as long as the method, None if there is none."""
    found = find_break_evens(method_s, all_reduce_s, gain=gain)
    return found[-1] if found else None


def _bisect(is_faster: Callable[[float], bool], below: float, above: float) -> float:
    before = is_faster(below)
    for _ in range(_BISECTIONS):
        middle = (below + above) / 2
        below, above = (middle, above) if is_faster(middle) == before else (below, middle)
    return (below + above) / 2


@dataclass(frozen=True)
class Factors:
    """What each cause contributes to the speedup over All-Reduce; their product is ``speedup``, in this order.

    ``overlap``: All-Reduce's own traffic, but with a whole iteration to arrive; all nodes at their mean pace.
    ``links``: then the schedule's traffic instead of All-Reduce's. ``variation``: then nodes as they are, whose speedup
    is so many times that of steady nodes.
    """

    overlap: float
    links: float
    variation: float

    @property
    def speedup(self) -> float:
        return self.overlap * self.links * self.variation


def explain(
    cluster: Cluster,
    workload: Workload,
    schedule: Schedule,
    *,
    updates: Updates = "backward",
    horizon: Horizon = HORIZON,
) -> Factors:
    """Return what overlap, cheaper links and independence of slow nodes are worth, each switched on after the other."""

    def decentralized_s(load: Workload, which: Schedule) -> float:
        return simulate_decentralized(cluster, load, which, updates=updates, horizon=horizon).iteration_s

    steady = workload.steady()
    steady_all_reduce_s = simulate_all_reduce(cluster, steady, horizon).iteration_s
    overlapped_s = decentralized_s(steady, Everybody(cluster.nodes))
    steady_s = decentralized_s(steady, schedule)
    speedup = simulate_all_reduce(cluster, workload, horizon).iteration_s / decentralized_s(workload, schedule)
    return Factors(
        overlap=steady_all_reduce_s / overlapped_s,
        links=overlapped_s / steady_s,
        variation=speedup * steady_s / steady_all_reduce_s,
    )
