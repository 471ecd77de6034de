"""What kernel sets are compared on: plans, inputs and memory, drawn from all there are, and always alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch

from flexcomm.codec.wire import plan_layout
from flexcomm.kernels import IndexCode, Layout, Momentum, SampleKey, Selection, TensorPlan, ValueCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["DTYPES", "Case", "Geometry", "layout_with", "numbers", "sampled_cases", "with_gaps"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ("normal", "ties", "tiny", "sparse", "wide", "zeros")
MEMORIES = ("none", "apart", "same", "first", "last")

Option = TypeVar("Option")


class Geometry(NamedTuple):
    """A tensor's shape, the matrix it is seen as, how that is cut, and whether chunks are transformed."""

    shape: tuple[int, ...]
    rows: int
    cols: int
    chunk_rows: int
    chunk_cols: int
    transformed: bool


GEOMETRIES = (
    Geometry((), 1, 1, 1, 1, True),
    Geometry((1,), 1, 1, 1, 8, False),
    Geometry((0,), 1, 0, 1, 16, False),
    Geometry((0, 8), 1, 0, 1, 8, True),
    Geometry((61,), 1, 61, 1, 7, True),
    Geometry((331,), 1, 331, 1, 32, False),
    Geometry((300,), 1, 300, 1, 100, True),
    Geometry((3, 4, 5), 12, 5, 4, 4, True),
    Geometry((16, 24), 16, 24, 8, 8, True),
    Geometry((19, 23), 19, 23, 8, 16, True),
    Geometry((9, 5), 9, 5, 5, 1, True),
    Geometry((400,), 1, 400, 1, 256, False),
    # Enough chunks that three threads have some each.
    Geometry((70 * 5 - 3,), 1, 70 * 5 - 3, 1, 5, False),
    Geometry((70 * 4,), 1, 70 * 4, 1, 4, True),
)


@dataclass(frozen=True)
class Case:
    """One encoding of one tensor. ``memory``: which states there are, and whether they are the same."""

    shape: tuple[int, ...]
    plan: TensorPlan
    code: IndexCode | None
    dtype: torch.dtype
    kind: str
    memory: str
    gaps: bool
    seed: int

    def layout(self, entries: int) -> Layout:
        return plan_layout(self.plan, entries) if self.code is None else layout_with(self.plan, entries, self.code)

    def sample_key(self) -> SampleKey:
        return SampleKey(0x9E3779B9 * (self.seed + 1) % (1 << 32), self.seed % self.plan.chunk_numel)

    def x(self, sender: int = 0) -> Tensor:
        x = numbers(self.kind, self.shape, self.seed + 1000 * sender).to(self.dtype)
        return with_gaps(x) if self.gaps else x

    def momentum(self, device: str, sender: int = 0) -> Momentum:
        """Return states in memory of their own; what will be filled holds NaN before."""
        old = numbers("normal", self.plan.state_shape, self.seed + 1000 * sender + 500).to(device)
        new = torch.full_like(old, torch.nan)
        state, next_state = {
            "none": (None, None),
            "apart": (old, new),
            "same": (old, old),
            "first": (None, new),
            "last": (old, None),
        }[self.memory]
        return Momentum(state, next_state, decay=0.875, gain=0.75, alpha=(1.0, 1.0, 0.3)[self.seed % 3])


def sampled_cases(count: int, seed: int = 0) -> list[Case]:
    """Return cases in which every selection meets every value code; the rest is drawn."""
    random = np.random.default_rng(seed)

    def draw(options: Sequence[Option]) -> Option:
        return options[int(random.integers(len(options)))]

    pairs = [(selection, values) for selection in Selection for values in ValueCode]
    cases = []
    for number in range(count):
        selection, values = pairs[number % len(pairs)]
        where = draw(GEOMETRIES)
        whole = TensorPlan(*where[1:], Selection.EVERYTHING, where.chunk_rows * where.chunk_cols, values)
        if selection.rule.is_variable:
            k = max(1, draw((whole.entries, whole.entries // 2, whole.entries // 8, 1)))
            tau, variable_length = draw((1e-6, 0.3, 1.0, 1e30)), draw((True, False))
            plan = replace(whole, selection=selection, k=k, tau=tau, variable_length=variable_length)
        else:
            share = 1 if selection is Selection.EVERYTHING else draw((1, 2, 7, 100))
            plan = replace(whole, selection=selection, k=max(1, whole.k // share))
        sends_indices = plan_layout(plan, plan.entries).code is not IndexCode.NONE
        code = draw((None, *list(IndexCode)[1:])) if sends_indices else None
        cases.append(
            Case(where.shape, plan, code, draw(DTYPES), draw(KINDS), draw(MEMORIES), draw((True, False, False)), number)
        )
    return cases


def layout_with(plan: TensorPlan, entries: int, code: IndexCode) -> Layout:
    """Return a layout with an index code that may not be the shortest: kernels are told, and do not choose."""
    width = max(1, (plan.chunk_numel - 1).bit_length())
    low = width // 2 if code is IndexCode.ELIAS_FANO else 0
    entry_bits, chunk_bits = {
        IndexCode.PACKED: (width, 0),
        IndexCode.ELIAS_FANO: (low + 1, (plan.chunk_numel - 1) >> low),
        IndexCode.BITMAP: (0, plan.chunk_numel),
    }[code]
    shortest = plan_layout(plan, entries)
    index_words = -(-(entries * entry_bits + plan.chunks * chunk_bits) // 32)
    longer = shortest.indices + index_words - shortest.scales
    return replace(
        shortest,
        code=code,
        low_bits=low,
        entry_bits=entry_bits,
        chunk_bits=chunk_bits,
        scales=shortest.scales + longer,
        values=shortest.values + longer,
        nwords=shortest.nwords + longer,
    )


def numbers(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return float32 of a kind: equal magnitudes to be told apart by place, denormals, mostly zeros, and so on."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    if kind == "ties":
        return (2 * normal).round() / 4
    if kind == "tiny":
        return normal * 1e-39
    if kind == "sparse":
        return normal * (torch.rand(shape, generator=generator) < 0.03)
    if kind == "wide":
        return normal * torch.exp2(torch.randint(-30, 15, shape, generator=generator))
    return torch.zeros(shape) if kind == "zeros" else normal


def with_gaps(x: Tensor) -> Tensor:
    """Return the same numbers in every second element of a larger memory, columns first."""
    spread = torch.zeros((*reversed(x.shape), 2), dtype=x.dtype, device=x.device)[..., 1]
    return spread.permute(tuple(reversed(range(x.dim())))).copy_(x)
