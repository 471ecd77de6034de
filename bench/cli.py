"""The command line: ``python -m bench SUBCOMMAND``."""

import signal
import sys
from collections.abc import Sequence
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


SUBCOMMANDS = {
    "demo": ("bench.demo.command", "A small GPT trained over slow links, by AdamW and by our methods."),
    "cluster": ("bench.cluster.command", "Run a command on an emulated cluster of slow links."),
    "transport": ("bench.transport", "Latency and overlap of the transport between nodes."),
    "collectives": ("bench.collectives.command", "Averaging a tensor, by size and compressor."),
    "sync": ("bench.sync", "The cost of a synchronisation beside its bytes."),
    "step": ("bench.step.command", "The communication of one optimizer step, beside that of others."),
    "optimizer": ("bench.optimizer.command", "The cost of a step of FlexDeMo, beside AdamW and detonation."),
    "mixing": ("bench.mixing.command", "The processor time of mixing, beside decent-dp."),
    "train": ("bench.train.command", "Train a small GPT by several methods, beside AdamW."),
    "decentralized": ("bench.decentralized", "Train a small GPT by decentralized Adam, beside All-Reduce."),
    "sweep": ("bench.collectives.sweep", "`collectives` on emulated clusters of several sizes and rates."),
    "runtime": ("bench.runtime.command", "Iteration times, predicted and measured on emulated clusters."),
    "report": ("bench.report", "Measure what docs/benchmarks.md shows, and write it there."),
    "codec": ("bench.codec.command", "Speed, bits, memory and error of compression."),
    "gpu": ("bench.gpu.command", "What the first machine with GPUs shows; `gpu count`: kernels counted without one."),
    "first-use": ("bench.first_use", "The first synchronisation of a process, compiling or not."),
    "startup": ("bench.startup", "The time that importing the library takes."),
}
"""The module of each subcommand, with a function of its name, and a summary."""


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the command line; only the subcommand that ``arguments`` name is loaded: many of them load torch."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, help=bench.__doc__)
    # Options end at the first word of a rank's command, so that `-- python train.py --lr 3` needs no quoting.
    settings = {"allow_interspersed_args": False}
    for name, (module, summary) in SUBCOMMANDS.items():
        is_called = name in arguments[:1]
        body = getattr(import_module(module), name.replace("-", "_")) if is_called else _not_loaded
        app.command(name, help=None if is_called else summary, context_settings=settings)(body)
    return app


def main(arguments: Sequence[str]) -> int:
    """Run one subcommand; return the code to exit with."""
    try:
        build_app(arguments)(arguments, prog_name="python -m bench")
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


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
