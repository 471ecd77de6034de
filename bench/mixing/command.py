"""``python -m bench mixing``: the processor time of decentralized training beside training and communication.

Ranks as nodes of this host train one model by torch's AdamW alone, by ``DecentralizedAdam`` and by ``decent-dp``,
interleaved, in the same processes. From the processor time of each method, that of training with the same bytes merely
sent, by the same calls and waited for one step later, is subtracted: the rest is mixing, copying, bookkeeping.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.cluster.launchers import run_on_loopback
from bench.common_options import CheckOption, JsonOption, QuickOption, Report, check_count, conclude
from bench.errors import BenchError
from bench.tables import print_table

FIGURES = frozenset({"overhead_of_decent_dp", "main_thread_of_decent_dp"})
_QUICK_ROUNDS = 3


def mixing(
    nodes: Annotated[int, typer.Option(help="How many ranks, each a node: 2, or another power of two.")] = 2,
    rounds: Annotated[int, typer.Option("-n", "--iterations", help="Rounds; each method runs once per round.")] = 11,
    width: Annotated[int, typer.Option(help="Width of the model: 4 layers of width x 4 width.")] = 810,
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Compare the processor time of DecentralizedAdam with that of decent-dp, communication taken out of both."""
    check_count("-n", rounds, 1)
    rounds = min(rounds, _QUICK_ROUNDS) if quick else rounds
    found = _measure(nodes, rounds, width)
    rows, missing = found["rows"], found["missing"]
    print_table(
        f"a step of {found['parameters']:,} parameters, {nodes} nodes of one rank, one thread",
        ("method", "CPU ms/step", "its main thread", "with bytes merely sent", "overhead ms", "main thread's"),
        [_shown(name, row) for name, row in rows.items()],
        sys.stdout,
    )
    figures = compare(rows)
    unmeasured = dict.fromkeys(FIGURES - figures.keys(), missing)
    settings = {"nodes": nodes, "rounds": rounds, "width": width}
    report = Report("mixing", FIGURES, figures, [{"method": k, **v} for k, v in rows.items()], settings, unmeasured)
    raise typer.Exit(conclude(report, json_file=json_file, check=check))


def compare(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of the methods that ran."""
    ours, theirs = rows["DecentralizedAdam"], rows.get("decent-dp")
    if theirs is None:
        return {}
    return {
        "overhead_of_decent_dp": ours["overhead_s"] / theirs["overhead_s"],
        "main_thread_of_decent_dp": ours["main_overhead_s"] / theirs["main_overhead_s"],
    }


def _shown(name: str, row: Mapping[str, float]) -> tuple[str, ...]:
    columns = ("all_s", "main_s", "sent_s", "overhead_s", "main_overhead_s")
    return (name, *(f"{1e3 * row[column]:.2f}" if column in row else "-" for column in columns))


def _measure(nodes: int, rounds: int, width: int) -> dict[str, Any]:
    """Return the ranks' results: rows by method, why one is missing, the number of parameters."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "found.json"
        command = [sys.executable, "-m", "bench.mixing.rank", str(result), str(rounds), str(width)]
        code = run_on_loopback(command, nodes=nodes, ranks_per_node=1, launcher="torchrun")
        if code or not result.exists():
            raise BenchError(f"the ranks ended with exit code {code} and left no result; see above.")
        found: dict[str, Any] = json.loads(result.read_text())
        return found
