"""The seconds of an iteration without communication, and how they vary."""

from __future__ import annotations

import time
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from flexdemo.predict.calibration import Compute
from flexdemo.predict.errors import PredictError

if TYPE_CHECKING:
    from torch import Tensor

    from flexcomm import World

__all__ = ["SmallTransformer", "TrainingStep", "load_workload", "measure_compute"]

_ITERATIONS = 20
_WARMUPS = 3
DEFAULT_NAME = "a transformer of 3.2 M parameters, 512 tokens"


class TrainingStep(Protocol):
    """A workload on this rank's device, one phase at a time; nothing in it may talk to other ranks."""

    @property
    def nbytes(self) -> int:
        """The bytes of the model that all ranks of a node exchange together, such as 4 for each fp32 parameter."""
        ...

    def forward(self) -> None: ...

    def backward(self) -> None: ...

    def step(self) -> None:
        """Let the optimizer step, and forget the gradients."""
        ...


class SmallTransformer:
    """Four layers of 256, four sequences of 128 tokens, AdamW."""

    def __init__(self, device: torch.device) -> None:
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(4, 128, 256, generator=torch.Generator().manual_seed(0)).to(device)
        self.loss: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(param.nbytes for param in self.model.parameters())

    def forward(self) -> None:
        self.loss = self.model(self.batch).square().mean()

    def backward(self) -> None:
        assert self.loss is not None, "forward comes first"  # noqa: S101  (our own invariant)
        self.loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def load_workload(text: str) -> TrainingStep:
    """Return what ``package.module:function`` returns when called without arguments."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise PredictError(f"got --workload {text!r}, needed package.module:function.")
    try:
        made = getattr(import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise PredictError(f"cannot load --workload {text!r}: {error}.") from error
    missing = [part for part in ("forward", "backward", "step", "nbytes") if not hasattr(made, part)]
    if missing:
        raise PredictError(
            f"--workload {text!r} returned a {type(made).__name__} without {', '.join(missing)}: needed methods "
            f"forward(), backward() and step(), and the model's bytes as nbytes."
        )
    workload: TrainingStep = made
    return workload


def measure_compute(world: World, workload: TrainingStep, name: str, iterations: int = _ITERATIONS) -> Compute:
    """Return the same on every rank. A node takes as long as the slowest of its ranks."""
    seen = torch.zeros(iterations, 3, dtype=torch.float64)
    for iteration in range(-_WARMUPS, iterations):
        taken_s = [_time(part, world) for part in (workload.forward, workload.backward, workload.step)]
        if iteration >= 0:
            seen[iteration] = torch.tensor(taken_s, dtype=torch.float64)
    by_rank = world.control.all_gather(seen).wait()
    return summarise(
        torch.stack([by_rank[list(ranks)].amax(dim=0) for ranks in world.topology.members]), name, workload
    )


def summarise(by_node: Tensor, name: str, workload: TrainingStep) -> Compute:
    """Return what ``[nodes, iterations, 3]`` of forward, backward and optimizer come to."""
    forward_s, backward_s, optimizer_s = by_node.mean(dim=(0, 1)).tolist()
    passes_s = by_node[:, :, :2].sum(dim=2)
    means_s = passes_s.mean(dim=1)
    relative = passes_s / means_s[:, None] - 1
    return Compute(
        name=name,
        model_nbytes=workload.nbytes,
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        sigma=float(relative.square().mean().sqrt()),
        slowness=tuple((means_s / means_s.mean()).tolist()),
    )


def _time(part: object, world: World) -> float:
    begin_s = time.perf_counter()
    part()  # type: ignore[operator]
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin_s
