"""Groups: the tensors of a bucket that are encoded alike, as tables that the loops can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flexcomm.kernels.butterflies import plan_dct, plan_inverse_dct
from flexcomm.kernels.cpu import tables as t
from flexcomm.kernels.cpu import transform
from flexcomm.kernels.cpu.codelets import BINS, LANES, LENGTH, WINDOW
from flexcomm.kernels.cpu.selection import SELECTIONS, bins_for
from flexcomm.kernels.cpu.values import CODES
from flexcomm.kernels.layout import BufferPlan, IndexCode, Layout
from flexcomm.kernels.plan import SampleKey, Selection, TensorPlan, check_implemented, threshold_bits

Loop = Callable[..., Any]

BLOCK_NUMEL = 1 << 17
"""Elements that are worked on at a time, stage by stage: with their states, they stay in a core's second cache."""
_CHUNKS_PER_WORD = 32
"""So many chunks end at a word, whatever their number of bits: blocks that begin there share no word."""


@dataclass
class Group:
    """Tensors with one kind of chunk, selection, index code and value code; ``numbers`` are their places in the bucket.

    ``blocks`` are the chunks that are worked on together, at most ``block_chunks``. A tensor whose number of entries
    depends on the data is a group of its own. ``job`` holds what is the same for all blocks and calls.
    """

    numbers: list[int]
    plan: TensorPlan
    code: IndexCode
    table: NDArray[np.int64]
    job: NDArray[np.int64]
    chunks: int
    blocks: list[tuple[int, int]]
    accumulate: Loop
    restore: Loop
    inverse_job: NDArray[np.int64]
    selection: Selection
    block_chunks: int
    tile_numel: int
    holds: tuple[Any, ...] = field(repr=False)
    """The lists whose addresses are in the jobs."""
    gain: float = float("nan")

    def __post_init__(self) -> None:
        self.numel = self.chunks * self.plan.chunk_numel
        self.tops = max(int(self.job[t.BINS]), BINS)
        self.memory_numel = max(2 * self.plan.chunk_numel + 4 * WINDOW, 3 * LENGTH * LENGTH)

    def set_inputs(self, tensors: Sequence[Tensor], gain: float, keys: Sequence[SampleKey]) -> None:
        """Fill in where tensors are, what their coefficients are multiplied by, and the keys of a step."""
        self.table[:, t.X] = [tensors[number].data_ptr() for number in self.numbers]
        if gain != self.gain:
            self.table[:, t.FACTOR], self.gain = int(np.float32(self.plan.scale(gain)).view(np.uint32)), gain
        if keys:
            self.table[:, t.KEY] = [keys[number].key for number in self.numbers]
            self.table[:, t.START] = [keys[number].start for number in self.numbers]

    def set_addresses(self, column: int, tensors: Sequence[Tensor]) -> None:
        """Fill in where tensors are."""
        self.table[:, column] = [tensors[number].data_ptr() for number in self.numbers]

    def place(self, number: int, layout: Layout, position: int) -> None:
        """Fill in where the payload of a tensor is."""
        row = self.table[self.numbers.index(number)]
        row[t.INDICES], row[t.SCALES], row[t.VALUES] = (
            position + begin for begin in (layout.indices, layout.scales, layout.values)
        )
        row[t.LOW_BITS], row[t.ENTRY_BITS], row[t.CHUNK_BITS] = layout.low_bits, layout.entry_bits, layout.chunk_bits
        self.code, self.job[t.CODE] = layout.code, int(layout.code)


def plan_groups(plan: BufferPlan, shown_as: BufferPlan) -> list[Group]:
    """Return the groups of a bucket; ``shown_as`` says how its tensors lie in memory."""
    numbers: dict[Any, list[int]] = {}
    for number, (one, layout) in enumerate(zip(shown_as.plans, plan.layouts, strict=True)):
        check_implemented("cpu", one, SELECTIONS, CODES)
        alike = (one.chunk_rows, one.chunk_cols, one.transformed, one.selection, one.k, one.values, layout.code)
        numbers.setdefault((number,) if one.is_variable else alike, []).append(number)
    return [_make_group(plan, shown_as, own) for own in numbers.values()]


def _make_group(plan: BufferPlan, shown_as: BufferPlan, numbers: list[int]) -> Group:
    table, chunks = np.zeros((len(numbers), len(t.TENSOR)), np.int64), 0
    for row, number in zip(table, numbers, strict=True):
        one = shown_as.plans[number]
        row[t.FIRST_CHUNK], row[t.CHUNKS] = chunks, one.chunks
        row[t.ROWS], row[t.COLS] = one.rows, one.cols
        row[t.CHUNK_ROWS], row[t.CHUNK_COLS] = one.chunk_rows, one.chunk_cols
        row[t.GRID_COLS], row[t.NUMEL] = one.grid_cols, one.chunk_numel
        row[t.FIRST_ENTRY], row[t.K] = 0 if one.is_variable else chunks * one.k, one.k
        row[t.TAU_BITS] = threshold_bits(one.tau)
        chunks += one.chunks
    first, blocks = shown_as.plans[numbers[0]], _cut_blocks(table, shown_as.plans[numbers[0]].chunk_numel)
    selection = Selection.EVERYTHING if first.sends_everything else first.selection
    accumulate, restore = _find_loops(first)
    # The transform of squares fills the maxima itself, as many as it has.
    is_filled = accumulate is transform.accumulate_square and 2 * first.k <= BINS
    job, inverse_job = np.zeros((2, len(t.JOB)), np.int64)
    for one_job in (job, inverse_job):
        one_job[t.VALUE_CODE], one_job[t.EVERYTHING] = int(first.values), int(selection is Selection.EVERYTHING)
        one_job[t.BINS] = BINS if is_filled else bins_for(first.chunk_numel, first.k)
        one_job[t.FILLS_BINS] = int(not is_filled)
    holds = [_fill_lists(one, first, is_inverse=one is inverse_job) for one in (job, inverse_job)]
    group = Group(
        numbers,
        first,
        IndexCode.NONE,
        table,
        job,
        chunks,
        blocks,
        accumulate,
        restore,
        inverse_job,
        selection,
        max((last - begin for begin, last in blocks), default=0),
        _tile_numel(first),
        tuple(holds),
    )
    for number in numbers:
        group.place(number, plan.layouts[number], plan.positions[number])
    return group


def _cut_blocks(table: NDArray[np.int64], numel: int) -> list[tuple[int, int]]:
    most = max(1, BLOCK_NUMEL // numel // _CHUNKS_PER_WORD) * _CHUNKS_PER_WORD
    blocks, begin, end = [], 0, 0
    for offset, chunks in table[:, [t.FIRST_CHUNK, t.CHUNKS]].tolist():
        end = offset + chunks
        while end - begin > most:
            cut = offset + max(0, (begin + most - offset) // _CHUNKS_PER_WORD * _CHUNKS_PER_WORD)
            blocks.append((begin, cut))
            begin = cut
    return [*blocks, (begin, end)] if begin < end else blocks


def _find_loops(plan: TensorPlan) -> tuple[Loop, Loop]:
    if not plan.transformed:
        return transform.accumulate_plain, transform.restore_plain
    if (plan.chunk_rows, plan.chunk_cols) == (LENGTH, LENGTH):
        return transform.accumulate_square, transform.restore_square
    if (plan.chunk_rows, plan.chunk_cols) == (1, LENGTH):
        return transform.accumulate_flat, transform.restore_flat
    return transform.accumulate_any, transform.restore_any


def _fill_lists(job: NDArray[np.int64], plan: TensorPlan, *, is_inverse: bool) -> tuple[Any, ...]:
    """Fill in the lists of a chunk's columns and rows, and return them."""
    if not plan.transformed:
        return ()
    lists = [_list(side, is_inverse) for side in (plan.chunk_rows, plan.chunk_cols)]
    for column, arrays in zip((t.DOWN, t.ALONG), lists, strict=True):
        job[column : column + 4] = [*(array.ctypes.data for array in arrays), len(arrays[1])]
    return tuple(lists)


@lru_cache(maxsize=64)
def _list(length: int, is_inverse: bool) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    program = plan_inverse_dct(length) if is_inverse else plan_dct(length)
    places = np.concatenate((program.inputs, program.outputs, [program.height])).astype(np.int32)
    return places, np.ascontiguousarray(program.steps), np.ascontiguousarray(program.factors)


def _tile_numel(plan: TensorPlan) -> int:
    """Return how many floats the loops need as scratch memory."""
    least, many = max(4 * LENGTH * LENGTH, plan.chunk_numel), LANES if plan.chunk_rows == 1 else 1
    if not plan.transformed:
        return least
    down, along = plan_dct(plan.chunk_rows).height, plan_dct(plan.chunk_cols).height
    work = max(down * plan.chunk_cols, along * max(plan.chunk_rows, many))
    return max(least, 2 * many * plan.chunk_numel + work)
