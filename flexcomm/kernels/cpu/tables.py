"""What the loops are given: one row of numbers for each tensor of a group, addresses included.

A group is the tensors of a bucket that are encoded alike; its chunks are counted through. Plain numbers instead of
records of arrays: numba compiles several times as long for the latter, and unpacks them at every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba.np.numpy_support import carray

from flexcomm.kernels.cpu.codelets import pointer_to
from flexcomm.kernels.cpu.compiler import compiled

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import Float, Floats, Int, Ints, Longs

__all__ = ["chunk_span", "entries_before", "factor_of", "floats_at", "ints_at", "row_at", "tensor_of"]

_NAMES = (
    "X", "STATE", "STATE_OUT", "FACTOR", "KEY", "START",
    "FIRST_CHUNK", "CHUNKS", "ROWS", "COLS", "CHUNK_ROWS", "CHUNK_COLS", "GRID_COLS", "NUMEL",
    "FIRST_ENTRY", "K", "INDICES", "SCALES", "VALUES", "LOW_BITS", "ENTRY_BITS", "CHUNK_BITS", "TAU_BITS",
)  # fmt: skip
"""The columns of a table.

The first six change from call to call: addresses of tensor and states, the factor of coefficients as the bits of a
float32, and the sample key. FIRST_CHUNK and FIRST_ENTRY count through the group; INDICES, SCALES and VALUES are the
words of a buffer at which sections begin.
"""
WIDTH = len(_NAMES)
(
    X, STATE, STATE_OUT, FACTOR, KEY, START,
    FIRST_CHUNK, CHUNKS, ROWS, COLS, CHUNK_ROWS, CHUNK_COLS, GRID_COLS, NUMEL,
    FIRST_ENTRY, K, INDICES, SCALES, VALUES, LOW_BITS, ENTRY_BITS, CHUNK_BITS, TAU_BITS,
) = range(WIDTH)  # fmt: skip


@compiled
def floats_at(address: Int, numel: Int) -> Floats:
    return carray(pointer_to(address), numel, np.float32)


@compiled
def ints_at(address: Int, numel: Int) -> Ints:
    return carray(pointer_to(address), numel, np.int32)


@compiled
def factor_of(row: Longs) -> Float:
    return np.uint32(row[FACTOR]).view(np.float32)


@compiled
def tensor_of(table: Longs, chunk: Int) -> Int:
    """Return the tensor that a chunk of the group belongs to."""
    number = 0
    while chunk >= table[number, FIRST_CHUNK] + table[number, CHUNKS]:
        number += 1
    return number


@compiled
def chunk_span(row: Longs, chunk: Int, last: Int) -> tuple[Int, Int]:
    """Return which chunks of a tensor are meant by those of the group from ``chunk`` on, up to ``last``."""
    return chunk - row[FIRST_CHUNK], min(last - row[FIRST_CHUNK], row[CHUNKS])


@compiled
def row_at(row: Longs, chunk: Int, first: Int, scratch: Int) -> Int:
    """Return the address of a chunk's coefficients: in its state or, if it has none, in scratch memory of a block.

    ``first`` is the group's chunk that the block begins with.
    """
    if row[STATE_OUT]:
        return row[STATE_OUT] + 4 * chunk * row[NUMEL]
    return scratch + 4 * (row[FIRST_CHUNK] + chunk - first) * row[NUMEL]


@compiled
def entries_before(row: Longs, chunk: Int, before: Longs) -> Int:
    """Return how many entries of a tensor precede a chunk: ``before`` says, if their number depends on the data."""
    return before[chunk] if before.size else chunk * row[K]
