"""Predictions: seconds per iteration of every method, the rates at which each is faster, and curves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from flexcomm import InvalidArgumentError
from flexdemo.predict.methods import AllReduceMethod, DecentralizedMethod, make_schedule
from flexdemo.runtime import BreakEven, Horizon, SpeedupFactors, explain_speedup, find_break_evens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flexdemo.predict.methods import Family, Method
    from flexdemo.predict.scenario import Scenario

__all__ = ["Curve", "MethodPrediction", "predict_methods", "predict_over_bandwidth", "predict_over_nodes"]

MIN_SPEEDUP = 1.05
"""Smaller speedups do not count: predictions are accurate to a few per cent."""

_POINTS = 17
_DECADES = 2.0
_SEARCH_HORIZON = Horizon(iterations=50, warmup=18)


@dataclass(frozen=True)
class MethodPrediction:
    """The prediction for one method.

    Args:
        method: its name.
        family: its family.
        iteration_s: seconds per iteration.
        speedup: All-Reduce's seconds over these.
        sent_nbytes: bytes that a node sends in an iteration.
        averaging: how close a step brings the nodes to their mean.
        break_evens: rates at which the method takes as long as All-Reduce.
        min_speedup_break_evens: rates at which it is ``MIN_SPEEDUP`` times as fast.
        factors: causes of the speedup, of decentralized methods only.

    """

    method: str
    family: Family
    iteration_s: float
    speedup: float
    sent_nbytes: float
    averaging: str
    break_evens: tuple[BreakEven, ...] = ()
    min_speedup_break_evens: tuple[BreakEven, ...] = ()
    factors: SpeedupFactors | None = None


@dataclass(frozen=True)
class Curve:
    """Seconds per iteration of one method over rates or numbers of nodes, without those impossible for it."""

    method: str
    family: Family
    xs: tuple[float, ...]
    seconds: tuple[float, ...]


def predict_methods(scenario: Scenario, methods: Sequence[Method]) -> list[MethodPrediction]:
    """Return the prediction for All-Reduce, then one for each of ``methods``, in their order."""
    all_reduce = AllReduceMethod()
    all_reduce_s = scenario.seconds(all_reduce)
    search = replace(scenario, horizon=_SEARCH_HORIZON)
    all_reduce_at = _cache_seconds(search, all_reduce)
    predictions = [_predict(scenario, all_reduce, all_reduce_s)]
    for method in methods:
        method_at = _cache_seconds(search, method)
        predictions.append(
            replace(
                _predict(scenario, method, all_reduce_s),
                break_evens=find_break_evens(method_at, all_reduce_at),
                min_speedup_break_evens=find_break_evens(method_at, all_reduce_at, speedup=MIN_SPEEDUP),
            )
        )
    return predictions


def _cache_seconds(scenario: Scenario, method: Method) -> Callable[[float], float]:
    """Return the seconds as a function of the rate; every search for break-even rates starts with the same ones."""
    return lru_cache(maxsize=None)(lambda bytes_per_s: scenario.at_bandwidth(bytes_per_s).seconds(method))


def _predict(scenario: Scenario, method: Method, all_reduce_s: float) -> MethodPrediction:
    seconds, factors = scenario.seconds(method), None
    if isinstance(method, DecentralizedMethod):
        factors = explain_speedup(
            scenario.cluster,
            scenario.workload,
            make_schedule(method.name, scenario.nodes),
            all_reduce_workload=scenario.all_reduce_workload,
            updates=method.updates,
            horizon=scenario.horizon,
        )
    return MethodPrediction(
        method=method.name,
        family=method.family,
        iteration_s=seconds,
        speedup=all_reduce_s / seconds,
        sent_nbytes=method.sent_nbytes(scenario.cluster, scenario.workload),
        averaging=method.describe_averaging(scenario.nodes),
        factors=factors,
    )


def predict_over_bandwidth(scenario: Scenario, methods: Sequence[Method]) -> list[Curve]:
    """Return the curves of All-Reduce and ``methods`` from a hundredth to a hundred times the scenario's rate."""
    middle = math.log10(scenario.links.bytes_per_s)
    rates = [10 ** (middle + _DECADES * (2 * point / (_POINTS - 1) - 1)) for point in range(_POINTS)]
    return _make_curves(methods, [(rate, scenario.at_bandwidth(rate)) for rate in rates])


def predict_over_nodes(scenario: Scenario, methods: Sequence[Method], max_nodes: int) -> list[Curve]:
    """Return the curves of All-Reduce and ``methods`` on 2, 4, 8, ... nodes, and on ``max_nodes``."""
    numbers = sorted({max_nodes, *(2**power for power in range(1, max_nodes.bit_length()) if 2**power <= max_nodes)})
    return _make_curves(methods, [(float(nodes), scenario.with_nodes(nodes)) for nodes in numbers])


def _make_curves(methods: Sequence[Method], scenarios: Sequence[tuple[float, Scenario]]) -> list[Curve]:
    curves = []
    for method in (AllReduceMethod(), *methods):
        points = []
        for x, scenario in scenarios:
            try:
                points.append((x, scenario.seconds(method)))
            except InvalidArgumentError:
                continue
        xs, seconds = zip(*points, strict=True) if points else ((), ())
        curves.append(Curve(method.name, method.family, xs, seconds))
    return curves
