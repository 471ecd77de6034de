"""The recursions: when each node has finished each bucket of each iteration.

They follow from where training launches an exchange and where it waits for it; docs/runtime-model.md writes them as
formulas. Times are seconds since the start of training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from flexdemo.runtime.errors import ModelError, check_at_least
from flexdemo.runtime.schedules import plan_phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from flexdemo.runtime.schedules import PhasePlan, Schedule
    from flexdemo.runtime.workload import Cluster, Workload

__all__ = ["HORIZON", "Horizon", "Timing", "Updates", "simulate_all_reduce", "simulate_decentralized"]

Updates = Literal["backward", "step"]


@dataclass(frozen=True)
class Horizon:
    """How many iterations are simulated, how many of the first do not count, and the seed of all draws."""

    iterations: int = 120
    warmup: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least("warmup", self.warmup, 0)
        check_at_least("iterations", self.iterations, self.warmup + 1)


HORIZON = Horizon()


@dataclass(frozen=True)
class Timing:
    """What a simulation came to: ``finished_s[t]`` is when the last node has finished iteration t."""

    finished_s: tuple[float, ...]
    warmup: int
    period: int = 1

    @property
    def iteration_s(self) -> float:
        """The seconds per iteration after warm-up, over as many whole periods of the schedule as fit."""
        count = len(self.finished_s) - self.warmup
        count = count // self.period * self.period or count
        begin = len(self.finished_s) - count
        began_s = self.finished_s[begin - 1] if begin else 0.0
        return (self.finished_s[-1] - began_s) / count


def simulate_all_reduce(cluster: Cluster, workload: Workload, horizon: Horizon = HORIZON) -> Timing:
    """Return the timing of bucketed data parallelism: each bucket is added up while the backward pass goes on.

    All nodes end an iteration together. Only the slowest counts: its factor is that of every bucket it computes.
    """
    tau_s = [_all_reduce_s(cluster, workload, size) for size in workload.bucket_nbytes]
    computed_s = workload.forward_s + np.cumsum(workload.backward_s)
    # Exchanges queue: an iteration ends when, after the last bucket that was waited for, all later ones are exchanged.
    from_here_s = np.cumsum(tau_s[::-1])[::-1]
    slowest = [workload.draw(cluster.nodes, iteration, horizon.seed).max() for iteration in range(horizon.iterations)]
    lengths_s = np.max(np.outer(slowest, computed_s) + from_here_s, axis=1) + sum(workload.optimizer_s)
    return Timing(tuple(np.cumsum(lengths_s).tolist()), horizon.warmup)


def _all_reduce_s(cluster: Cluster, workload: Workload, nbytes: int) -> float:
    legs_s = cluster.intra_s(nbytes) if workload.whole else 0.0
    return legs_s + (cluster.links.tau("all-reduce", cluster.nodes, nbytes) if cluster.nodes > 1 else 0.0)


def simulate_decentralized(
    cluster: Cluster,
    workload: Workload,
    schedule: Schedule,
    *,
    updates: Updates = "backward",
    horizon: Horizon = HORIZON,
) -> Timing:
    """Return the timing of decentralized training, in which an exchange has a whole iteration to arrive.

    For each bucket a node waits for the exchange launched an iteration ago, mixes, steps and launches the next one: as
    the backward pass completes the bucket, or, with ``updates="step"``, for all buckets after the backward pass.
    """
    if schedule.nodes != cluster.nodes:
        raise ModelError(f"got a schedule for {schedule.nodes} nodes, needed one for the cluster's {cluster.nodes}.")
    if updates not in get_args(Updates):
        raise ModelError(f"got updates={updates!r}, needed one of {', '.join(get_args(Updates))}.")
    state = _State(cluster.nodes, len(workload.bucket_nbytes))
    backward_s = workload.backward_s
    before_s = 0.0
    if updates == "step":
        before_s, backward_s = sum(backward_s), (0.0,) * len(backward_s)
    finished = []
    for iteration, plan in enumerate(_plans(cluster, workload, schedule, horizon.iterations)):
        factors = workload.draw(cluster.nodes, iteration, horizon.seed)
        state.ready_s = state.ready_s + factors * (workload.forward_s + before_s)
        for bucket, (compute_s, step_s) in enumerate(zip(backward_s, workload.optimizer_s, strict=True)):
            arrived_s = state.exchanged_s[bucket]
            state.ready_s = np.maximum(state.ready_s + factors * compute_s, arrived_s) + step_s
            state.launch(plan, bucket)
        finished.append(float(state.ready_s.max()))
    return Timing(tuple(finished), horizon.warmup, schedule.period or 1)


def _plans(cluster: Cluster, workload: Workload, schedule: Schedule, iterations: int) -> Iterator[PhasePlan]:
    """Yield the plan of every iteration; a phase that comes again is planned once."""
    known: dict[int, PhasePlan] = {}
    for iteration in range(iterations):
        if schedule.period is None:
            yield plan_phase(schedule.phase(iteration), cluster, workload)
            continue
        place = iteration % schedule.period
        if place not in known:
            known[place] = plan_phase(schedule.phase(place), cluster, workload)
        yield known[place]


class _State:
    """When every node was done: u_i with its work, q_i with its last exchange, fin_{i,b} with that of each bucket."""

    def __init__(self, nodes: int, buckets: int) -> None:
        self.ready_s: NDArray[np.float64] = np.zeros(nodes)
        self.engine_s: NDArray[np.float64] = np.zeros(nodes)
        self.exchanged_s: NDArray[np.float64] = np.full((buckets, nodes), -math.inf)

    def launch(self, plan: PhasePlan, bucket: int) -> None:
        """Exchange ``bucket`` as ``plan`` says, as soon as the nodes and their engines are ready."""
        free_s = np.maximum(self.ready_s, self.engine_s)
        end_s = np.full_like(free_s, -math.inf)
        for members, seconds in zip(plan.groups, plan.group_s[bucket], strict=True):
            end_s[members] = free_s[members].max(axis=1, keepdims=True) + seconds
        if plan.senders.size:
            # A node that is in a group, too, first finishes with that.
            start_s = free_s = np.maximum(free_s, end_s)
            start_s = start_s.copy()
            np.maximum.at(start_s, plan.targets, free_s[plan.sources])
            end_s[plan.senders] = start_s[plan.senders] + plan.edge_s[bucket]
        if plan.silent_s[bucket] > 0:
            end_s[plan.silent] = free_s[plan.silent] + plan.silent_s[bucket]
        self.exchanged_s[bucket] = end_s
        self.engine_s = np.maximum(self.engine_s, end_s)
