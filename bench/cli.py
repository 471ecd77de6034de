"""The command line: ``python -m bench SUBCOMMAND``."""

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import FrameType

import bench
from bench.errors import BenchError

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit(
        "error: the benchmarks need typer and rich: `pip install '.[cli]'`, or `make demo`, in the checkout."
    ) from error


@dataclass(frozen=True)
class Subcommand:
    """A function ``function`` in ``module``, imported only when it is called: many subcommands load torch."""

    name: str
    module: str
    function: str
    summary: str


SUBCOMMANDS = (
    Subcommand(
        "demo", "bench.demo.command", "demo", "A small GPT trained over slow links, by AdamW and by our methods."
    ),
    Subcommand("cluster", "bench.cluster.command", "cluster", "Run a command on an emulated cluster of slow links."),
    Subcommand("transport", "bench.transport", "transport", "Latency and overlap of the transport between nodes."),
    Subcommand(
        "collectives", "bench.collectives.command", "collectives", "Averaging a tensor, by size and compressor."
    ),
    Subcommand("sync", "bench.sync", "sync", "The cost of a synchronisation beside its bytes."),
    Subcommand("step", "bench.step.command", "step", "The communication of one optimizer step, beside that of others."),
    Subcommand(
        "optimizer",
        "bench.optimizer.command",
        "optimizer",
        "The cost of a step of FlexDeMo, beside AdamW and detonation.",
    ),
    Subcommand("mixing", "bench.mixing.command", "mixing", "The processor time of mixing, beside decent-dp."),
    Subcommand("train", "bench.train.command", "train", "Train a small GPT by several methods, beside AdamW."),
    Subcommand(
        "decentralized",
        "bench.decentralized",
        "decentralized",
        "Train a small GPT by decentralized Adam, beside All-Reduce.",
    ),
    Subcommand(
        "sweep", "bench.collectives.sweep", "sweep", "`collectives` on emulated clusters of several sizes and rates."
    ),
    Subcommand(
        "runtime", "bench.runtime.command", "runtime", "Iteration times, predicted and measured on emulated clusters."
    ),
    Subcommand("report", "bench.report", "report", "Measure what docs/benchmarks.md shows, and write it there."),
    Subcommand("codec", "bench.codec.command", "codec", "Speed, bits, memory and error of compression."),
    Subcommand(
        "first-use", "bench.first_use", "first_use", "The first synchronisation of a process, compiling or not."
    ),
    Subcommand("startup", "bench.startup", "startup", "The time that importing the library takes."),
)


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the command line; only the subcommand that ``arguments`` name is loaded, the others are listed."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, help=bench.__doc__)
    app.callback()(_always_a_group)
    # Options end at the first word of a rank's command, so that `-- python train.py --lr 3` needs no quoting.
    settings = {"allow_interspersed_args": False}
    for sub in SUBCOMMANDS:
        is_called = sub.name in arguments[:1]
        body = getattr(import_module(sub.module), sub.function) if is_called else _not_loaded
        app.command(sub.name, help=None if is_called else sub.summary, context_settings=settings)(body)
    return app


def main(arguments: Sequence[str]) -> int:
    """Run one subcommand; return the code to exit with."""
    try:
        build_app(arguments)(arguments, prog_name="python -m bench")
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _always_a_group() -> None:
    """Have the first word name a subcommand, even if there is just one."""


def _not_loaded() -> None:
    raise AssertionError("only the subcommand that is called is loaded")


def exit_on_signals() -> None:
    """Turn the first signal into an orderly exit, and ignore those that come while we clean up."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # One that we were started with as ignored (nohup, a shell's background job) stays ignored.
    handled = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]

    def leave(number: int, _frame: FrameType | None) -> None:
        for other in handled:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in handled:
        signal.signal(number, leave)
