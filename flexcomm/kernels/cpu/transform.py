"""Chunks in and out of a tensor's memory, transformed in cache on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.kernels import butterflies
from flexcomm.kernels.cpu.compiler import compiled
from flexcomm.kernels.cpu.floats import bf16_bits, fp16_bits, fp16_value, from_bits, to_bits
from flexcomm.kernels.cpu.records import BFLOAT16, FLOAT32, FLOAT64

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import Float, Floats, Int
    from flexcomm.kernels.cpu.records import Job, Memory, Source, Tiles, Transform

__all__ = ["lanes_of", "load_chunks", "store_chunks"]

_ZERO = np.float32(0.0)
_TILE = 4096
_BUTTERFLY = butterflies.BUTTERFLY
_MIX = butterflies.MIX
_SCALE = butterflies.SCALE


@compiled
def apply(work: Floats, lanes: Int, transform: Transform) -> None:
    steps, factors = transform.steps, transform.factors
    for number in range(steps.shape[0]):
        code, x, y = steps[number, 0], work[steps[number, 1]], work[steps[number, 2]]
        c0, c1, c2, c3 = factors[number, 0], factors[number, 1], factors[number, 2], factors[number, 3]
        if code == _BUTTERFLY:
            for lane in range(lanes):
                a, b = x[lane], y[lane]
                x[lane] = a + b
                y[lane] = a - b
        elif code == _MIX:
            for lane in range(lanes):
                a, b = x[lane], y[lane]
                x[lane] = c0 * a + c1 * b
                y[lane] = c2 * a + c3 * b
        elif code == _SCALE:
            for lane in range(lanes):
                x[lane] = c0 * x[lane]
        else:
            for lane in range(lanes):
                x[lane] += c0 * y[lane]


@compiled
def lanes_of(job: Job) -> Int:
    """Return how many chunks are worked on side by side: flat ones fill a core's vectors together."""
    if not job.transformed or job.rows > 1:
        return 1
    return max(16, _TILE // job.chunk_numel)


@compiled
def load(memory: Memory, begin: Int, count: Int, row: Floats) -> None:
    """Fill the row with elements as float32, and zeros behind them."""
    end = begin + count
    if memory.kind == FLOAT32:
        row[:count] = memory.floats[begin:end]
    elif memory.kind == FLOAT64:
        doubles = memory.doubles[begin:end]
        for i in range(count):
            row[i] = np.float32(doubles[i])
    else:
        halves = memory.halves[begin:end]
        for i in range(count):
            code = np.int64(halves[i])
            row[i] = from_bits(code << 16) if memory.kind == BFLOAT16 else fp16_value(code)
    row[count:] = _ZERO


@compiled
def store(memory: Memory, begin: Int, count: Int, row: Floats, factor: Float) -> None:
    """Write ``count`` of the row's elements, multiplied by the factor."""
    end = begin + count
    if memory.kind == FLOAT32:
        floats = memory.floats[begin:end]
        for i in range(count):
            floats[i] = row[i] * factor
    elif memory.kind == FLOAT64:
        doubles = memory.doubles[begin:end]
        for i in range(count):
            doubles[i] = row[i] * factor
    else:
        halves = memory.halves[begin:end]
        for i in range(count):
            bits = to_bits(row[i] * factor)
            halves[i] = bf16_bits(bits) if memory.kind == BFLOAT16 else fp16_bits(bits)


@compiled
def load_chunks(source: Source, chunk: Int, many: Int, job: Job, tiles: Tiles) -> None:
    """Fill ``tiles.coefs`` with the chunks' elements or, transformed, their unscaled coefficients."""
    if job.rows > 1:
        load_block(source, chunk, job, tiles)
        return
    flat, begin = tiles.coefs.reshape(-1)[: many * job.chunk_cols], chunk * job.chunk_cols
    load(source.memory, begin, min(flat.size, job.cols - begin), flat)
    if job.transformed:
        transform_flat(tiles, many, job.chunk_cols, source.along)


@compiled
def load_block(source: Source, chunk: Int, job: Job, tiles: Tiles) -> None:
    height, width, work, turned = job.chunk_rows, job.chunk_cols, tiles.work, tiles.turned
    top, left = chunk // job.grid_cols * height, chunk % job.grid_cols * width
    here = min(height, job.rows - top)
    if source.down.height > here:
        work[:] = _ZERO
    for i in range(here):
        begin = (top + i) * job.cols + left
        load(source.memory, begin, min(width, job.cols - left), work[i])
    apply(work, width, source.down)
    clear_spare(turned, source.along, width)
    for i in range(height):
        line = work[source.down.outputs[i]]
        for j in range(width):
            turned[j, i] = line[j]
    apply(turned, height, source.along)
    for j in range(width):
        line = turned[source.along.outputs[j]]
        for i in range(height):
            tiles.coefs[0, j * height + i] = line[i]


@compiled
def store_chunks(source: Source, chunk: Int, many: Int, job: Job, tiles: Tiles) -> None:
    """Write what :func:`load_chunks` read; ``source`` holds the transforms that lead back."""
    if job.rows > 1:
        store_block(source, chunk, job, tiles)
        return
    if job.transformed:
        transform_flat(tiles, many, job.chunk_cols, source.along)
    flat, begin = tiles.coefs.reshape(-1)[: many * job.chunk_cols], chunk * job.chunk_cols
    store(source.memory, begin, min(flat.size, job.cols - begin), flat, source.factor)


@compiled
def store_block(source: Source, chunk: Int, job: Job, tiles: Tiles) -> None:
    height, width, work, turned = job.chunk_rows, job.chunk_cols, tiles.work, tiles.turned
    clear_spare(turned, source.along, width)
    for j in range(width):
        line = turned[source.along.inputs[j]]
        for i in range(height):
            line[i] = tiles.coefs[0, j * height + i]
    apply(turned, height, source.along)
    clear_spare(work, source.down, height)
    for j in range(width):
        line = turned[source.along.outputs[j]]
        for i in range(height):
            work[source.down.inputs[i], j] = line[i]
    apply(work, width, source.down)
    top, left = chunk // job.grid_cols * height, chunk % job.grid_cols * width
    for i in range(min(height, job.rows - top)):
        begin, line = (top + i) * job.cols + left, work[source.down.outputs[i]]
        store(source.memory, begin, min(width, job.cols - left), line, source.factor)


@compiled
def transform_flat(tiles: Tiles, many: Int, length: Int, along: Transform) -> None:
    """Transform the rows of ``coefs``, side by side."""
    rows, turned = tiles.coefs, tiles.turned
    clear_spare(turned, along, length)
    for j in range(length):
        line = turned[along.inputs[j]]
        for i in range(many):
            line[i] = rows[i, j]
    apply(turned, many, along)
    for j in range(length):
        line = turned[along.outputs[j]]
        for i in range(many):
            rows[i, j] = line[i]


@compiled
def clear_spare(work: Floats, transform: Transform, length: Int) -> None:
    """Zero the rows, if the transform has more than it is given."""
    if transform.height > length:
        work[:] = _ZERO
