"""The cost of an optimizer's step alone: no other rank, one thread, side by side with torch's fused AdamW."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

import flexcomm
from flexdemo import FlexDeMo

_WARMUPS = 3


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, as many times the first one's, and elements of saved state for each parameter element."""

    name: str
    step_s: float
    ratio: float
    state: float


def measure_alone(shapes: Sequence[tuple[int, ...]], steps: int) -> list[Cost]:
    """Return AdamW's cost, then FlexDeMo's: medians of steps taken in turn."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with flexcomm.connect() as world:
            return _measure(shapes, steps, world)
    finally:
        torch.set_num_threads(before)


def _measure(shapes: Sequence[tuple[int, ...]], steps: int, world: flexcomm.World) -> list[Cost]:
    compressors = {
        "demo(k=32)": flexcomm.demo(k=32),
        "demo(k=8)": flexcomm.demo(k=8),
        "striding(1/32)": flexcomm.striding(1 / 32),
    }
    optimizers: dict[str, Optimizer] = {"torch AdamW, fused": AdamW(_with_gradients(shapes), fused=True)}
    for name, compressor in compressors.items():
        optimizers[f"FlexDeMo, {name}"] = FlexDeMo(_with_gradients(shapes), compressor=compressor, world=world)
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(_WARMUPS + steps):
        for name, optimizer in optimizers.items():
            begin_s = time.perf_counter()
            optimizer.step()
            if number >= _WARMUPS:
                seconds[name].append(time.perf_counter() - begin_s)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    base_s = next(iter(medians.values()))
    return [Cost(name, median, median / base_s, _state_of(optimizers[name])) for name, median in medians.items()]


def _with_gradients(shapes: Sequence[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return params


def _state_of(optimizer: Optimizer) -> float:
    """Return how many float32 elements a checkpoint holds for each of a parameter, padding of chunks included."""
    kept = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    held: int = sum(x.numel() for x in kept if isinstance(x, Tensor) and x.numel() > 1)
    numel: int = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    return held / numel
