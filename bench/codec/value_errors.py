"""How much of what is sent each value code loses, measured on the coefficients that training sends.

A small network learns what another, fixed one answers. Every weight has a momentum of its own, encoded and decoded at
every step as between nodes, and moves by the sign of what was decoded: DeMo with one node. Each code learns by itself,
because what it loses returns through its momentum.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import get_args

import torch
from torch import Tensor, nn

from bench.codec.codecs import CHUNK, Ours
from flexcomm import demo
from flexcomm.compress import ValueName

VALUE_NAMES: tuple[ValueName, ...] = tuple(name for name in get_args(ValueName) if name != "native")
_SIZES = (256, 512, 512, 64)
_BATCH = 128
_STEP_LENGTH = 1e-3
_SEED = 0


@dataclass(frozen=True)
class Loss:
    """A code's relative L2 error: the mean over the last third of the steps, and the worst of all steps."""

    values: ValueName
    k: int
    settled: float
    worst: float


def measure_losses(ks: Sequence[int], steps: int) -> list[Loss]:
    """Return what each value code loses for each k; float32 loses nothing."""
    cases = [(values, k) for values in VALUE_NAMES if values != "fp32" for k in ks]
    errors = ((values, k, list(_train(k, values, steps))) for values, k in cases)
    return [Loss(values, k, fmean(found[-(steps // 3) :]), max(found)) for values, k, found in errors]


def _train(k: int, values: ValueName, steps: int) -> Iterator[float]:
    """Yield each step's error."""
    generator = torch.Generator().manual_seed(_SEED)
    student, teacher = _network(generator), _network(generator)
    weights = [weight for weight in student.parameters() if weight.ndim == 2]
    senders = [Sender(weight, k, values) for weight in weights]
    for _ in range(steps):
        inputs = torch.randn(_BATCH, _SIZES[0], generator=generator)
        loss = nn.functional.mse_loss(student(inputs), teacher(inputs))
        gradients = torch.autograd.grad(loss, weights)
        sent = [sender.send_(gradient) for sender, gradient in zip(senders, gradients, strict=True)]
        lost, total = (sum(sender.squares[i] for sender in senders) for i in (0, 1))
        for weight, update in zip(weights, sent, strict=True):
            weight.data.sub_(update.sign_(), alpha=_STEP_LENGTH)
        yield math.sqrt(lost / total)


def _network(generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(_SIZES):
        layer = nn.Linear(inputs, outputs, bias=False)
        layer.weight.data.normal_(0.0, inputs**-0.5, generator=generator)
        layers += [layer, nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Sender:
    """A weight's momentum; ``squares`` are those of what the last payload lost, and of what it should have held."""

    def __init__(self, weight: Tensor, k: int, values: ValueName) -> None:
        self.coded = Ours(tuple(weight.shape), demo(k, CHUNK, values))
        self.exact = Ours(tuple(weight.shape), demo(k, CHUNK, "fp32"))
        self.squares = (0.0, 1.0)

    def send_(self, gradient: Tensor) -> Tensor:
        """Return what the others would receive."""
        self.exact.state.copy_(self.coded.state)
        exact, coded = (_round_trip(side, gradient) for side in (self.exact, self.coded))
        # The transform is orthonormal: errors of elements are errors of coefficients.
        self.squares = float((coded - exact).square().sum()), float(exact.square().sum())
        return coded


def _round_trip(side: Ours, gradient: Tensor) -> Tensor:
    out = torch.empty_like(gradient)
    side.decode_(out, side.encode_(gradient), nodes=1)
    return out
