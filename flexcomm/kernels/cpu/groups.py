"""Groups: the tensors of a bucket that go through the same loops, as tables that the loops can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flexcomm.kernels.butterflies import plan_dct, plan_inverse_dct
from flexcomm.kernels.cpu import indices, transform
from flexcomm.kernels.cpu import tables as t
from flexcomm.kernels.cpu.codelets import LANES, LENGTH, SQUARE, SQUARE_BINS
from flexcomm.kernels.cpu.instructions import WINDOW
from flexcomm.kernels.cpu.selection import MOST_BEHIND, SELECTIONS, bins_for, picker_of
from flexcomm.kernels.cpu.values import CODES, check_values
from flexcomm.kernels.layout import BufferPlan, IndexCode, Layout
from flexcomm.kernels.plan import SampleKey, TensorPlan, check_implemented, threshold_bits

Loop = Callable[..., Any]

BLOCK_NUMEL = 1 << 15
"""Elements that are worked on at a time, loop by loop: with their states, they stay in a core's second cache."""
_CHUNKS_PER_WORD = 32
"""So many chunks end at a word, whatever their number of bits: threads that begin there share no word."""


class ScratchSizes(NamedTuple):
    """Numbers of floats (coefficients, tiles) and of integers that the loops of a block need."""

    coefs: int
    tiles: int
    tops: int
    memory: int
    entries: int


@dataclass
class Group:
    """Tensors whose chunks are transformed, selected and written by the same loops; ``numbers`` are their places.

    ``blocks`` are ``[tensor, first chunk, last chunk]``, ``cuts`` those at which a thread may begin. A tensor whose
    number of entries depends on the data is a group of its own.
    """

    numbers: list[int]
    plans: list[TensorPlan]
    table: NDArray[np.int64]
    blocks: NDArray[np.int64]
    cuts: NDArray[np.int64]
    accumulate: Loop
    decode: Loop
    pick: Loop | None
    sends_indices: bool
    sizes: ScratchSizes
    holds: list[Any] = field(repr=False)
    """The lists whose addresses are in the table."""
    gain: float = float("nan")

    def __post_init__(self) -> None:
        self.variable_count, self.values = self.plans[0].variable_count, self.plans[0].values
        self.numel = sum(plan.chunks * plan.chunk_numel for plan in self.plans)
        self.entries = sum(plan.entries for plan in self.plans)
        # Which coefficients are sent follows from the step.
        self.is_shared = self.pick is not None and not self.sends_indices

    def encode_loops(self) -> tuple[Loop, ...]:
        """Return the loops that encode a block, in order."""
        return (self.accumulate, *((self.pick,) if self.pick else ()), *self.put_loops())

    def put_loops(self) -> tuple[Loop, ...]:
        """Return the loops that write what was picked of a block."""
        return (*((indices.put_indices,) if self.sends_indices else ()), CODES[self.values][0])

    def read_loops(self) -> tuple[Loop, ...]:
        """Return the loops that find the picks and values of a block in its own payload."""
        picker = indices.read_indices if self.sends_indices else self.pick
        return (*((picker,) if picker else ()), CODES[self.values][1])

    def check_loops(self) -> tuple[Loop, ...]:
        """Return the loops that check what was received of a tensor, and unpack its indices."""
        is_checked = self.values.format.scales or self.values.format.nonfinite_mask
        return (*((indices.read_indices,) if self.sends_indices else ()), *((check_values,) if is_checked else ()))

    def decode_loops(self) -> tuple[Loop, ...]:
        """Return the loops that decode a block, in order; shared indices are drawn by the first one."""
        drawing = (self.pick,) if self.is_shared and self.pick else ()
        return (*drawing, CODES[self.values][1], self.decode)

    def all_loops(self) -> tuple[Loop, ...]:
        """Return all that encoding and decoding need, those that take longest to compile first."""
        return (self.decode, *self.encode_loops(), *self.check_loops(), *self.decode_loops())

    def tensor_blocks(self) -> NDArray[np.int64]:
        """Return blocks that are whole tensors."""
        return np.array([(row, 0, plan.chunks) for row, plan in enumerate(self.plans)], np.int64).reshape(-1, 3)

    def set_inputs(self, tensors: Sequence[Tensor], gain: float, keys: Sequence[SampleKey]) -> None:
        """Fill in where tensors are, what their coefficients are multiplied by, and the keys of a step."""
        given = [(tensors[number].data_ptr(), t.DTYPES.index(tensors[number].dtype)) for number in self.numbers]
        self.table[:, t.X : t.DTYPE + 1] = given
        if gain != self.gain:
            self.set_gain(gain)
        if keys:
            self.table[:, t.KEY] = [keys[number].key for number in self.numbers]
            self.table[:, t.START] = [keys[number].start for number in self.numbers]

    def set_gain(self, gain: float) -> None:
        factors = np.array([plan.scale(gain) for plan in self.plans], np.float32)
        self.table[:, t.FACTOR], self.gain = factors.view(np.uint32), gain

    def set_addresses(self, column: int, tensors: Sequence[Tensor]) -> None:
        """Fill in where tensors are."""
        self.table[:, column] = [tensors[number].data_ptr() for number in self.numbers]


def plan_groups(plan: BufferPlan, shown_as: BufferPlan, *, is_inverse: bool) -> list[Group]:
    """Return the groups of a bucket; ``shown_as`` says how its tensors lie in memory."""
    numbers: dict[Any, list[int]] = {}
    for number, (one, layout) in enumerate(zip(shown_as.plans, plan.layouts, strict=True)):
        check_implemented("cpu", one, SELECTIONS, CODES)
        alike = (_find_loops(one), picker_of(one), one.sends_everything, layout.code is IndexCode.NONE, one.values)
        numbers.setdefault((number,) if one.variable_count else alike, []).append(number)
    return [_make_group(plan, shown_as, own, is_inverse) for own in numbers.values()]


def place(row: NDArray[np.int64], layout: Layout, position: int) -> None:
    """Fill in where the payload of a tensor is, and how its entries are written."""
    row[[t.INDICES, t.SCALES, t.VALUES]] = [position + one for one in (layout.indices, layout.scales, layout.values)]
    row[[t.CODE, t.LOW_BITS, t.ENTRY_BITS, t.CHUNK_BITS, t.VALUE_PADDING]] = layout.coding


def _make_group(plan: BufferPlan, shown_as: BufferPlan, numbers: list[int], is_inverse: bool) -> Group:
    plans = [shown_as.plans[number] for number in numbers]
    table, entries, blocks, sizes, holds = np.zeros((len(numbers), t.TENSOR_COLUMNS), np.int64), 0, [], [], []
    accumulate, decode = _find_loops(plans[0])
    for number, (row, one) in enumerate(zip(table, plans, strict=True)):
        # The transform of squares fills the maxima itself, as many as it has.
        is_filled = accumulate is transform.accumulate_squares and 2 * one.k <= SQUARE_BINS
        row[[t.CHUNKS, t.ROWS, t.COLS, t.CHUNK_ROWS, t.CHUNK_COLS]] = (
            one.chunks, one.rows, one.cols, one.chunk_rows, one.chunk_cols,
        )  # fmt: skip
        row[[t.GRID_COLS, t.NUMEL, t.K, t.FIRST_ENTRY]] = one.grid_cols, one.chunk_numel, one.k, entries
        row[[t.TAU_BITS, t.VALUE_CODE]] = threshold_bits(one.tau), int(one.values)
        row[t.EVERYTHING], row[t.FILLS_BINS] = one.sends_everything, not is_filled
        row[t.BINS] = SQUARE_BINS if is_filled else bins_for(one.chunk_numel, one.k)
        if one.transformed:
            for column, side in ((t.DOWN, one.chunk_rows), (t.ALONG, one.chunk_cols)):
                arrays = _list(side, is_inverse)
                row[column : column + 4] = [*(array.ctypes.data for array in arrays), len(arrays[1])]
                holds.append(arrays)
        place(row, plan.layouts[numbers[number]], plan.positions[numbers[number]])
        entries += one.entries
        chunks = max(1, BLOCK_NUMEL // one.chunk_numel)
        blocks += [(number, first, min(first + chunks, one.chunks)) for first in range(0, one.chunks, chunks)]
        sizes.append(_scratch_sizes(one, min(chunks, one.chunks), max(int(row[t.BINS]), SQUARE_BINS)))
    all_blocks = np.array(blocks, np.int64).reshape(-1, 3)
    return Group(
        numbers,
        plans,
        table,
        all_blocks,
        np.flatnonzero(all_blocks[:, 1] % _CHUNKS_PER_WORD == 0),
        accumulate,
        decode,
        picker_of(plans[0]),
        plan.layouts[numbers[0]].code is not IndexCode.NONE,
        ScratchSizes(*map(max, zip(*sizes, strict=True))),
        holds,
    )


def _find_loops(plan: TensorPlan) -> tuple[Loop, Loop]:
    if not plan.transformed:
        return transform.accumulate_plain, transform.decode_plain
    if (plan.chunk_rows, plan.chunk_cols) == (LENGTH, LENGTH):
        return transform.accumulate_squares, transform.decode_squares
    if (plan.chunk_rows, plan.chunk_cols) == (1, LENGTH):
        return transform.accumulate_flat, transform.decode_flat
    return transform.accumulate_any, transform.decode_any


@lru_cache(maxsize=64)
def _list(length: int, is_inverse: bool) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    program = plan_inverse_dct(length) if is_inverse else plan_dct(length)
    places = np.concatenate((program.inputs, program.outputs, [program.height])).astype(np.int32)
    return places, np.ascontiguousarray(program.steps), np.ascontiguousarray(program.factors)


def _scratch_sizes(plan: TensorPlan, chunks: int, bins: int) -> ScratchSizes:
    numel, many = plan.chunk_numel, LANES if plan.chunk_rows == 1 else 1
    tiles = max(4 * SQUARE, 2 * numel, chunks * min(plan.k, numel))
    if plan.transformed:
        down, along = (
            max(plan_dct(side).height, plan_inverse_dct(side).height) for side in (plan.chunk_rows, plan.chunk_cols)
        )
        work = max(down * plan.chunk_cols, along * max(plan.chunk_rows, many))
        tiles = max(tiles, 2 * many * numel + work)
    memory = max(2 * many * numel + 4 * WINDOW, 2 * SQUARE)
    return ScratchSizes(chunks * numel, tiles, chunks * bins, memory, chunks * min(plan.k, numel) + MOST_BEHIND)
