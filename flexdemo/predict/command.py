"""``flexdemo predict``: options in, a table out."""

# No `from __future__ import annotations`: typer reads the options' types when it runs.

import sys
from pathlib import Path
from typing import Annotated

import typer

from flexdemo.predict.arguments import parse_bits_per_s, parse_count, parse_straggler
from flexdemo.predict.calibration import Calibration, read_calibration
from flexdemo.predict.collectives import read_collectives
from flexdemo.predict.contestants import SCHEDULES, Contestant
from flexdemo.predict.errors import PredictError
from flexdemo.predict.plot import check_plot_possible, draw_plot
from flexdemo.predict.prediction import Curve, Scene, predict_over_bandwidth, predict_over_nodes, predict_rows
from flexdemo.predict.recommendation import recommend
from flexdemo.predict.report import write_report
from flexdemo.predict.request import Request, describe_scene, given_compute, plan_contestants, plan_scene
from flexdemo.predict.tables import write_table

__all__ = ["predict"]

_KS = [128, 32, 8]

CalibrateOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Measure this cluster, write FILE and stop; run it under mpirun, torchrun or srun."
    ),
]
CalibrationOption = Annotated[Path | None, typer.Option(metavar="FILE", help="What --calibrate wrote.")]
CollectivesOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What `python -m bench collectives --json` wrote.")
]
BandwidthOption = Annotated[
    str | None, typer.Option(metavar="RATE", help="What a node's card carries each way, such as 100mbit or 25gbit.")
]
LatencyOption = Annotated[float | None, typer.Option(help="Of a message between nodes; 50 if nothing was measured.")]
NodesOption = Annotated[int | None, typer.Option(help="How many nodes; as many as were measured.")]
RanksOption = Annotated[int | None, typer.Option(help="Ranks on each node; as many as were measured, or 1.")]
ParametersOption = Annotated[str | None, typer.Option(metavar="COUNT", help="Of the model, in fp32, such as 124M.")]
ForwardOption = Annotated[float | None, typer.Option(help="The forward pass of a node.")]
BackwardOption = Annotated[float | None, typer.Option(help="The backward pass; twice the forward.")]
OptimizerOption = Annotated[float | None, typer.Option(help="The optimizer's step, mixing included; 0.")]
WorkloadOption = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="With --calibrate: what to time instead of a small transformer."),
]
SigmaOption = Annotated[
    float | None, typer.Option(help="Relative standard deviation of compute times; as measured, or 0.")
]
StragglerOption = Annotated[
    str | None, typer.Option(metavar="P:X", help="With probability P a node takes X % longer in an iteration.")
]
BucketOption = Annotated[float, typer.Option("--bucket-mb", help="MiB of a bucket.")]
KOption = Annotated[list[int], typer.Option("--k", help="FlexDeMo's k of 64 x 64; may be repeated.")]
ScheduleOption = Annotated[list[str], typer.Option(help="A schedule of decentralized training; may be repeated.")]
WholeOption = Annotated[
    bool, typer.Option("--whole/--sharded", help="Every rank holds the whole model; or FSDP does the node's legs.")
]
UpdatesOption = Annotated[str, typer.Option(help="When decentralized training steps: backward or step.")]
OverlapOption = Annotated[bool, typer.Option(help="FlexDeMo exchanges during the backward pass.")]
MostNodesOption = Annotated[int, typer.Option("--max-nodes", help="How far --plot and --json go.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything to FILE.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it into FILE (.png).")]


def predict(
    calibrate: CalibrateOption = None,
    calibration: CalibrationOption = None,
    collectives: CollectivesOption = None,
    bandwidth: BandwidthOption = None,
    latency_us: LatencyOption = None,
    nodes: NodesOption = None,
    ranks_per_node: RanksOption = None,
    parameters: ParametersOption = None,
    forward_ms: ForwardOption = None,
    backward_ms: BackwardOption = None,
    optimizer_ms: OptimizerOption = None,
    workload: WorkloadOption = None,
    sigma: SigmaOption = None,
    straggler: StragglerOption = None,
    bucket_mb: BucketOption = 25.0,
    k: KOption = _KS,
    schedule: ScheduleOption = list(SCHEDULES),  # noqa: B006  (typer copies it)
    whole: WholeOption = False,
    updates: UpdatesOption = "backward",
    overlap: OverlapOption = True,
    max_nodes: MostNodesOption = 1024,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Predict the seconds of an iteration by all-reduce, by decentralized training and by FlexDeMo, on your links.

    Measure the cluster once (--calibrate FILE, under your launcher), then ask as often as you like (--calibration
    FILE); or suppose figures (--bandwidth, --nodes, --parameters, --forward-ms).
    """
    request = Request(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        bits_per_s=None if bandwidth is None else parse_bits_per_s(bandwidth),
        latency_s=None if latency_us is None else latency_us / 1e6,
        parameters=None if parameters is None else parse_count(parameters),
        forward_s=_seconds(forward_ms),
        backward_s=_seconds(backward_ms),
        optimizer_s=_seconds(optimizer_ms),
        sigma=sigma,
        straggler=parse_straggler(straggler),
        bucket_nbytes=round(bucket_mb * 2**20),
        whole=whole,
        updates=updates,
        overlap=overlap,
        ks=tuple(k),
        schedules=tuple(schedule),
    )
    if calibrate is not None:
        _calibrate(calibrate, workload, request)
        return
    if workload is not None:
        raise PredictError("--workload is timed by --calibrate FILE: give that, too.")
    if plot is not None:
        check_plot_possible(plot)
    _predict(request, _read(calibration, collectives), max_nodes, json_file, plot)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _calibrate(file: Path, workload: str | None, request: Request) -> None:
    # Loads torch's collectives, which a prediction does not need.
    from flexdemo.predict.calibrate import calibrate

    if not file.parent.is_dir():
        raise PredictError(f"got --calibrate {file}, but there is no folder {file.parent}. Make it, or give another.")
    first, found = calibrate(file, workload, given_compute(request))
    if first:
        typer.echo(f"measured {found.nodes} nodes x {found.ranks_per_node} ranks, wrote {file}")
        if found.nodes == 1:
            typer.echo("one node has no links to measure: start one process or more on each of several nodes.")


def _read(calibration: Path | None, collectives: Path | None) -> Calibration | None:
    if calibration is not None and collectives is not None:
        raise PredictError("got --calibration and --collectives, needed one of them at most.")
    if calibration is not None:
        return read_calibration(calibration)
    return None if collectives is None else read_collectives(collectives)


def _predict(
    request: Request, measured: Calibration | None, max_nodes: int, json_file: Path | None, plot: Path | None
) -> None:
    scene = plan_scene(request, measured)
    contestants, skipped = plan_contestants(request, scene, measured)
    rows = predict_rows(scene, contestants)
    recommendation = recommend(rows)
    for line in describe_scene(scene, measured):
        typer.echo(line)
    write_table(rows, sys.stdout)
    for name, reason in skipped.items():
        typer.echo(f"skipped {name}: {reason}")
    typer.echo(recommendation.sentence)
    typer.echo("Seconds only: how much an iteration learns differs between methods, see docs/training.md.")
    if json_file is None and plot is None:
        return
    curves = _follow(scene, contestants, max_nodes)
    if json_file is not None:
        write_report(json_file, scene, rows, recommendation, skipped, curves)
    if plot is not None:
        here = (scene.links.bytes_per_s, scene.nodes)
        draw_plot(curves["over_bandwidth"], curves["over_nodes"], here, plot)


def _follow(scene: Scene, contestants: list[Contestant], max_nodes: int) -> dict[str, list[Curve]]:
    return {
        "over_bandwidth": predict_over_bandwidth(scene, contestants),
        "over_nodes": predict_over_nodes(scene, contestants, max(max_nodes, 2)),
    }
