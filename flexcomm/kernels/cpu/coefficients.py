"""Coefficients of chunks, as they are before selection: what was kept and what came, in cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.kernels.cpu.compiler import compiled
from flexcomm.kernels.cpu.records import Scratch, Tiles
from flexcomm.kernels.cpu.transform import lanes_of, load_chunks
from flexcomm.kernels.plan import Selection

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import Floats, Int, Ints
    from flexcomm.kernels.cpu.records import Job, Source

__all__ = ["MAGNITUDE", "accumulate", "fill_magnitudes", "load_rows", "make_scratch", "make_tiles"]

MAGNITUDE = 0x7FFFFFFF
_LARGEST = int(Selection.LARGEST)
_SUM_LANES = 32
_SPARE = 8
"""Turned rows are longer than need be: a power of two apart, they would compete for few places in the cache."""


@compiled
def make_tiles(source: Source, job: Job) -> Tiles:
    lanes = lanes_of(job)
    return Tiles(
        np.empty((lanes, job.chunk_numel), np.float32),
        np.empty((lanes, job.chunk_numel), np.int32),
        np.empty((source.down.height, job.chunk_cols), np.float32),
        np.empty((source.along.height, max(lanes, job.chunk_rows) + _SPARE), np.float32),
    )


@compiled
def make_scratch(job: Job) -> Scratch:
    length, lanes, spread = job.chunk_numel, lanes_of(job), 64
    while job.selection == _LARGEST and spread < 2 * job.k:
        spread *= 2
    return Scratch(
        np.empty((lanes + 2) * length + 1, np.int32),
        np.empty(lanes * length, np.float32),
        np.empty(lanes, np.int64),
        np.empty(spread, np.int32),
        np.empty(length + 1, np.int32),
        np.empty(_SUM_LANES, np.float32),
    )


@compiled
def accumulate(rows: Floats, coefs: Floats, chunk: Int, source: Source) -> None:
    """Fill rows with ``decay * state + factor * coefs``, in float32, or without a state with the latter."""
    decay, factor = source.decay, source.factor
    if source.state.shape[0] == 0:
        for i in range(rows.size):
            rows[i] = factor * coefs[i]
        return
    begin = chunk * source.state.shape[1]
    before = source.state.reshape(-1)[begin : begin + rows.size]
    for i in range(rows.size):
        rows[i] = decay * before[i] + factor * coefs[i]


@compiled
def load_rows(chunk: Int, many: Int, source: Source, job: Job, tiles: Tiles) -> None:
    """Fill ``tiles.coefs`` with what chunks hold before anything is sent."""
    load_chunks(source, chunk, many, job, tiles)
    rows = tiles.coefs.reshape(-1)[: many * job.chunk_numel]
    accumulate(rows, rows, chunk, source)


@compiled
def fill_magnitudes(magnitudes: Ints, rows: Floats) -> None:
    bits = rows.view(np.int32)
    for i in range(rows.size):
        magnitudes[i] = bits[i] & np.int32(MAGNITUDE)
