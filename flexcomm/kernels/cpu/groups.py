"""Groups: the tensors of a bucket that are encoded alike, as tables that the loops can take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flexcomm.kernels.butterflies import plan_dct, plan_inverse_dct
from flexcomm.kernels.counting import threshold_bits
from flexcomm.kernels.cpu import tables, transform
from flexcomm.kernels.cpu.codelets import BINS, LANES, LENGTH
from flexcomm.kernels.cpu.selection import bins_for
from flexcomm.kernels.cpu.values import CODES
from flexcomm.kernels.plan import Selection, check_implemented

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from flexcomm.kernels.layout import BufferPlan, IndexCode, Layout
    from flexcomm.kernels.plan import SampleKey, TensorPlan

__all__ = ["NO_PICKS", "Group", "plan_groups", "set_layout", "tile_numel"]

BLOCK_NUMEL = 1 << 17
"""Elements that are worked on at a time, stage by stage: with their states, they stay in a core's second cache."""
_CHUNKS_PER_WORD = 32
"""So many chunks end at a word, whatever their number of bits: blocks that begin there share no word."""
_SELECTIONS = (Selection.EVERYTHING, Selection.LARGEST, Selection.ABOVE, Selection.SHUFFLED, Selection.STRIDED)
NO_PICKS = np.empty(0, np.int32)


class Transforms(NamedTuple):
    """The loops from tensors to coefficients and back, and what they are given beside tables."""

    accumulate: Callable[..., Any]
    restore: Callable[..., Any]
    lists: tuple[Any, ...] = ()
    inverse_lists: tuple[Any, ...] = ()


@dataclass
class Group:
    """Tensors with one kind of chunk, selection, index code and value code.

    ``numbers`` are their places in the bucket, and ``blocks`` are the chunks that are worked on together. A tensor
    whose number of entries depends on the data is a group of its own.
    """

    numbers: list[int]
    plan: TensorPlan
    code: IndexCode
    table: NDArray[np.int64]
    chunks: int
    blocks: list[tuple[int, int]]
    transforms: Transforms

    @property
    def selection(self) -> Selection:
        return Selection.EVERYTHING if self.plan.sends_everything else self.plan.selection

    @property
    def numel(self) -> int:
        return self.plan.chunk_numel

    @property
    def bins(self) -> int:
        """Running maxima of a chunk."""
        return BINS if self.fills_maxima else bins_for(self.numel, self.plan.k)

    @property
    def fills_maxima(self) -> bool:
        """Whether the transform fills them."""
        return self.transforms.accumulate is transform.accumulate_square and 2 * self.plan.k <= BINS

    @property
    def most_chunks(self) -> int:
        return max((last - first for first, last in self.blocks), default=0)

    def set_keys(self, keys: Sequence[SampleKey]) -> None:
        """Fill in the keys of a step."""
        if self.plan.selection.rule.sample_key is not None:
            self.table[:, tables.KEY] = [keys[number].key for number in self.numbers]
            self.table[:, tables.START] = [keys[number].start for number in self.numbers]

    def set_addresses(self, column: int, tensors: Sequence[Tensor] | None) -> None:
        """Fill in where tensors are; zeros, if there are none."""
        self.table[:, column] = 0 if tensors is None else [tensors[number].data_ptr() for number in self.numbers]

    def set_factor(self, gain: float) -> None:
        """Fill in what coefficients are multiplied by."""
        self.table[:, tables.FACTOR] = int(np.float32(self.plan.scale(gain)).view(np.uint32))


def plan_groups(plan: BufferPlan, shown_as: BufferPlan) -> list[Group]:
    """Return the groups of a bucket; ``shown_as`` says how its tensors lie in memory."""
    numbers: dict[Any, list[int]] = {}
    for number, (one, layout) in enumerate(zip(shown_as.plans, plan.layouts, strict=True)):
        check_implemented("cpu", one, _SELECTIONS, CODES)
        alike = (one.chunk_rows, one.chunk_cols, one.transformed, one.selection, one.k, one.values, layout.code)
        numbers.setdefault((number,) if one.is_variable else alike, []).append(number)
    return [_make_group(plan, shown_as, own) for own in numbers.values()]


def _make_group(plan: BufferPlan, shown_as: BufferPlan, numbers: list[int]) -> Group:
    table = np.zeros((len(numbers), tables.WIDTH), np.int64)
    chunks = 0
    for row, number in zip(table, numbers, strict=True):
        one = shown_as.plans[number]
        row[tables.FIRST_CHUNK], row[tables.CHUNKS] = chunks, one.chunks
        row[tables.ROWS], row[tables.COLS] = one.rows, one.cols
        row[tables.CHUNK_ROWS], row[tables.CHUNK_COLS] = one.chunk_rows, one.chunk_cols
        row[tables.GRID_COLS], row[tables.NUMEL] = one.grid_cols, one.chunk_numel
        row[tables.FIRST_ENTRY], row[tables.K] = 0 if one.is_variable else chunks * one.k, one.k
        row[tables.TAU_BITS] = threshold_bits(one.tau)
        set_layout(row, plan.layouts[number], plan.positions[number])
        chunks += one.chunks
    first = shown_as.plans[numbers[0]]
    blocks = _cut_blocks(table, first.chunk_numel)
    return Group(numbers, first, plan.layouts[numbers[0]].code, table, chunks, blocks, _find_transforms(first))


def set_layout(row: NDArray[np.int64], layout: Layout, position: int) -> None:
    """Fill in where a payload's sections are."""
    row[tables.INDICES], row[tables.SCALES] = position + layout.indices, position + layout.scales
    row[tables.VALUES], row[tables.LOW_BITS] = position + layout.values, layout.low_bits
    row[tables.ENTRY_BITS], row[tables.CHUNK_BITS] = layout.entry_bits, layout.chunk_bits


def _cut_blocks(table: NDArray[np.int64], numel: int) -> list[tuple[int, int]]:
    most = max(1, BLOCK_NUMEL // numel // _CHUNKS_PER_WORD) * _CHUNKS_PER_WORD
    blocks, begin, end = [], 0, 0
    for offset, chunks in table[:, [tables.FIRST_CHUNK, tables.CHUNKS]].tolist():
        end = offset + chunks
        while end - begin > most:
            inside = (begin + most - offset) // _CHUNKS_PER_WORD * _CHUNKS_PER_WORD
            blocks.append((begin, offset + max(0, inside)))
            begin = offset + max(0, inside)
    return [*blocks, (begin, end)] if begin < end else blocks


def _find_transforms(plan: TensorPlan) -> Transforms:
    if not plan.transformed:
        return Transforms(transform.accumulate_plain, transform.restore_plain)
    if (plan.chunk_rows, plan.chunk_cols) == (LENGTH, LENGTH):
        return Transforms(transform.accumulate_square, transform.restore_square)
    if (plan.chunk_rows, plan.chunk_cols) == (1, LENGTH):
        return Transforms(transform.accumulate_flat, transform.restore_flat)
    sides = (plan.chunk_rows, plan.chunk_cols)
    lists, inverse = (sum((_list(side, is_inverse) for side in sides), ()) for is_inverse in (False, True))
    return Transforms(transform.accumulate_any, transform.restore_any, lists, inverse)


@lru_cache(maxsize=64)
def _list(length: int, is_inverse: bool) -> tuple[Any, ...]:
    program = plan_inverse_dct(length) if is_inverse else plan_dct(length)
    places = np.concatenate((program.inputs, program.outputs, [program.height])).astype(np.int32)
    return places, program.steps, program.factors


def tile_numel(plan: TensorPlan) -> int:
    """Return how many floats the loops need as scratch memory."""
    many = LANES if plan.chunk_rows == 1 else 1
    heights = plan_dct(plan.chunk_rows).height * plan.chunk_cols, plan_dct(plan.chunk_cols).height * plan.chunk_rows
    work = many * max(heights) if plan.transformed else 0
    return max(4 * LENGTH * LENGTH, 2 * many * plan.chunk_numel + work)
