"""Payloads: their bits beside the entropy of their indices, the speed of making them, and the error of value codes.

Errors are measured on the coefficients that training sends. A small network learns the outputs of another, fixed one.
Every weight has a momentum of its own, encoded and decoded at every step as between nodes, and moves by the sign of the
decoded values: DeMo with one node. Each value code trains a network of its own, because its error returns through its
momentum.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import get_args

import torch
from torch import Tensor, nn

from bench.codec.codecs import CHUNK, FlexcommCodec
from bench.codec.speed import draw_gradient, interleave
from flexcomm import demo
from flexcomm.compress import ValueName
from flexcomm.kernels import plan_layout

NODES = 2
_KS = {64: (1, 4, 8, 16, 32), 4096: (1, 8, 32, 128, 512)}
_ALL_VALUES_AT = (4096, 32)
VALUE_NAMES: tuple[ValueName, ...] = tuple(name for name in get_args(ValueName) if name != "native")
_SIZES = (256, 512, 512, 64)
_BATCH = 128
_STEP_LENGTH = 1e-3
_SEED = 0


@dataclass(frozen=True)
class PayloadBits:
    """One payload: ``n`` coefficients in a chunk, ``k`` of them sent. Bits are per sent coefficient."""

    n: int
    k: int
    values: ValueName
    bits: float
    index_bits: float
    entropy_bits: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    copy_gb_per_s: float

    @property
    def figure(self) -> str:
        return f"bits_{self.n}_{self.k}_{self.values}"


def measure_bits(shape: tuple[int, int], rounds: int) -> list[PayloadBits]:
    """Return the bits of payloads for several n and k, and for every value code at one of them."""
    cases: list[tuple[int, int, ValueName]] = [(n, k, "bf16") for n, ks in _KS.items() for k in ks]
    cases += [(*_ALL_VALUES_AT, values) for values in VALUE_NAMES if values != "bf16"]
    return [_measure(shape, case, rounds) for case in cases]


def _measure(shape: tuple[int, int], case: tuple[int, int, ValueName], rounds: int) -> PayloadBits:
    n, k, values = case
    gradient = draw_gradient(shape if n == CHUNK * CHUNK else (math.prod(shape),), seed=0)
    ours, out = FlexcommCodec(tuple(gradient.shape), demo(k, CHUNK, values)), torch.empty_like(gradient)
    gathered = ours.encode_(gradient).repeat(NODES)
    seconds = interleave(
        {
            "encode": lambda: ours.encode_(gradient),
            "decode": lambda: ours.decode_(out, gathered, NODES),
            "copy": lambda: out.copy_(gradient),
        },
        rounds,
    )
    plan = ours.plan.plans[0]
    layout = plan_layout(plan, plan.entries)
    index_bits = (plan.entries * layout.entry_bits + plan.chunks * layout.chunk_bits) / plan.entries
    speeds = {f"{name}_gb_per_s": gradient.nbytes / spent.wall_s / 1e9 for name, spent in seconds.items()}
    return PayloadBits(n, k, values, 8 * ours.plan.nbytes / plan.entries, index_bits, entropy_bits(n, k), **speeds)


def entropy_bits(n: int, k: int) -> float:
    """Return log2 C(n, k) / k: the least bits per index of any code for uniformly drawn index sets."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / k


def bits_of(payloads: Sequence[PayloadBits], figures: Sequence[str]) -> dict[str, float]:
    """Return the bits of the payloads named in ``figures``."""
    return {one.figure: one.bits for one in payloads if one.figure in figures}


@dataclass(frozen=True)
class CodeError:
    """A code's relative L2 error: the mean over the last third of the steps, and the worst of all steps."""

    values: ValueName
    k: int
    settled: float
    worst: float


def measure_code_errors(ks: Sequence[int], steps: int) -> list[CodeError]:
    """Return the error of each value code for each k; float32 has none."""
    cases = [(values, k) for values in VALUE_NAMES if values != "fp32" for k in ks]
    errors = ((values, k, list(_train(k, values, steps))) for values, k in cases)
    return [CodeError(values, k, fmean(found[-(steps // 3) :]), max(found)) for values, k, found in errors]


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
    """A weight's momentum; ``squares`` are the squared norms of the last payload's error and of its exact values."""

    def __init__(self, weight: Tensor, k: int, values: ValueName) -> None:
        self.coded = FlexcommCodec(tuple(weight.shape), demo(k, CHUNK, values))
        self.exact = FlexcommCodec(tuple(weight.shape), demo(k, CHUNK, "fp32"))
        self.squares = (0.0, 1.0)

    def send_(self, gradient: Tensor) -> Tensor:
        """Return the update that the other nodes would receive."""
        self.exact.state.copy_(self.coded.state)
        exact, coded = (_round_trip(side, gradient) for side in (self.exact, self.coded))
        # The transform is orthonormal: errors of elements are errors of coefficients.
        self.squares = float((coded - exact).square().sum()), float(exact.square().sum())
        return coded


def _round_trip(side: FlexcommCodec, gradient: Tensor) -> Tensor:
    out = torch.empty_like(gradient)
    side.decode_(out, side.encode_(gradient), nodes=1)
    return out
