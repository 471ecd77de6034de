"""From what was asked for, and what was measured, to what is predicted; what is missing is an error that says so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from flexdemo.predict.arguments import format_bits_per_s, format_seconds
from flexdemo.predict.calibration import Compute
from flexdemo.predict.codec import SUPPOSED, for_k
from flexdemo.predict.contestants import Contestant, DecentralizedMethod, FlexDemo, choose_schedules
from flexdemo.predict.errors import PredictError
from flexdemo.predict.prediction import Scene
from flexdemo.runtime import AlphaBeta, MeasuredLinks, ModelError, Straggler, Updates, plan_workload

if TYPE_CHECKING:
    from flexdemo.predict.calibration import Calibration

__all__ = ["Request", "describe_scene", "given_compute", "plan_contestants", "plan_scene"]

_ELEMENT_NBYTES = 4
_LATENCY_S = 50e-6
_BACKWARD_OVER_FORWARD = 2.0


@dataclass(frozen=True)
class Request:
    """What the command line said, in base units; None where it said nothing."""

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
    bucket_nbytes: int = 25 * 2**20
    whole: bool = False
    updates: str = "backward"
    overlap: bool = True
    ks: tuple[int, ...] = (128, 32, 8)
    schedules: tuple[str, ...] = ()


def given_compute(request: Request) -> Compute | None:
    """Return the compute times that were given, or None where none were."""
    if request.forward_s is None:
        if request.backward_s is not None or request.optimizer_s is not None:
            raise PredictError("got compute times without --forward-ms: give that, too.")
        return None
    if request.parameters is None:
        raise PredictError("got --forward-ms without --parameters: give the size of the model it belongs to.")
    backward_s = _BACKWARD_OVER_FORWARD * request.forward_s if request.backward_s is None else request.backward_s
    return Compute(
        name="as given",
        model_nbytes=_ELEMENT_NBYTES * request.parameters,
        forward_s=request.forward_s,
        backward_s=backward_s,
        optimizer_s=request.optimizer_s or 0.0,
        sigma=request.sigma or 0.0,
    )


def plan_scene(request: Request, measured: Calibration | None) -> Scene:
    """Return the cluster and the workload to predict for; what is given counts more than what was measured."""
    compute = _choose_compute(request, measured)
    nodes = request.nodes or (measured.nodes if measured else 0)
    if nodes < 2:
        raise PredictError(f"got {nodes or 'no number of'} nodes, needed 2 or more: give --nodes.")
    try:
        workload = plan_workload(
            compute.model_nbytes,
            bucket_nbytes=request.bucket_nbytes,
            forward_s=compute.forward_s,
            backward_s=compute.backward_s,
            optimizer_s=compute.optimizer_s,
            sigma=compute.sigma if request.sigma is None else request.sigma,
            straggler=request.straggler,
            sharded=not request.whole,
        )
        scene = Scene(
            nodes=nodes,
            links=_choose_links(request, measured),
            workload=replace(workload, slowness=compute.slowness if len(compute.slowness) == nodes else ()),
            ranks_per_node=request.ranks_per_node or (measured.ranks_per_node if measured else 1),
        )
        scene.cluster()
    except ModelError as error:
        raise PredictError(str(error)) from error
    return scene


def _choose_compute(request: Request, measured: Calibration | None) -> Compute:
    given = given_compute(request)
    if given is not None:
        return given
    if measured is None or measured.compute is None:
        raise PredictError(
            "no compute times: give --parameters 124M --forward-ms 40 (and --backward-ms, --optimizer-ms), or a "
            "--calibration that `flexdemo predict --calibrate FILE` wrote."
        )
    if request.parameters not in (None, measured.compute.model_nbytes // _ELEMENT_NBYTES):
        raise PredictError(
            f"got --parameters {request.parameters}, but the times measured are those of a model of "
            f"{measured.compute.model_nbytes // _ELEMENT_NBYTES}: give --forward-ms and --backward-ms of yours, or "
            f"calibrate with --workload."
        )
    return measured.compute


def _choose_links(request: Request, measured: Calibration | None) -> AlphaBeta | MeasuredLinks:
    between = measured is not None and any(table.link != "intra" for table in measured.links)
    if measured is not None and between:
        if request.latency_s is not None:
            raise PredictError("got --latency-us beside measured links, which have their own: leave one of them out.")
        links = MeasuredLinks(measured.links)
        return links if request.bits_per_s is None else links.at_bandwidth(request.bits_per_s / 8)
    if request.bits_per_s is None:
        raise PredictError(
            "no links: give --bandwidth 1gbit, or a --calibration or --collectives that was measured on two nodes or "
            "more."
        )
    return AlphaBeta(request.bits_per_s / 8, _LATENCY_S if request.latency_s is None else request.latency_s)


def plan_contestants(
    request: Request, scene: Scene, measured: Calibration | None
) -> tuple[list[Contestant], dict[str, str]]:
    """Return the methods, best averaging first, and why some of those asked for are left out."""
    updates = next((one for one in get_args(Updates) if one == request.updates), None)
    if updates is None:
        raise PredictError(f"got --updates {request.updates!r}, needed one of {', '.join(get_args(Updates))}.")
    names, skipped = choose_schedules(request.schedules, scene.nodes)
    codec = measured.codec if measured else ()
    try:
        packed = [FlexDemo(for_k(codec, k), request.overlap) for k in sorted(request.ks, reverse=True)]
    except ModelError as error:
        raise PredictError(f"got --k {', '.join(map(str, request.ks))}: {error}") from error
    return [*(DecentralizedMethod(name, updates) for name in names), *packed], skipped


def describe_scene(scene: Scene, measured: Calibration | None) -> list[str]:
    """Return the lines above the table: everything that was supposed."""
    load = scene.workload
    times = " + ".join(format_seconds(each) for each in (load.forward_s, sum(load.backward_s), sum(load.optimizer_s)))
    how = "supposed"
    if isinstance(scene.links, MeasuredLinks):
        there = format_bits_per_s(8 * scene.links.fitted.bytes_per_s)
        how = "measured" if scene.links.requested is None else f"carried over from {there}, measured"
    rate = f"{format_bits_per_s(8 * scene.links.bytes_per_s)} each way between nodes ({how})"
    buckets = f"{load.nbytes / 1e6:.4g} MB in {len(load.bucket_nbytes)} buckets"
    lines = [
        f"{scene.nodes} nodes x {scene.ranks_per_node} ranks, {rate}; {buckets}",
        f"forward + backward + optimizer: {times} ms, varying by {100 * load.sigma:.3g} %",
    ]
    late = load.straggler
    if late.probability > 0:
        lines.append(
            f"in {100 * late.probability:.3g} % of its iterations a node is {100 * late.slowdown:.3g} % slower"
        )
    if measured is None or not measured.codec:
        lines.append(
            f"compression was not measured: {1e9 * SUPPOSED.encode_s_per_element:.3g} ns to encode an element, "
            f"{1e9 * SUPPOSED.decode_s_per_element:.3g} ns to decode one and "
            f"{1e9 * SUPPOSED.decode_s_per_coefficient:.3g} ns for each coefficient received are supposed"
        )
    return lines
