"""What a payload weighs, beside the entropy of its indices, and how fast it is made, beside a copy of the tensor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.codec.codecs import CHUNK, Ours
from bench.codec.speed import draw_gradient
from bench.codec.timing import take_turns
from bench.codec.value_errors import VALUE_NAMES
from flexcomm import demo
from flexcomm.codec.wire import plan_layout
from flexcomm.compress import ValueName

NODES = 2
_KEPT = {64: (1, 4, 8, 16, 32), 4096: (1, 8, 32, 128, 512)}
_ALL_VALUES_AT = (4096, 32)


@dataclass(frozen=True)
class Weight:
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


def measure_weights(shape: tuple[int, int], rounds: int) -> list[Weight]:
    """Return what payloads weigh for several n and k, and for every value code at one of them."""
    cases: list[tuple[int, int, ValueName]] = [(n, k, "bf16") for n, ks in _KEPT.items() for k in ks]
    cases += [(*_ALL_VALUES_AT, values) for values in VALUE_NAMES if values != "bf16"]
    return [_measure(shape, case, rounds) for case in cases]


def _measure(shape: tuple[int, int], case: tuple[int, int, ValueName], rounds: int) -> Weight:
    n, k, values = case
    gradient = draw_gradient(shape if n == CHUNK * CHUNK else (math.prod(shape),), seed=0)
    ours, out = Ours(tuple(gradient.shape), demo(k, CHUNK, values)), torch.empty_like(gradient)
    gathered = ours.encode_(gradient).repeat(NODES)
    seconds = take_turns(
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
    return Weight(n, k, values, 8 * ours.plan.nbytes / plan.entries, index_bits, entropy_bits(n, k), **speeds)


def entropy_bits(n: int, k: int) -> float:
    """Return log2 C(n, k) / k: what no code for the index sets of uniformly drawn coefficients can beat, each."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / k


def bits_of(weights: Sequence[Weight], figures: Sequence[str]) -> dict[str, float]:
    """Return those figures."""
    return {weight.figure: weight.bits for weight in weights if weight.figure in figures}
