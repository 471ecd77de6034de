"""The methods that are compared, and the predictions for them: seconds, break-even rates, and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol, get_args

from flexcomm import InvalidArgumentError, gossip
from flexcomm.gossip import ScheduleLike
from flexdemo.predict import PredictError
from flexdemo.predict.calibration import compression_for_k
from flexdemo.predict.scenario import PredictOptions, Scenario
from flexdemo.runtime import (
    BreakEven,
    Cluster,
    Compression,
    Horizon,
    SpeedupFactors,
    Updates,
    Workload,
    choose_algorithm,
    explain_speedup,
    find_break_evens,
    sent_nbytes,
    simulate_all_reduce,
    simulate_decentralized,
    simulate_flexdemo,
)
from flexdemo.runtime.links import crossings

Family = Literal["all-reduce", "decentralized", "flexdemo"]

SCHEDULES: Mapping[str, Callable[[int], ScheduleLike]] = {
    "complete": gossip.complete,
    "one-peer-exp": gossip.one_peer_exponential,
    "base": gossip.base,
    "aer": gossip.alternating_exponential_ring,
    "directed-exp": gossip.directed_exponential,
    "static-exp": gossip.static_exponential,
    "ring": gossip.ring,
    "random-matching": gossip.random_matching,
}
"""Schedules that average exactly come first: of methods that take the same time, the first is recommended."""

_STEPS_WITHOUT_PERIOD = 4


class Method(Protocol):
    """A training method."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> Family: ...

    def seconds(self, cluster: Cluster, workload: Workload, horizon: Horizon) -> float:
        """Return the seconds per iteration; raise InvalidArgumentError if it does not exist for so many nodes."""
        ...

    def sent_nbytes(self, cluster: Cluster, workload: Workload) -> float:
        """Return the bytes that a node sends to other nodes in an iteration, on average."""
        ...

    def describe_averaging(self, nodes: int) -> str:
        """Return how close a step brings the nodes to their mean."""
        ...


@dataclass(frozen=True)
class AllReduceMethod:
    """Data parallelism with All-Reduce, the baseline."""

    name: str = "all-reduce"
    family: Family = "all-reduce"

    def seconds(self, cluster: Cluster, workload: Workload, horizon: Horizon) -> float:
        return simulate_all_reduce(cluster, workload, horizon).iteration_s

    def sent_nbytes(self, cluster: Cluster, workload: Workload) -> float:
        return crossings("all-reduce", cluster.nodes) * workload.nbytes

    def describe_averaging(self, nodes: int) -> str:  # noqa: ARG002  (the protocol's)
        return "exact, every step"


@dataclass(frozen=True)
class DecentralizedMethod:
    """Decentralized training with a schedule of ``flexcomm.gossip``."""

    name: str
    updates: Updates = "backward"
    family: Family = "decentralized"

    def seconds(self, cluster: Cluster, workload: Workload, horizon: Horizon) -> float:
        schedule = make_schedule(self.name, cluster.nodes)
        return simulate_decentralized(cluster, workload, schedule, updates=self.updates, horizon=horizon).iteration_s

    def sent_nbytes(self, cluster: Cluster, workload: Workload) -> float:
        schedule = make_schedule(self.name, cluster.nodes)
        steps = schedule.period or _STEPS_WITHOUT_PERIOD
        models = 0.0
        for step in range(steps):
            phase = schedule.phase(step)
            models += sum(len(group.members) * crossings("group", len(group.members)) for group in phase.groups)
            models += len(phase.edges)
        return models / steps / cluster.nodes * workload.nbytes

    def describe_averaging(self, nodes: int) -> str:
        report = make_schedule(self.name, nodes).report()
        if report.contraction is None:
            return f"period {report.period or 'none'}"
        if report.exact:
            return f"exact in {report.measured_phases}"
        return f"to {report.contraction:.3g} in {report.measured_phases}"


@dataclass(frozen=True)
class FlexDemoMethod:
    """FlexDeMo with ``flexcomm.demo(k, chunk)``."""

    compression: Compression
    overlap: bool = True
    family: Family = "flexdemo"

    @property
    def name(self) -> str:
        return f"flexdemo k={self.compression.k}"

    def seconds(self, cluster: Cluster, workload: Workload, horizon: Horizon) -> float:
        return simulate_flexdemo(cluster, workload, self.compression, overlap=self.overlap, horizon=horizon).iteration_s

    def sent_nbytes(self, cluster: Cluster, workload: Workload) -> float:
        algorithm = choose_algorithm(cluster.nodes, self.compression, workload.nbytes)
        return sent_nbytes(algorithm, cluster.nodes, self.compression, workload.nbytes)

    def describe_averaging(self, nodes: int) -> str:  # noqa: ARG002  (the protocol's)
        return f"1/{self.compression.chunk**2 / self.compression.k:.0f} of coefficients"


@lru_cache(maxsize=64)  # A schedule of thousands of nodes takes a second to build.
def make_schedule(name: str, nodes: int) -> ScheduleLike:
    """Return the schedule of that name in ``SCHEDULES`` for ``nodes``."""
    return SCHEDULES[name](nodes)


def plan_methods(
    options: PredictOptions, nodes: int, codec: Sequence[Compression]
) -> tuple[list[Method], dict[str, str]]:
    """Return the methods to compare with All-Reduce, those that average best first, and why others were skipped.

    Schedules that do not exist for so many nodes are skipped. If ``codec`` is empty, costs of compression are assumed.
    """
    updates = next((one for one in get_args(Updates) if one == options.updates), None)
    if updates is None:
        raise PredictError(f"got --updates {options.updates!r}, needed one of {', '.join(get_args(Updates))}.")
    unknown = [name for name in options.schedules if name not in SCHEDULES]
    if unknown:
        raise PredictError(f"got --schedule {unknown[0]!r}, needed one of {', '.join(SCHEDULES)}.")
    methods: list[Method] = []
    skipped: dict[str, str] = {}
    for name in options.schedules:
        try:
            make_schedule(name, nodes)
        except InvalidArgumentError as error:
            skipped[name] = str(error)
        else:
            methods.append(DecentralizedMethod(name, updates))
    try:
        compressions = [compression_for_k(codec, k) for k in sorted(options.ks, reverse=True)]
    except InvalidArgumentError as error:
        raise PredictError(f"got --k {', '.join(map(str, options.ks))}: {error}") from error
    return [*methods, *(FlexDemoMethod(one, options.overlap) for one in compressions)], skipped


# Predictions

MIN_SPEEDUP = 1.05
"""Smaller speedups do not count: predictions are accurate to a few per cent."""

_POINTS = 17
_DECADES = 2.0
_SEARCH_HORIZON = Horizon(iterations=50, warmup=18)


@dataclass(frozen=True)
class MethodPrediction:
    """The prediction for one method.

    ``speedup`` is All-Reduce's ``iteration_s`` over this one's, and ``factors`` its causes, of decentralized methods
    only. At ``break_evens`` the method takes as long as All-Reduce, at ``min_speedup_break_evens`` it is
    ``MIN_SPEEDUP`` times as fast. ``averaging`` says how close a step brings the nodes to their mean.
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
