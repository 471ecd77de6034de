"""The scenario of a prediction: a cluster and a workload, from the command line's options and from measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flexcomm import BUCKET_BYTES, InvalidArgumentError
from flexdemo.predict import PredictError
from flexdemo.predict.calibration import Calibration, Compute
from flexdemo.runtime import (
    AlphaBeta,
    Cluster,
    Horizon,
    MeasuredLinks,
    Straggler,
    Workload,
    plan_workload,
)

if TYPE_CHECKING:
    from flexdemo.predict.methods import Family, Method

DDP_BUCKET_BYTES = 25 << 20
"""Default ``bucket_cap_mb=25`` of ``torch.nn.parallel.DistributedDataParallel``."""

_ELEMENT_NBYTES = 4
_LATENCY_S = 50e-6
_BACKWARD_OVER_FORWARD = 2.0
_HORIZON = Horizon(iterations=80, warmup=20)


@dataclass(frozen=True)
class PredictOptions:
    """The options of the command line in base units; None where an option was not given."""

    nodes: int | None = None
    ranks_per_node: int | None = None
    bits_per_s: float | None = None
    latency_s: float | None = None
    parameters: int | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    sigma: float | None = None
    straggler: Straggler = Straggler()  # noqa: RUF009  (frozen)
    bucket_nbytes: int | None = None
    sharded: bool = True
    updates: str = "backward"
    overlap: bool = True
    ks: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """Everything that a prediction is computed from; All-Reduce's workload is in the buckets of DDP."""

    nodes: int
    links: AlphaBeta | MeasuredLinks
    workload: Workload
    all_reduce_workload: Workload
    ranks_per_node: int = 1
    horizon: Horizon = _HORIZON

    @property
    def cluster(self) -> Cluster:
        """The nodes and links, as the runtime model takes them."""
        return Cluster(self.nodes, self.links, self.ranks_per_node)

    def workload_of(self, family: Family) -> Workload:
        """Return the workload in the buckets that a family of methods uses."""
        return self.all_reduce_workload if family == "all-reduce" else self.workload

    def seconds(self, method: Method) -> float:
        """Return the seconds per iteration by ``method``."""
        return method.seconds(self.cluster, self.workload_of(method.family), self.horizon)

    def at_bandwidth(self, bytes_per_s: float) -> Scenario:
        """Return the same scenario with another rate between nodes."""
        return replace(self, links=self.links.at_bandwidth(bytes_per_s))

    def with_nodes(self, nodes: int) -> Scenario:
        """Return the same scenario with another number of nodes, all equally fast."""
        if nodes == self.nodes:
            return self
        workload, reduced = (replace(one, slowness=()) for one in (self.workload, self.all_reduce_workload))
        return replace(self, nodes=nodes, workload=workload, all_reduce_workload=reduced)


def plan_scenario(options: PredictOptions, measured: Calibration | None) -> Scenario:
    """Return the scenario; an option takes precedence over a measurement, and something must give each number."""
    compute = _choose_compute(options, measured)
    nodes = options.nodes or (measured.nodes if measured else 0)
    if nodes < 2:
        raise PredictError(f"got {nodes or 'no number of'} nodes, needed 2 or more: give --nodes.")

    def plan(default_bucket_nbytes: int) -> Workload:
        return plan_workload(
            compute.model_nbytes,
            bucket_nbytes=default_bucket_nbytes if options.bucket_nbytes is None else options.bucket_nbytes,
            forward_s=compute.forward_s,
            backward_s=compute.backward_s,
            optimizer_s=compute.optimizer_s,
            sigma=compute.sigma if options.sigma is None else options.sigma,
            slowness=compute.slowness if len(compute.slowness) == nodes else (),
            straggler=options.straggler,
            sharded=options.sharded,
        )

    try:
        scenario = Scenario(
            nodes=nodes,
            links=_choose_links(options, measured),
            workload=plan(BUCKET_BYTES),
            all_reduce_workload=plan(DDP_BUCKET_BYTES),
            ranks_per_node=options.ranks_per_node or (measured.ranks_per_node if measured else 1),
        )
        # Checks its numbers here, where an error can still name what was given.
        _ = scenario.cluster
    except InvalidArgumentError as error:
        raise PredictError(str(error)) from error
    return scenario


def given_compute(options: PredictOptions) -> Compute | None:
    """Return the compute times in ``options``, None if there are none."""
    if options.forward_s is None:
        if options.backward_s is not None or options.optimizer_s is not None:
            raise PredictError("got compute times without --forward-ms: give that, too.")
        return None
    if options.parameters is None:
        raise PredictError("got --forward-ms without --parameters: give the size of the model it belongs to.")
    backward_s = _BACKWARD_OVER_FORWARD * options.forward_s if options.backward_s is None else options.backward_s
    return Compute(
        name="as given",
        model_nbytes=_ELEMENT_NBYTES * options.parameters,
        forward_s=options.forward_s,
        backward_s=backward_s,
        optimizer_s=options.optimizer_s or 0.0,
        sigma=options.sigma or 0.0,
    )


def _choose_compute(options: PredictOptions, measured: Calibration | None) -> Compute:
    given = given_compute(options)
    if given is not None:
        return given
    if measured is None or measured.compute is None:
        raise PredictError(
            "no compute times: give --parameters 124M --forward-ms 40 (and --backward-ms, --optimizer-ms), or a "
            "--calibration that `flexdemo predict --calibrate FILE` wrote."
        )
    measured_parameters = measured.compute.model_nbytes // _ELEMENT_NBYTES
    if options.parameters not in (None, measured_parameters):
        raise PredictError(
            f"got --parameters {options.parameters}, but the measured times are those of a model of "
            f"{measured_parameters}: give --forward-ms and --backward-ms of yours, or calibrate with --workload."
        )
    return measured.compute


def _choose_links(options: PredictOptions, measured: Calibration | None) -> AlphaBeta | MeasuredLinks:
    if measured is not None and any(table.link != "intra" for table in measured.links):
        if options.latency_s is not None:
            raise PredictError("got --latency-us beside measured links, which have their own: leave one of them out.")
        links = MeasuredLinks(measured.links)
        return links if options.bits_per_s is None else links.at_bandwidth(options.bits_per_s / 8)
    if options.bits_per_s is None:
        raise PredictError(
            "no links: give --bandwidth 1gbit, or a --calibration or --collectives that was measured on two nodes or "
            "more."
        )
    return AlphaBeta(options.bits_per_s / 8, _LATENCY_S if options.latency_s is None else options.latency_s)
