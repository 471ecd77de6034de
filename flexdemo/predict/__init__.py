"""``flexdemo predict``: seconds per iteration by each method, on measured or assumed links.

Here are the scenario, the methods that are compared, and the predictions for them. ``measure`` measures a cluster and
writes the file of ``calibration``; ``report`` prints; ``flexdemo/__main__.py`` is the command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Literal

from flexcomm import BUCKET_BYTES, InvalidArgumentError, gossip
from flexcomm.gossip import RandomSchedule, Schedule
from flexdemo.predict.calibration import Calibration, Compute, compression_for_k
from flexdemo.runtime import (
    AlphaBeta,
    BreakEven,
    Cluster,
    Compression,
    Horizon,
    MeasuredLinks,
    SpeedupFactors,
    Straggler,
    Updates,
    Workload,
    choose_algorithm,
    explain_speedup,
    find_break_evens,
    plan_workload,
    sent_nbytes,
    simulate_all_reduce,
    simulate_decentralized,
    simulate_flexdemo,
)
from flexdemo.runtime.inputs import crossings

DDP_BUCKET_BYTES = 25 << 20
"""Default ``bucket_cap_mb=25`` of ``torch.nn.parallel.DistributedDataParallel``."""

_ELEMENT_NBYTES = 4
_LATENCY_S = 50e-6
_BACKWARD_OVER_FORWARD = 2.0
_HORIZON = Horizon(iterations=80, warmup=20)


# The scenario


@dataclass(frozen=True, kw_only=True)
class Scenario(Cluster):
    """A cluster and the workload of a node; All-Reduce's workload is in the buckets of DDP."""

    links: AlphaBeta | MeasuredLinks
    workload: Workload
    all_reduce_workload: Workload
    horizon: Horizon = _HORIZON

    def at_bandwidth(self, bytes_per_s: float) -> Scenario:
        """Return the same scenario with another rate between nodes."""
        return replace(self, links=self.links.at_bandwidth(bytes_per_s))


def given_compute(
    parameters: int | None,
    forward_ms: float | None,
    backward_ms: float | None = None,
    optimizer_ms: float | None = None,
    sigma: float | None = None,
) -> Compute | None:
    """Return the compute times that were given; None if there are none."""
    if forward_ms is None:
        if backward_ms is not None or optimizer_ms is not None:
            raise InvalidArgumentError("got compute times without --forward-ms: give that, too.")
        return None
    if parameters is None:
        raise InvalidArgumentError("got --forward-ms without --parameters: give the size of the model it belongs to.")
    forward_s, optimizer_s = forward_ms / 1e3, (optimizer_ms or 0.0) / 1e3
    backward_s = _BACKWARD_OVER_FORWARD * forward_s if backward_ms is None else backward_ms / 1e3
    return Compute("as given", _ELEMENT_NBYTES * parameters, forward_s, backward_s, optimizer_s, sigma or 0.0)


def plan_scenario(
    measured: Calibration | None,
    compute: Compute | None = None,
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    bits_per_s: float | None = None,
    latency_us: float | None = None,
    parameters: int | None = None,
    sigma: float | None = None,
    straggler: Straggler = Straggler(),  # noqa: B008  (frozen)
    bucket_mb: float | None = None,
    sharded: bool = True,
) -> Scenario:
    """Return the scenario; what is given takes precedence over a measurement, and something must give each number."""
    if compute is None:
        compute = _measured_compute(measured, parameters)
    nodes = nodes or (measured.nodes if measured else 0)
    if nodes < 2:
        raise InvalidArgumentError(f"got {nodes or 'no number of'} nodes, needed 2 or more: give --nodes.")
    workload, all_reduce_workload = (
        plan_workload(
            compute.model_nbytes,
            bucket_nbytes=default if bucket_mb is None else round(bucket_mb * 2**20),
            forward_s=compute.forward_s,
            backward_s=compute.backward_s,
            optimizer_s=compute.optimizer_s,
            sigma=compute.sigma if sigma is None else sigma,
            slowness=compute.slowness if len(compute.slowness) == nodes else (),
            straggler=straggler,
            sharded=sharded,
        )
        for default in (BUCKET_BYTES, DDP_BUCKET_BYTES)
    )
    return Scenario(
        nodes=nodes,
        ranks_per_node=ranks_per_node or (measured.ranks_per_node if measured else 1),
        links=_choose_links(measured, bits_per_s, latency_us),
        workload=workload,
        all_reduce_workload=all_reduce_workload,
    )


def _measured_compute(measured: Calibration | None, parameters: int | None) -> Compute:
    if measured is None or measured.compute is None:
        raise InvalidArgumentError(
            "no compute times: give --parameters 124M --forward-ms 40 (and --backward-ms, --optimizer-ms), or a "
            "--calibration that `flexdemo predict --calibrate FILE` wrote."
        )
    measured_parameters = measured.compute.model_nbytes // _ELEMENT_NBYTES
    if parameters not in (None, measured_parameters):
        raise InvalidArgumentError(
            f"got --parameters {parameters}, but the measured times are those of a model of "
            f"{measured_parameters}: give --forward-ms and --backward-ms of yours, or calibrate with --workload."
        )
    return measured.compute


def _choose_links(
    measured: Calibration | None, bits_per_s: float | None, latency_us: float | None
) -> AlphaBeta | MeasuredLinks:
    if measured is not None and any(table.link != "intra" for table in measured.links):
        if latency_us is not None:
            raise InvalidArgumentError(
                "got --latency-us beside measured links, which have their own: leave one of them out."
            )
        links = MeasuredLinks(measured.links)
        return links if bits_per_s is None else links.at_bandwidth(bits_per_s / 8)
    if bits_per_s is None:
        raise InvalidArgumentError(
            "no links: give --bandwidth 1gbit, or a --calibration or --collectives that was measured on two nodes or "
            "more."
        )
    return AlphaBeta(bits_per_s / 8, _LATENCY_S if latency_us is None else latency_us / 1e6)


# Methods

Family = Literal["all-reduce", "decentralized", "flexdemo"]

SCHEDULES: Mapping[str, Callable[[int], Schedule | RandomSchedule]] = {
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


# Each method has a name, a family and three functions: its seconds per iteration, InvalidArgumentError if it does not
# exist for so many nodes; the bytes that a node sends to others in an iteration, on average; and in words how close a
# step brings the nodes to their mean.


@dataclass(frozen=True)
class AllReduceMethod:
    """Data parallelism with All-Reduce, the baseline."""

    name: str = "all-reduce"
    family: Family = "all-reduce"

    def seconds(self, scenario: Scenario) -> float:
        return simulate_all_reduce(scenario, scenario.all_reduce_workload, scenario.horizon).iteration_s

    def sent_nbytes(self, scenario: Scenario) -> float:
        return crossings("all-reduce", scenario.nodes) * scenario.workload.nbytes

    def averaging(self, scenario: Scenario) -> str:  # noqa: ARG002  (as of the other methods)
        return "exact, every step"


@dataclass(frozen=True)
class DecentralizedMethod:
    """Decentralized training with a schedule of ``flexcomm.gossip``."""

    name: str
    updates: Updates = "backward"
    family: Family = "decentralized"

    def seconds(self, scenario: Scenario) -> float:
        schedule, horizon = make_schedule(self.name, scenario.nodes), scenario.horizon
        return simulate_decentralized(
            scenario, scenario.workload, schedule, updates=self.updates, horizon=horizon
        ).iteration_s

    def factors(self, scenario: Scenario) -> SpeedupFactors:
        return explain_speedup(
            scenario,
            scenario.workload,
            make_schedule(self.name, scenario.nodes),
            all_reduce_workload=scenario.all_reduce_workload,
            updates=self.updates,
            horizon=scenario.horizon,
        )

    def sent_nbytes(self, scenario: Scenario) -> float:
        schedule = make_schedule(self.name, scenario.nodes)
        steps = schedule.period or _STEPS_WITHOUT_PERIOD
        models = 0.0
        for step in range(steps):
            phase = schedule.phase(step)
            models += sum(len(group.members) * crossings("group", len(group.members)) for group in phase.groups)
            models += len(phase.edges)
        return models / steps / scenario.nodes * scenario.workload.nbytes

    def averaging(self, scenario: Scenario) -> str:
        report = make_schedule(self.name, scenario.nodes).report()
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

    def seconds(self, scenario: Scenario) -> float:
        return simulate_flexdemo(
            scenario, scenario.workload, self.compression, overlap=self.overlap, horizon=scenario.horizon
        ).iteration_s

    def sent_nbytes(self, scenario: Scenario) -> float:
        algorithm = choose_algorithm(scenario.nodes, self.compression, scenario.workload.nbytes)
        return sent_nbytes(algorithm, scenario.nodes, self.compression, scenario.workload.nbytes)

    def averaging(self, scenario: Scenario) -> str:  # noqa: ARG002  (as of the other methods)
        return f"1/{self.compression.chunk**2 / self.compression.k:.0f} of coefficients"


Method = AllReduceMethod | DecentralizedMethod | FlexDemoMethod


@lru_cache(maxsize=64)  # A schedule of thousands of nodes takes a second to build.
def make_schedule(name: str, nodes: int) -> Schedule | RandomSchedule:
    """Return the schedule of that name in ``SCHEDULES`` for ``nodes``."""
    return SCHEDULES[name](nodes)


def plan_methods(
    nodes: int,
    codec: Sequence[Compression] = (),
    *,
    schedules: Sequence[str] = (),
    updates: Updates = "backward",
    ks: Sequence[int] = (),
    overlap: bool = True,
) -> tuple[list[Method], dict[str, str]]:
    """Return the methods to compare with All-Reduce, those that average best first, and why others were skipped.

    Schedules that do not exist for so many nodes are skipped. If ``codec`` is empty, costs of compression are assumed.
    """
    unknown = [name for name in schedules if name not in SCHEDULES]
    if unknown:
        raise InvalidArgumentError(f"got --schedule {unknown[0]!r}, needed one of {', '.join(SCHEDULES)}.")
    methods: list[Method] = []
    skipped: dict[str, str] = {}
    for name in schedules:
        try:
            make_schedule(name, nodes)
        except InvalidArgumentError as error:
            skipped[name] = str(error)
        else:
            methods.append(DecentralizedMethod(name, updates))
    compressions = [compression_for_k(codec, k) for k in sorted(ks, reverse=True)]
    return [*methods, *(FlexDemoMethod(one, overlap) for one in compressions)], skipped


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


def predict_methods(scenario: Scenario, methods: Sequence[Method]) -> list[MethodPrediction]:
    """Return the prediction for All-Reduce, then one for each of ``methods``, in their order."""
    search = replace(scenario, horizon=_SEARCH_HORIZON)

    @cache  # Every search for break-even rates starts with the same ones.
    def seconds_at(method: Method, bytes_per_s: float) -> float:
        return method.seconds(search.at_bandwidth(bytes_per_s))

    all_reduce = AllReduceMethod()
    all_reduce_s = all_reduce.seconds(scenario)
    all_reduce_at = partial(seconds_at, all_reduce)
    predictions = []
    for method in (all_reduce, *methods):
        seconds, method_at = method.seconds(scenario), partial(seconds_at, method)
        predictions.append(
            MethodPrediction(
                method=method.name,
                family=method.family,
                iteration_s=seconds,
                speedup=all_reduce_s / seconds,
                sent_nbytes=method.sent_nbytes(scenario),
                averaging=method.averaging(scenario),
                break_evens=find_break_evens(method_at, all_reduce_at),
                min_speedup_break_evens=find_break_evens(method_at, all_reduce_at, speedup=MIN_SPEEDUP),
                factors=method.factors(scenario) if isinstance(method, DecentralizedMethod) else None,
            )
        )
    return predictions


@dataclass(frozen=True)
class Curve:
    """Seconds per iteration of one method over rates or numbers of nodes, without those impossible for it."""

    method: str
    family: Family
    xs: tuple[float, ...]
    seconds: tuple[float, ...]


def predict_over_bandwidth(scenario: Scenario, methods: Sequence[Method]) -> list[Curve]:
    """Return the curves of All-Reduce and ``methods`` from a hundredth to a hundred times the scenario's rate."""
    middle = math.log10(scenario.links.bytes_per_s)
    rates = [10 ** (middle + _DECADES * (2 * point / (_POINTS - 1) - 1)) for point in range(_POINTS)]
    return _make_curves(methods, {rate: scenario.at_bandwidth(rate) for rate in rates})


def predict_over_nodes(scenario: Scenario, methods: Sequence[Method], max_nodes: int) -> list[Curve]:
    """Return the curves of All-Reduce and ``methods`` on 2, 4, 8, ... nodes, and on ``max_nodes``.

    On other numbers of nodes than the scenario's, all are equally fast.
    """
    numbers = sorted({max_nodes, *(2**power for power in range(1, max_nodes.bit_length()))})
    workload, reduced = (replace(one, slowness=()) for one in (scenario.workload, scenario.all_reduce_workload))
    equal = replace(scenario, workload=workload, all_reduce_workload=reduced)
    return _make_curves(
        methods, {float(n): scenario if n == scenario.nodes else replace(equal, nodes=n) for n in numbers}
    )


def _make_curves(methods: Sequence[Method], scenarios: Mapping[float, Scenario]) -> list[Curve]:
    curves = []
    for method in (AllReduceMethod(), *methods):
        points = {}
        for x, scenario in scenarios.items():
            with suppress(InvalidArgumentError):
                points[x] = method.seconds(scenario)
        curves.append(Curve(method.name, method.family, tuple(points), tuple(points.values())))
    return curves
