"""What kernel sets are compared on: plans, inputs and memory, drawn from all there are, and always alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from flexcomm.codec import assemble_buffer
from flexcomm.compress import TensorSpec
from flexcomm.kernels import BufferPlan, IndexCode, Layout, Selection, StateUpdate, TensorPlan, ValueCode, plan_layout
from flexcomm.kernels.layout import HEADER_NWORDS, WORD_NBYTES, aligned

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ("normal", "ties", "tiny", "sparse", "wide", "zeros", "rising")
STATES = ("none", "apart", "same")

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
    Geometry((70, 130), 70, 130, 64, 64, True),
    Geometry((130,), 1, 130, 1, 64, True),
    Geometry((576,), 1, 576, 1, 576, False),
    Geometry((1030,), 1, 1030, 1, 1024, False),
    # Enough chunks that three threads have some each.
    Geometry((70 * 5 - 3,), 1, 70 * 5 - 3, 1, 5, False),
    Geometry((70 * 4,), 1, 70 * 4, 1, 4, True),
)


@dataclass(frozen=True)
class Case:
    """One encoding of one tensor. ``held``: whether there are states, and whether they are updated in place.

    ``code`` is an index code that need not be the shortest: kernels are told, and do not choose.
    """

    shape: tuple[int, ...]
    plan: TensorPlan
    code: IndexCode | None
    dtype: torch.dtype
    kind: str
    held: str
    gaps: bool
    seed: int

    def layout(self) -> Layout:
        entries = self.plan.entries
        return plan_layout(self.plan, entries) if self.code is None else layout_with(self.plan, entries, self.code)

    def x(self, sender: int = 0) -> Tensor:
        x = numbers(self.kind, self.shape, self.seed + 1000 * sender).to(self.dtype)
        return with_gaps(x) if self.gaps else x


@dataclass(frozen=True)
class BucketCase:
    """One encoding of one bucket: cases of one tensor each, whose states are held and updated alike."""

    cases: tuple[Case, ...]

    @cached_property
    def plan(self) -> BufferPlan:
        specs = tuple(TensorSpec(f"t{number}", case.shape, case.dtype) for number, case in enumerate(self.cases))
        plan = assemble_buffer(specs, tuple(case.plan for case in self.cases))
        layouts = tuple(case.layout() for case in self.cases)
        nwords = HEADER_NWORDS + sum(layout.nwords for layout in layouts)
        return replace(plan, layouts=layouts, nbytes=WORD_NBYTES * aligned(nwords))

    @property
    def update(self) -> StateUpdate:
        seed = self.cases[0].seed
        return StateUpdate(decay=0.875, gain=0.75, alpha=(1.0, 1.0, 0.3)[seed // len(self.cases) % 3])

    def tensors(self, device: str, sender: int = 0) -> list[Tensor]:
        return [case.x(sender).to(device) for case in self.cases]

    def states(self, device: str, sender: int = 0) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return states in memory of their own: what is read, and what will be filled, which holds NaN before."""
        if self.cases[0].held == "none":
            return None
        old = [
            numbers("normal", case.plan.state_shape, case.seed + 1000 * sender + 500).to(device) for case in self.cases
        ]
        return old, old if self.cases[0].held == "same" else [torch.full_like(state, torch.nan) for state in old]


def sampled_buckets(count: int, seed: int = 0, size: int = 3) -> list[BucketCase]:
    """Return buckets of sampled cases."""
    cases = sampled_cases(count * size, seed)
    return [BucketCase(tuple(cases[begin : begin + size])) for begin in range(0, len(cases), size)]


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
        code = draw((None, *list(IndexCode)[1:])) if sends_indices and not plan.variable_length else None
        cases.append(
            Case(where.shape, plan, code, draw(DTYPES), draw(KINDS), draw(STATES), draw((True, False, False)), number)
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
    if kind == "rising":
        return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
    return torch.zeros(shape) if kind == "zeros" else normal


def with_gaps(x: Tensor) -> Tensor:
    """Return the same numbers in every second element of a larger memory, columns first."""
    spread = torch.zeros((*reversed(x.shape), 2), dtype=x.dtype, device=x.device)[..., 1]
    return spread.permute(tuple(reversed(range(x.dim())))).copy_(x)
