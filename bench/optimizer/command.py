"""``python -m bench optimizer``: the cost of a step of FlexDeMo, beside torch's AdamW and beside ``detonation``.

Alone, on the parameters of a GPT: the step itself, without communication, one thread. Then as four ranks on two nodes
of this host, on a GPT that FSDP shards inside the node: processor time, bytes, and the gradients each rank holds.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.optim import AdamW, Optimizer

import flexcomm
from bench.cluster.launchers import run_on_loopback
from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.errors import BenchError
from bench.step.models import find_model
from bench.tables import print_table
from flexdemo import FlexDeMo

_NODES, _RANKS = 2, 2
_QUICK_STEPS = 5
_WARMUPS = 3
_ADAMW = "torch AdamW, fused"
FIGURES = frozenset(
    {"step_of_fused_adamw", "state_buffers", "gradients_of_shard", "cpu_of_detonation", "bytes_of_detonation"}
)


def optimizer(
    model: Annotated[
        str, typer.Option(help="Whose parameters the step alone is measured on: 23m, 124m or tiny.")
    ] = "23m",
    steps: Annotated[int, typer.Option("-n", "--iterations", help="Timed steps of each optimizer.")] = 11,
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Compare a step of FlexDeMo with torch's fused AdamW, alone, and with detonation's DeMo, on shards."""
    steps = min(steps, _QUICK_STEPS) if quick else steps
    alone = measure_alone([shape for _, shape in find_model(model).shapes()], steps)
    print_table(
        f"a step of {model}, one node, one thread",
        ("optimizer", "CPU ms/step", "ratio", "state per parameter"),
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
    """Return the figures of the optimizers that ran."""
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
    """Return the results of four ranks, by optimizer, and why one is missing, if it is."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "found.json"
        command = [sys.executable, "-m", "bench.optimizer.rank", str(result), str(steps)]
        code = run_on_loopback(command, nodes=_NODES, ranks_per_node=_RANKS, launcher="openmpi")
        if code or not result.exists():
            raise BenchError(f"the ranks ended with exit code {code} and left no result; see above.")
        found = json.loads(result.read_text())
        return found["rows"], found["missing"]


@dataclass(frozen=True)
class Cost:
    """Processor seconds of a step, as many times AdamW's, and elements of saved state for each parameter element."""

    name: str
    step_s: float
    ratio: float
    state: float


def measure_alone(shapes: Sequence[tuple[int, ...]], steps: int) -> list[Cost]:
    """Return AdamW's cost, then FlexDeMo's: medians of the processor time of interleaved steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with flexcomm.connect() as world:
            return _measure_optimizers(shapes, steps, world)
    finally:
        torch.set_num_threads(before)


def _measure_optimizers(shapes: Sequence[tuple[int, ...]], steps: int, world: flexcomm.World) -> list[Cost]:
    compressors = {
        "demo(k=32)": flexcomm.demo(k=32),
        'demo(k=32, values="sign")': flexcomm.demo(k=32, values="sign"),
        "top_k(1/32)": flexcomm.top_k(1 / 32),
        "random_k(1/32)": flexcomm.random_k(1 / 32),
        "striding(1/32)": flexcomm.striding(1 / 32),
    }
    half, flat = torch.bfloat16, [(torch.Size(shape).numel(),) for shape in shapes]
    optimizers: dict[str, Optimizer] = {_ADAMW: AdamW(_with_gradients(shapes), fused=True)}
    for name, compressor in compressors.items():
        optimizers[f"FlexDeMo, {name}"] = FlexDeMo(_with_gradients(shapes), compressor=compressor, world=world)
    optimizers[f"{_ADAMW}, bfloat16"] = AdamW(_with_gradients(shapes, half), fused=True)
    optimizers["FlexDeMo, demo(k=32), bfloat16"] = FlexDeMo(
        _with_gradients(shapes, half), compressor=compressors["demo(k=32)"], world=world
    )
    for k in (4, 32):
        optimizers[f"FlexDeMo, demo(k={k}), flat"] = FlexDeMo(
            _with_gradients(flat), compressor=flexcomm.demo(k=k), world=world
        )
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(_WARMUPS + steps):
        for name, optimizer in optimizers.items():
            begin_s = time.process_time()
            optimizer.step()
            if number >= _WARMUPS:
                seconds[name].append(time.process_time() - begin_s)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    base_s = medians[_ADAMW]
    return [Cost(name, median, median / base_s, _state_of(optimizers[name])) for name, median in medians.items()]


def _with_gradients(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype)
    return params


def _state_of(optimizer: Optimizer) -> float:
    """Return how many float32 elements a checkpoint holds for each of a parameter, padding of chunks included."""
    kept = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    held: int = sum(x.numel() for x in kept if isinstance(x, Tensor) and x.numel() > 1)
    numel: int = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    return held / numel
