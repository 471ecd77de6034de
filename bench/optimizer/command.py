"""``python -m bench optimizer``: what a step of FlexDeMo costs, beside torch's AdamW and beside ``detonation``.

Alone, on the parameters of a GPT: the step itself, without communication, one thread. Then as four ranks on two nodes
of this host, on a GPT that FSDP shards inside the node: processor time, bytes, and what each rank holds.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from bench.cluster.loopback import run_on_loopback
from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.errors import BenchError
from bench.optimizer.cost import measure_alone
from bench.step.models import find_model
from bench.tables import print_table

_NODES, _RANKS = 2, 2
_QUICK_STEPS = 5
FIGURES = frozenset(
    {"step_of_fused_adamw", "state_buffers", "gradients_of_shard", "cpu_of_detonation", "bytes_of_detonation"}
)

ModelOption = Annotated[str, typer.Option(help="Whose parameters the step alone is measured on: 23m, 124m or tiny.")]
StepsOption = Annotated[int, typer.Option("-n", "--iterations", help="Timed steps of each optimizer.")]


def optimizer(
    model: ModelOption = "23m",
    steps: StepsOption = 11,
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Compare a step of FlexDeMo with torch's fused AdamW, alone, and with detonation's DeMo, on shards."""
    steps = min(steps, _QUICK_STEPS) if quick else steps
    alone = measure_alone([shape for _, shape in find_model(model).shapes()], steps)
    print_table(
        f"a step of {model}, one node, one thread",
        ("optimizer", "ms/step", "ratio", "state per parameter"),
        [(row.name, f"{1e3 * row.step_s:.1f}", f"{row.ratio:.2f}", f"{row.state:.2f}") for row in alone],
        sys.stdout,
    )
    sharded, missing = _measure_sharded(steps)
    print()
    print_table(
        f"a step of a GPT that FSDP1 shards, {_NODES} nodes x {_RANKS} ranks, flat chunks of 64, k = 4",
        ("optimizer", "main CPU ms", "all CPU ms", "MB sent/rank", "gradients held / shard"),
        [_shown(name, row) for name, row in sharded.items()],
        sys.stdout,
    )
    figures = {"step_of_fused_adamw": alone[1].ratio, "state_buffers": alone[1].state} | compare(sharded)
    unmeasured = dict.fromkeys(FIGURES - figures.keys(), missing)
    rows = [{"optimizer": name, **row} for name, row in sharded.items()]
    report = Report("optimizer", FIGURES, figures, rows, {"model": model, "steps": steps}, unmeasured)
    raise typer.Exit(conclude(report, json_file=json_file, check=check))


def compare(sharded: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the figures that what ran allows."""
    ours, theirs = sharded["FlexDeMo"], sharded.get("detonation")
    figures = {"gradients_of_shard": ours["gradients_of_shard"]}
    if theirs is not None:
        figures["cpu_of_detonation"] = ours["main_cpu_s"] / theirs["main_cpu_s"]
        figures["bytes_of_detonation"] = ours["sent_nbytes"] / theirs["sent_nbytes"]
    return figures


def _shown(name: str, row: Mapping[str, float]) -> tuple[str, ...]:
    return (
        name,
        f"{1e3 * row['main_cpu_s']:.1f}",
        f"{1e3 * row['all_cpu_s']:.1f}",
        f"{row['sent_nbytes'] / 1e6:.3f}",
        f"{row['gradients_of_shard']:.2f}",
    )


def _measure_sharded(steps: int) -> tuple[dict[str, dict[str, float]], str]:
    """Return what four ranks found, by optimizer, and why one is missing, if it is."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "found.json"
        command = [sys.executable, "-m", "bench.optimizer.rank", str(result), str(steps)]
        code = run_on_loopback(command, nodes=_NODES, ranks_per_node=_RANKS, launcher="openmpi")
        if code or not result.exists():
            raise BenchError(f"the ranks ended with exit code {code} and left no result; see above.")
        found = json.loads(result.read_text())
        return found["rows"], found["missing"]
