"""``flexdemo predict``: the command line, from options to a table."""

# No `from __future__ import annotations`: typer reads the options' types when it runs.

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from flexcomm import BUCKET_BYTES, InvalidArgumentError
from flexdemo.predict import PredictError
from flexdemo.predict.calibration import Calibration, read_calibration, read_collectives
from flexdemo.predict.methods import (
    SCHEDULES,
    plan_methods,
    predict_methods,
    predict_over_bandwidth,
    predict_over_nodes,
)
from flexdemo.predict.report import (
    RATE_UNITS,
    check_plot_possible,
    describe_scenario,
    draw_plot,
    recommend,
    write_json,
    write_table,
)
from flexdemo.predict.scenario import DDP_BUCKET_BYTES, PredictOptions, given_compute, plan_scenario
from flexdemo.runtime import Straggler

_KS = [128, 32, 8]
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_BUCKET_HELP = (
    f"MiB of a bucket; default: flexdemo's {BUCKET_BYTES >> 20}, and DDP's {DDP_BUCKET_BYTES >> 20} for all-reduce."
)

CalibrateOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Measure this cluster, write FILE and stop; run it under mpirun, torchrun or srun."
    ),
]
CalibrationOption = Annotated[Path | None, typer.Option(metavar="FILE", help="The file that --calibrate wrote.")]
CollectivesOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The file that `python -m bench collectives --json` wrote.")
]
BandwidthOption = Annotated[
    str | None, typer.Option(metavar="RATE", help="Of a node's network card, each way, such as 100mbit or 25gbit.")
]
LatencyOption = Annotated[float | None, typer.Option(help="Of a message between nodes; default: 50, if not measured.")]
NodesOption = Annotated[int | None, typer.Option(help="Number of nodes; default: as measured.")]
RanksOption = Annotated[int | None, typer.Option(help="Ranks on each node; default: as measured, or 1.")]
ParametersOption = Annotated[
    str | None, typer.Option(metavar="COUNT", help="Number of fp32 parameters of the model, such as 124M.")
]
ForwardOption = Annotated[float | None, typer.Option(help="Forward pass of a node.")]
BackwardOption = Annotated[float | None, typer.Option(help="Backward pass; default: twice the forward pass.")]
OptimizerOption = Annotated[float | None, typer.Option(help="Optimizer, mixing included; default: 0.")]
WorkloadOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION", help="With --calibrate: returns the workload to time; default: a small transformer."
    ),
]
SigmaOption = Annotated[
    float | None, typer.Option(help="Relative standard deviation of compute times; default: as measured, or 0.")
]
StragglerOption = Annotated[
    str | None, typer.Option(metavar="P:X", help="With probability P a node takes X % longer in an iteration.")
]
BucketOption = Annotated[
    float | None,
    typer.Option("--bucket-mb", help=_BUCKET_HELP),
]
KOption = Annotated[
    list[int], typer.Option("--k", help="Coefficients that FlexDeMo sends of each 64 x 64; may be repeated.")
]
ScheduleOption = Annotated[list[str], typer.Option(help="A schedule of decentralized training; may be repeated.")]
WholeOption = Annotated[
    bool, typer.Option("--whole/--sharded", help="Every rank holds the whole model; or FSDP shards it inside a node.")
]
UpdatesOption = Annotated[
    str, typer.Option(help="Decentralized training steps during the backward pass, or after it: backward or step.")
]
OverlapOption = Annotated[bool, typer.Option(help="FlexDeMo exchanges during the backward pass.")]
MaxNodesOption = Annotated[int, typer.Option("--max-nodes", help="Largest number of nodes in --plot and --json.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write inputs and results to FILE.")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw curves over bandwidth and nodes into FILE (.png).")
]


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
    bucket_mb: BucketOption = None,
    k: KOption = _KS,
    schedule: ScheduleOption = list(SCHEDULES),  # noqa: B006  (typer copies it)
    whole: WholeOption = False,
    updates: UpdatesOption = "backward",
    overlap: OverlapOption = True,
    max_nodes: MaxNodesOption = 1024,
    json_file: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Predict the seconds of an iteration by all-reduce, by decentralized training and by FlexDeMo, on your links.

    Measure the cluster once (--calibrate FILE, under your launcher), then predict as often as you like (--calibration
    FILE); or assume figures (--bandwidth, --nodes, --parameters, --forward-ms).
    """
    options = PredictOptions(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        bits_per_s=None if bandwidth is None else parse_bits_per_s(bandwidth),
        latency_s=None if latency_us is None else latency_us / 1e6,
        parameters=None if parameters is None else parse_count(parameters),
        forward_s=None if forward_ms is None else forward_ms / 1e3,
        backward_s=None if backward_ms is None else backward_ms / 1e3,
        optimizer_s=None if optimizer_ms is None else optimizer_ms / 1e3,
        sigma=sigma,
        straggler=Straggler() if straggler is None else parse_straggler(straggler),
        bucket_nbytes=None if bucket_mb is None else round(bucket_mb * 2**20),
        sharded=not whole,
        updates=updates,
        overlap=overlap,
        ks=tuple(k),
        schedules=tuple(schedule),
    )
    if calibrate is not None:
        _calibrate(calibrate, workload, options)
        return
    if workload is not None:
        raise PredictError("--workload is timed by --calibrate FILE: give that, too.")
    if plot is not None:
        check_plot_possible(plot)
    _predict(options, _read_measurements(calibration, collectives), max(max_nodes, 2), json_file, plot)


def _calibrate(file: Path, workload: str | None, options: PredictOptions) -> None:
    # Loads torch's collectives, which a prediction does not need.
    from flexdemo.predict.measure import calibrate

    if not file.parent.is_dir():
        raise PredictError(f"got --calibrate {file}, but there is no folder {file.parent}. Make it, or give another.")
    is_first, measured = calibrate(file, workload, given_compute(options))
    if is_first:
        typer.echo(f"measured {measured.nodes} nodes x {measured.ranks_per_node} ranks, wrote {file}")
        if measured.nodes == 1:
            typer.echo("one node has no links to measure: start one process or more on each of several nodes.")


def _read_measurements(calibration: Path | None, collectives: Path | None) -> Calibration | None:
    if calibration is not None and collectives is not None:
        raise PredictError("got --calibration and --collectives, needed one of them at most.")
    if calibration is not None:
        return read_calibration(calibration)
    return None if collectives is None else read_collectives(collectives)


def _predict(
    options: PredictOptions, measured: Calibration | None, max_nodes: int, json_file: Path | None, plot: Path | None
) -> None:
    scenario = plan_scenario(options, measured)
    methods, skipped = plan_methods(options, scenario.nodes, measured.codec if measured else ())
    predictions = predict_methods(scenario, methods)
    recommendation = recommend(predictions)
    for line in describe_scenario(scenario, measured):
        typer.echo(line)
    write_table(predictions, sys.stdout)
    for name, reason in skipped.items():
        typer.echo(f"skipped {name}: {reason}")
    typer.echo(recommendation.sentence)
    typer.echo("Seconds only: how much an iteration learns differs between methods, see docs/training.md.")
    if json_file is None and plot is None:
        return
    over_bandwidth = predict_over_bandwidth(scenario, methods)
    over_nodes = predict_over_nodes(scenario, methods, max_nodes)
    if json_file is not None:
        write_json(
            json_file,
            scenario=scenario,
            predictions=predictions,
            recommendation=recommendation,
            skipped=skipped,
            over_bandwidth=over_bandwidth,
            over_nodes=over_nodes,
        )
    if plot is not None:
        draw_plot(over_bandwidth, over_nodes, bytes_per_s=scenario.links.bytes_per_s, nodes=scenario.nodes, file=plot)


def parse_bits_per_s(text: str) -> float:
    """Return the rate of ``text`` as tc writes it: a number and ``kbit``, ``mbit`` or ``gbit``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise PredictError(
            f"got the rate {text!r}, needed a number above 0 with a unit, one of kbit, mbit, gbit (bits per second). "
            f"Write for example 100mbit or 2.5gbit."
        )
    return float(match[1]) * RATE_UNITS[match[2]]


def parse_count(text: str) -> int:
    """Return a number of parameters such as 65000000, 124M or 1.3B."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmb]?)", text.strip().lower())
    if match is None or not round(float(match[1]) * _COUNT_UNITS[match[2]]):
        raise PredictError(f"got {text!r} parameters, needed a number such as 65000000, 124M or 1.3B.")
    return round(float(match[1]) * _COUNT_UNITS[match[2]])


def parse_straggler(text: str) -> Straggler:
    """Return the straggler of ``P:X``: with probability P a node takes X % longer in an iteration."""
    match = re.fullmatch(r"(\d*\.?\d+):(\d*\.?\d+)%?", text.strip())
    if match is None:
        raise PredictError(
            f"got --straggler {text!r}, needed PROBABILITY:PERCENT, such as 0.01:50: in one of a hundred iterations a "
            f"node takes 50 % longer."
        )
    try:
        return Straggler(float(match[1]), float(match[2]) / 100)
    except InvalidArgumentError as error:
        raise PredictError(f"got --straggler {text!r}: {error}") from error
