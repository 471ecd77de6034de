"""``flexdemo predict``: the scenario, the methods that are compared, and the predictions for them.

``measure`` measures a cluster and writes the file of ``calibration``; ``report`` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Literal

import numpy as np

from flexcomm import BUCKET_BYTES, InvalidArgumentError, gossip
from flexcomm.gossip import RandomSchedule, Schedule
from flexdemo import runtime
from flexdemo.predict.calibration import Calibration, Compute, compression_for_k
from flexdemo.runtime import Horizon, Updates, Workload
from flexdemo.runtime.inputs import crossings

DDP_BUCKET_BYTES = 25 << 20
"""Default ``bucket_cap_mb=25`` of ``torch.nn.parallel.DistributedDataParallel``."""

_ELEMENT_NBYTES = 4
_LATENCY_S = 50e-6
_HORIZON = Horizon(iterations=80, warmup=20)


@dataclass(frozen=True, kw_only=True)
class Scenario(runtime.Cluster):
    """A cluster and the workload of a node; All-Reduce's workload is in the buckets of DDP."""

    links: runtime.AlphaBeta | runtime.MeasuredLinks
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
    backward_s = 2 * forward_s if backward_ms is None else backward_ms / 1e3
    return Compute("as given", _ELEMENT_NBYTES * parameters, forward_s, backward_s, optimizer_s, sigma or 0.0)


def plan_scenario(
    measured: Calibration,
    compute: Compute | None = None,
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    bits_per_s: float | None = None,
    latency_us: float | None = None,
    parameters: int | None = None,
    sigma: float | None = None,
    straggler: runtime.Straggler = runtime.Straggler(),  # noqa: B008  (frozen)
    bucket_mb: float | None = None,
    sharded: bool = True,
) -> Scenario:
    """Return the scenario; what is given takes precedence over a measurement, and something must give each number."""
    if compute is None:
        compute = _measured_compute(measured, parameters)
    nodes = nodes or measured.nodes
    if nodes < 2:
        raise InvalidArgumentError(f"got {nodes or 'no number of'} nodes, needed 2 or more: give --nodes.")
    workload, all_reduce_workload = (
        runtime.plan_workload(
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
        ranks_per_node=ranks_per_node or measured.ranks_per_node,
        links=_choose_links(measured, bits_per_s, latency_us),
        workload=workload,
        all_reduce_workload=all_reduce_workload,
    )


def _measured_compute(measured: Calibration, parameters: int | None) -> Compute:
    if measured.compute is None:
        raise InvalidArgumentError(
            "no compute times: give --parameters and --forward-ms, or a --calibration with some."
        )
    measured_parameters = measured.compute.model_nbytes // _ELEMENT_NBYTES
    if parameters not in (None, measured_parameters):
        raise InvalidArgumentError(
            f"got --parameters {parameters}, but the measured times are those of a model of "
            f"{measured_parameters}: give --forward-ms and --backward-ms of yours, or calibrate with --workload."
        )
    return measured.compute


def _choose_links(
    measured: Calibration, bits_per_s: float | None, latency_us: float | None
) -> runtime.AlphaBeta | runtime.MeasuredLinks:
    if any(table.link != "intra" for table in measured.links):
        if latency_us is not None:
            raise InvalidArgumentError("got --latency-us beside measured links, which have their own: leave one out.")
        links = runtime.MeasuredLinks(measured.links)
        return links if bits_per_s is None else links.at_bandwidth(bits_per_s / 8)
    if bits_per_s is None:
        raise InvalidArgumentError("no links: give --bandwidth 1gbit, or a file that two nodes or more measured.")
    return runtime.AlphaBeta(bits_per_s / 8, _LATENCY_S if latency_us is None else latency_us / 1e6)


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

# Each method has a name, a family and three functions: its seconds per iteration, InvalidArgumentError if it does not
# exist for so many nodes; the bytes that a node sends to others in an iteration, on average; and in words how close a
# step brings the nodes to their mean.


@dataclass(frozen=True)
class AllReduceMethod:
    """Data parallelism with All-Reduce, the baseline."""

    name: str = "all-reduce"
    family: Family = "all-reduce"

    def seconds(self, scenario: Scenario) -> float:
        return runtime.simulate_all_reduce(scenario, scenario.all_reduce_workload, scenario.horizon).iteration_s

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
        schedule = make_schedule(self.name, scenario.nodes)
        return runtime.simulate_decentralized(
            scenario, scenario.workload, schedule, updates=self.updates, horizon=scenario.horizon
        ).iteration_s

    def factors(self, scenario: Scenario) -> runtime.SpeedupFactors:
        schedule, all_reduce_workload = make_schedule(self.name, scenario.nodes), scenario.all_reduce_workload
        return runtime.explain_speedup(
            scenario, scenario.workload, schedule, all_reduce_workload, updates=self.updates, horizon=scenario.horizon
        )

    def sent_nbytes(self, scenario: Scenario) -> float:
        schedule = make_schedule(self.name, scenario.nodes)
        # A schedule without a period sends about as much in one step as in another.
        phases = [schedule.phase(step) for step in range(schedule.period or 4)]
        sizes = [len(group.members) for phase in phases for group in phase.groups]
        models = sum(size * crossings("group", size) for size in sizes) + sum(len(phase.edges) for phase in phases)
        return models / len(phases) / scenario.nodes * scenario.workload.nbytes

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

    compression: runtime.Compression
    overlap: bool = True
    family: Family = "flexdemo"

    @property
    def name(self) -> str:
        return f"flexdemo k={self.compression.k}"

    def seconds(self, scenario: Scenario) -> float:
        return runtime.simulate_flexdemo(
            scenario, scenario.workload, self.compression, overlap=self.overlap, horizon=scenario.horizon
        ).iteration_s

    def sent_nbytes(self, scenario: Scenario) -> float:
        inputs = scenario.nodes, self.compression, scenario.workload.nbytes
        return runtime.sent_nbytes(runtime.choose_algorithm(*inputs), *inputs)

    def averaging(self, scenario: Scenario) -> str:  # noqa: ARG002  (as of the other methods)
        return f"1/{self.compression.chunk**2 / self.compression.k:.0f} of coefficients"


Method = AllReduceMethod | DecentralizedMethod | FlexDemoMethod


@lru_cache(maxsize=64)  # A schedule of thousands of nodes takes a second to build.
def make_schedule(name: str, nodes: int) -> Schedule | RandomSchedule:
    return SCHEDULES[name](nodes)


def plan_methods(
    nodes: int,
    codec: Sequence[runtime.Compression] = (),
    schedules: Sequence[str] = (),
    ks: Sequence[int] = (),
    *,
    updates: Updates = "backward",
    overlap: bool = True,
) -> tuple[list[Method], dict[str, str]]:
    """Return the methods to compare with All-Reduce, and why schedules that do not exist for so many nodes are skipped.

    If ``codec`` is empty, costs of compression are assumed.
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
    methods += [FlexDemoMethod(compression_for_k(codec, k), overlap) for k in sorted(ks, reverse=True)]
    return methods, skipped


# Predictions

MIN_SPEEDUP = 1.05
"""Smaller speedups do not count: predictions are accurate to a few per cent."""

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
    break_evens: tuple[runtime.BreakEven, ...] = ()
    min_speedup_break_evens: tuple[runtime.BreakEven, ...] = ()
    factors: runtime.SpeedupFactors | None = None


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
                break_evens=runtime.find_break_evens(method_at, all_reduce_at),
                min_speedup_break_evens=runtime.find_break_evens(method_at, all_reduce_at, speedup=MIN_SPEEDUP),
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
    rates = scenario.links.bytes_per_s * np.logspace(-2, 2, 17)
    return _make_curves(methods, {rate: scenario.at_bandwidth(rate) for rate in rates.tolist()})


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
