"""Comparison with All-Reduce: the rates at which a method is faster, and the causes of its speedup."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from flexdemo.runtime.simulation import (
    HORIZON,
    AllReduceSchedule,
    Horizon,
    Schedule,
    Updates,
    simulate_all_reduce,
    simulate_decentralized,
)
from flexdemo.runtime.workload import Cluster, Workload

_LOWEST_BYTES_PER_S, _HIGHEST_BYTES_PER_S = 1e5, 1e11
_POINTS_PER_DECADE = 3
_BISECTIONS = 12


@dataclass(frozen=True)
class BreakEven:
    """A rate at which two methods take the same time; on its ``faster_side`` the compared method is faster."""

    bytes_per_s: float
    faster_side: Literal["below", "above"]


def find_break_evens(
    method_s: Callable[[float], float],
    all_reduce_s: Callable[[float], float],
    *,
    speedup: float = 1.0,
) -> tuple[BreakEven, ...]:
    """Return the rates, ascending, at which All-Reduce takes ``speedup`` times as long as a method.

    Rates from 100 kB/s to 100 GB/s are searched; two of them within a third of a decade may be missed.

    Args:
        method_s: the method's seconds per iteration at a rate, in bytes per second between nodes.
        all_reduce_s: All-Reduce's seconds per iteration at a rate.
        speedup: the ratio of the two times that is searched for.

    """

    def is_faster(log_rate: float) -> bool:
        rate = math.exp(log_rate)
        return all_reduce_s(rate) > speedup * method_s(rate)

    low, high = math.log(_LOWEST_BYTES_PER_S), math.log(_HIGHEST_BYTES_PER_S)
    count = math.ceil((high - low) / math.log(10) * _POINTS_PER_DECADE)
    grid = [low + (high - low) * number / count for number in range(count + 1)]
    faster = [is_faster(log_rate) for log_rate in grid]
    return tuple(
        BreakEven(math.exp(_bisect(is_faster, grid[place], grid[place + 1])), "below" if before else "above")
        for place, (before, after) in enumerate(pairwise(faster))
        if before != after
    )


def _bisect(is_faster: Callable[[float], bool], low: float, high: float) -> float:
    at_low = is_faster(low)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_faster(middle) == at_low else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class SpeedupFactors:
    """The speedup of a schedule over All-Reduce as a product of three causes, each added to the ones before it.

    Args:
        overlap: All-Reduce's traffic, but with a whole iteration to arrive; no variation of compute times.
        links: the schedule's traffic instead of All-Reduce's; no variation.
        variation: the speedup with variation over the speedup without.

    """

    overlap: float
    links: float
    variation: float

    @property
    def speedup(self) -> float:
        """The product of the three factors."""
        return self.overlap * self.links * self.variation


def explain_speedup(
    cluster: Cluster,
    workload: Workload,
    schedule: Schedule,
    *,
    all_reduce_workload: Workload | None = None,
    updates: Updates = "backward",
    horizon: Horizon = HORIZON,
) -> SpeedupFactors:
    """Return how much overlap, cheaper exchanges and variation contribute to a schedule's speedup over All-Reduce.

    Args:
        cluster: nodes and links.
        workload: buckets and compute times of decentralized training.
        schedule: one of ``flexcomm.gossip`` for as many nodes.
        all_reduce_workload: that of All-Reduce, if its buckets are of another size.
        updates: see :func:`simulate_decentralized`.
        horizon: how many iterations are simulated.

    """

    def decentralized_s(load: Workload, which: Schedule) -> float:
        return simulate_decentralized(cluster, load, which, updates=updates, horizon=horizon).iteration_s

    reduced = all_reduce_workload or workload
    steady = workload.steady()
    steady_all_reduce_s = simulate_all_reduce(cluster, reduced.steady(), horizon).iteration_s
    overlapped_s = decentralized_s(steady, AllReduceSchedule(cluster.nodes))
    steady_s = decentralized_s(steady, schedule)
    speedup = simulate_all_reduce(cluster, reduced, horizon).iteration_s / decentralized_s(workload, schedule)
    return SpeedupFactors(
        overlap=steady_all_reduce_s / overlapped_s,
        links=overlapped_s / steady_s,
        variation=speedup * steady_s / steady_all_reduce_s,
    )
