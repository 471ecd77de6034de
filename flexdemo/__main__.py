"""The command line: ``python -m flexdemo SUBCOMMAND``, or ``flexdemo SUBCOMMAND``."""

# No `from __future__ import annotations`: typer reads the options' types when it runs.
# ruff: noqa: B008  (typer's way to give options a default)

import re
import sys
from collections.abc import Sequence
from pathlib import Path

try:
    import typer
    from typer import Option
except ModuleNotFoundError as error:
    raise SystemExit("error: the command line needs typer and rich: `pip install 'flexcomm[cli]'`.") from error

from flexcomm import BUCKET_BYTES, InvalidArgumentError
from flexdemo import predict as prediction
from flexdemo.predict import measure, report
from flexdemo.predict.calibration import Calibration, Compute, read_calibration, read_collectives, write_json
from flexdemo.runtime import Straggler, Updates

_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_BUCKET_MB, _DDP_BUCKET_MB = BUCKET_BYTES >> 20, prediction.DDP_BUCKET_BYTES >> 20

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Training over slow links."""  # A callback makes the app a group, even with one subcommand.


@app.command()
def predict(
    calibrate: Path | None = Option(None, metavar="FILE", help="Measure into FILE, under mpirun, torchrun or srun."),
    calibration: Path | None = Option(None, metavar="FILE", help="The file that --calibrate wrote."),
    collectives: Path | None = Option(None, metavar="FILE", help="That of `python -m bench collectives --json`."),
    bandwidth: str | None = Option(None, metavar="RATE", help="Of a node's network card, each way, such as 100mbit."),
    latency_us: float | None = Option(None, help="Of a message between nodes; default: 50, if not measured."),
    nodes: int | None = Option(None, help="Number of nodes; default: as measured."),
    ranks_per_node: int | None = Option(None, help="Ranks on each node; default: as measured, or 1."),
    parameters: str | None = Option(None, metavar="COUNT", help="Of the model, in fp32, such as 124M."),
    forward_ms: float | None = Option(None, help="Forward pass of a node."),
    backward_ms: float | None = Option(None, help="Backward pass; default: twice the forward pass."),
    optimizer_ms: float | None = Option(None, help="Optimizer, mixing included; default: 0."),
    workload: str | None = Option(None, metavar="MODULE:FUNCTION", help="Returns what --calibrate is to time."),
    sigma: float | None = Option(None, help="Relative deviation of compute times; default: as measured, or 0."),
    straggler: str | None = Option(None, metavar="P:X", help="With probability P a node takes X % longer."),
    bucket_mb: float | None = Option(None, help=f"MiB; default: {_BUCKET_MB}, and for all-reduce {_DDP_BUCKET_MB}."),
    k: list[int] = Option([128, 32, 8], help="Coefficients that FlexDeMo sends of each 64 x 64; may be repeated."),
    schedule: list[str] = Option(list(prediction.SCHEDULES), help="Of decentralized training; may be repeated."),
    whole: bool = Option(False, "--whole/--sharded", help="Ranks hold the whole model, or FSDP shards it in a node."),
    updates: Updates = Option("backward", help="Decentralized training steps during the backward pass, or after it."),
    overlap: bool = Option(True, help="FlexDeMo exchanges during the backward pass."),
    max_nodes: int = Option(1024, help="Largest number of nodes in --plot and --json."),
    json_file: Path | None = Option(None, "--json", metavar="FILE", help="Write inputs and results to FILE."),
    plot: Path | None = Option(None, metavar="FILE", help="Draw curves over bandwidth and nodes into FILE (.png)."),
) -> None:
    """Predict the seconds of an iteration by all-reduce, by decentralized training and by FlexDeMo, on your links.

    Measure the cluster once (--calibrate FILE, under your launcher), then predict as often as you like (--calibration
    FILE); or assume figures (--bandwidth, --nodes, --parameters, --forward-ms).
    """
    count = None if parameters is None else parse_count(parameters)
    compute = prediction.given_compute(count, forward_ms, backward_ms, optimizer_ms, sigma)
    if calibrate is not None:
        _calibrate(calibrate, workload, compute)
        return
    if workload is not None:
        raise InvalidArgumentError("--workload is timed by --calibrate FILE: give that, too.")
    if calibration is not None and collectives is not None:
        raise InvalidArgumentError("got --calibration and --collectives, needed one of them at most.")
    if plot is not None:
        report.check_plot_possible(plot)
    measured = Calibration() if calibration is None else read_calibration(calibration)
    measured = measured if collectives is None else read_collectives(collectives)
    scenario = prediction.plan_scenario(
        measured,
        compute,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        bits_per_s=None if bandwidth is None else parse_bits_per_s(bandwidth),
        latency_us=latency_us,
        parameters=count,
        sigma=sigma,
        straggler=Straggler() if straggler is None else parse_straggler(straggler),
        bucket_mb=bucket_mb,
        sharded=not whole,
    )
    methods, skipped = prediction.plan_methods(
        scenario.nodes, measured.codec, schedule, k, updates=updates, overlap=overlap
    )
    predictions = prediction.predict_methods(scenario, methods)
    method, sentence = report.recommend(predictions)
    for line in report.describe_scenario(scenario, measured):
        typer.echo(line)
    report.write_table(predictions, sys.stdout)
    for name, reason in skipped.items():
        typer.echo(f"skipped {name}: {reason}")
    typer.echo(sentence)
    typer.echo("Seconds only: how much an iteration learns differs between methods, see docs/training.md.")
    if json_file is None and plot is None:
        return
    over_bandwidth = prediction.predict_over_bandwidth(scenario, methods)
    over_nodes = prediction.predict_over_nodes(scenario, methods, max(max_nodes, 2))
    if json_file is not None:
        document = {
            "schema": "flexdemo-prediction",
            "version": 2,
            "scenario": scenario,
            "predictions": predictions,
            "recommendation": {"method": method, "sentence": sentence},
            "skipped": skipped,
            "over_bandwidth": over_bandwidth,
            "over_nodes": over_nodes,
        }
        write_json(document, json_file)
    if plot is not None:
        report.draw_plot(scenario, over_bandwidth, over_nodes, plot)


def _calibrate(file: Path, workload: str | None, compute: Compute | None) -> None:
    if not file.parent.is_dir():
        raise InvalidArgumentError(f"got --calibrate {file}, but there is no folder {file.parent}: make it.")
    is_first, measured = measure.calibrate(file, workload, compute)
    if is_first:
        typer.echo(f"measured {measured.nodes} nodes x {measured.ranks_per_node} ranks, wrote {file}")
        if measured.nodes == 1:
            typer.echo("one node has no links to measure: start one process or more on each of several nodes.")


def parse_bits_per_s(text: str) -> float:
    """Return the rate of ``text`` as tc writes it: a number and ``kbit``, ``mbit`` or ``gbit``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        needed = "needed a number of kbit, mbit or gbit. Write for example 100mbit or 2.5gbit."
        raise InvalidArgumentError(f"got the rate {text!r}, {needed}")
    return float(match[1]) * report.RATE_UNITS[match[2]]


def parse_count(text: str) -> int:
    """Return a number of parameters such as 65000000, 124M or 1.3B."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmb]?)", text.strip().lower())
    count = round(float(match[1]) * _COUNT_UNITS[match[2]]) if match else 0
    if not count:
        raise InvalidArgumentError(f"got {text!r} parameters, needed a number such as 65000000, 124M or 1.3B.")
    return count


def parse_straggler(text: str) -> Straggler:
    """Return the straggler of ``P:X``: with probability P a node takes X % longer in an iteration."""
    match = re.fullmatch(r"(\d*\.?\d+):(\d*\.?\d+)%?", text.strip())
    if match is None or float(match[1]) > 1:
        raise InvalidArgumentError(f"got --straggler {text!r}, needed PROBABILITY:PERCENT, such as 0.01:50.")
    return Straggler(float(match[1]), float(match[2]) / 100)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; return the code to exit with."""
    try:
        app(sys.argv[1:] if arguments is None else list(arguments), prog_name="flexdemo")
    except InvalidArgumentError as error:
        typer.echo(f"error: {error}", err=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
