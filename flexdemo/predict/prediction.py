"""What every method takes, where it stops paying, and which one to use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from flexcomm import InvalidArgumentError
from flexdemo.predict.contestants import AllReduce, DecentralizedMethod, find_schedule
from flexdemo.runtime import (
    AlphaBeta,
    BreakEven,
    Cluster,
    Horizon,
    MeasuredLinks,
    SpeedupFactors,
    Workload,
    explain_speedup,
    find_break_evens,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flexdemo.predict.contestants import Contestant, Kind

__all__ = ["Curve", "Row", "Scene", "predict_over_bandwidth", "predict_over_nodes", "predict_rows"]

_POINTS = 17
_HORIZON = Horizon(iterations=80, warmup=20)
_SEARCHED = Horizon(iterations=50, warmup=18)
_DECADES = 2.0
WORTH = 1.05
"""The gain from which a method is worth its trouble: predictions are not better than some percent."""


@dataclass(frozen=True)
class Scene:
    """What is predicted for: a cluster, a workload, and how long it is simulated."""

    nodes: int
    links: AlphaBeta | MeasuredLinks
    workload: Workload
    ranks_per_node: int = 1
    horizon: Horizon = _HORIZON

    def cluster(self) -> Cluster:
        return Cluster(self.nodes, self.links, self.ranks_per_node)

    def at_bandwidth(self, bytes_per_s: float) -> Scene:
        return replace(self, links=self.links.at_bandwidth(bytes_per_s))

    def with_nodes(self, nodes: int) -> Scene:
        """Return the same with another number of nodes, whose slowness is not known."""
        slowness = self.workload.slowness if nodes == self.nodes else ()
        return replace(self, nodes=nodes, workload=replace(self.workload, slowness=slowness))

    def seconds(self, contestant: Contestant) -> float:
        return contestant.seconds(self.cluster(), self.workload, self.horizon)


@dataclass(frozen=True)
class Row:
    """What is said of one method.

    At the rates of ``break_even`` it and All-Reduce take the same time, at those of ``worth`` it gains 5 %; there may
    be none. ``factors`` say why a decentralized method is faster.
    """

    method: str
    kind: Kind
    iteration_s: float
    speedup: float
    sent_nbytes: float
    averaging: str
    break_even: tuple[BreakEven, ...] = ()
    worth: tuple[BreakEven, ...] = ()
    factors: SpeedupFactors | None = None


@dataclass(frozen=True)
class Curve:
    """Seconds per iteration of one method over a rate or a number of nodes; points it cannot have are left out."""

    method: str
    kind: Kind
    xs: tuple[float, ...]
    seconds: tuple[float, ...]


def predict_rows(scene: Scene, contestants: Sequence[Contestant]) -> list[Row]:
    """Return a row for All-Reduce and one for each contestant, in their order."""
    baseline = AllReduce()
    all_reduce_s = scene.seconds(baseline)
    rows = [
        Row(
            baseline.name,
            baseline.kind,
            all_reduce_s,
            1.0,
            baseline.sent_nbytes(scene.cluster(), scene.workload),
            baseline.describe_averaging(scene.nodes),
        )
    ]
    return [*rows, *(_predict_row(scene, contestant, all_reduce_s) for contestant in contestants)]


def _predict_row(scene: Scene, contestant: Contestant, all_reduce_s: float) -> Row:
    searched = replace(scene, horizon=_SEARCHED)
    # Both searches ask for the same rates.
    method_s = lru_cache(maxsize=None)(lambda rate: searched.at_bandwidth(rate).seconds(contestant))
    baseline_s = lru_cache(maxsize=None)(lambda rate: searched.at_bandwidth(rate).seconds(AllReduce()))
    seconds = scene.seconds(contestant)
    return Row(
        method=contestant.name,
        kind=contestant.kind,
        iteration_s=seconds,
        speedup=all_reduce_s / seconds,
        sent_nbytes=contestant.sent_nbytes(scene.cluster(), scene.workload),
        averaging=contestant.describe_averaging(scene.nodes),
        break_even=find_break_evens(method_s, baseline_s),
        worth=find_break_evens(method_s, baseline_s, speedup=WORTH),
        factors=_explain(scene, contestant),
    )


def _explain(scene: Scene, contestant: Contestant) -> SpeedupFactors | None:
    if not isinstance(contestant, DecentralizedMethod):
        return None
    schedule = find_schedule(contestant.name, scene.nodes)
    return explain_speedup(scene.cluster(), scene.workload, schedule, updates=contestant.updates, horizon=scene.horizon)


def predict_over_bandwidth(scene: Scene, contestants: Sequence[Contestant]) -> list[Curve]:
    """Return how long iterations take at rates from a hundredth to a hundred times the scene's."""
    middle = math.log10(scene.links.bytes_per_s)
    rates = [10 ** (middle + _DECADES * (2 * point / (_POINTS - 1) - 1)) for point in range(_POINTS)]
    scenes = [(rate, scene.at_bandwidth(rate)) for rate in rates]
    return [_follow(contestant, scenes) for contestant in (AllReduce(), *contestants)]


def predict_over_nodes(scene: Scene, contestants: Sequence[Contestant], most: int) -> list[Curve]:
    """Return how long iterations take on 2, 4, 8, ... nodes, and on ``most``."""
    numbers = sorted({most, *(2**power for power in range(1, most.bit_length()) if 2**power <= most)})
    scenes = [(float(nodes), scene.with_nodes(nodes)) for nodes in numbers]
    return [_follow(contestant, scenes) for contestant in (AllReduce(), *contestants)]


def _follow(contestant: Contestant, scenes: Sequence[tuple[float, Scene]]) -> Curve:
    points = []
    for x, scene in scenes:
        try:
            points.append((x, scene.seconds(contestant)))
        except InvalidArgumentError:
            continue
    return Curve(contestant.name, contestant.kind, tuple(x for x, _ in points), tuple(y for _, y in points))
