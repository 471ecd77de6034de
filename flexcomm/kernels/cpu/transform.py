"""Chunks in and out of a tensor's memory, transformed in cache on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flexcomm.kernels import butterflies
from flexcomm.kernels.cpu.codelets import (
    LANES,
    LENGTH,
    dct,
    dct_of_turned,
    dct_turned,
    idct,
    idct_of_turned,
    idct_turned,
)
from flexcomm.kernels.cpu.compiler import compiled
from flexcomm.kernels.cpu.floats import bf16_bits, fp16_bits, fp16_value, from_bits, to_bits
from flexcomm.kernels.cpu.records import BFLOAT16, FLOAT32, FLOAT64

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import Float, Floats, Halves, Int, Ints
    from flexcomm.kernels.cpu.records import Job, Memory, Source, Tiles, Transform

__all__ = ["lanes_of", "load_chunks", "store_chunks"]

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TILE = 4096
_IN_ORDER = np.arange(LENGTH, dtype=np.int32)
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


class Block(NamedTuple):
    """Some rows of a matrix, ``stride`` elements apart, in a tensor's memory."""

    begin: Int
    stride: Int
    rows: Int
    cols: Int


@compiled
def load(memory: Memory, block: Block, work: Floats) -> None:
    """Fill rows with a block's elements as float32, and zeros behind them.

    Called for a block, not for a row: handing over what it needs would cost more than to copy 64 elements.
    """
    if memory.kind == FLOAT32:
        load_floats(memory.floats, block, work)
    elif memory.kind == FLOAT64:
        load_floats(memory.doubles, block, work)
    else:
        load_halves(memory.halves, memory.kind, block, work)
    for i in range(block.rows):
        for j in range(block.cols, work.shape[1]):
            work[i, j] = _ZERO


@compiled
def load_floats(floats: Any, block: Block, work: Floats) -> None:
    for i in range(block.rows):
        begin = block.begin + i * block.stride
        line, row = floats[begin : begin + block.cols], work[i]
        for j in range(block.cols):
            row[j] = line[j]


@compiled
def load_halves(halves: Halves, kind: Int, block: Block, work: Floats) -> None:
    for i in range(block.rows):
        begin = block.begin + i * block.stride
        line, row = halves[begin : begin + block.cols], work[i]
        for j in range(block.cols):
            code = np.int64(line[j])
            row[j] = from_bits(code << 16) if kind == BFLOAT16 else fp16_value(code)


@compiled
def store(memory: Memory, block: Block, work: Floats, order: Ints, factor: Float) -> None:
    """Write a block's elements: rows taken in the given order, multiplied by the factor."""
    if memory.kind == FLOAT32:
        store_floats(memory.floats, block, work, order, factor)
    elif memory.kind == FLOAT64:
        store_floats(memory.doubles, block, work, order, factor)
    else:
        store_halves(memory.halves, memory.kind, block, work, order, factor)


@compiled
def store_floats(floats: Any, block: Block, work: Floats, order: Ints, factor: Float) -> None:
    for i in range(block.rows):
        begin = block.begin + i * block.stride
        line, row = floats[begin : begin + block.cols], work[order[i]]
        for j in range(block.cols):
            line[j] = row[j] * factor


@compiled
def store_halves(halves: Halves, kind: Int, block: Block, work: Floats, order: Ints, factor: Float) -> None:
    for i in range(block.rows):
        begin = block.begin + i * block.stride
        line, row = halves[begin : begin + block.cols], work[order[i]]
        for j in range(block.cols):
            bits = to_bits(row[j] * factor)
            line[j] = bf16_bits(bits) if kind == BFLOAT16 else fp16_bits(bits)


@compiled
def flat_block(chunk: Int, many: Int, job: Job) -> Block:
    """Return chunks of a single row, which lie one behind the other, as one long row."""
    begin = chunk * job.chunk_cols
    return Block(begin, 0, 1, min(many * job.chunk_cols, job.cols - begin))


@compiled
def square_block(chunk: Int, job: Job) -> Block:
    top, left = chunk // job.grid_cols * job.chunk_rows, chunk % job.grid_cols * job.chunk_cols
    rows, cols = min(job.chunk_rows, job.rows - top), min(job.chunk_cols, job.cols - left)
    return Block(top * job.cols + left, job.cols, rows, cols)


@compiled
def load_chunks(source: Source, chunk: Int, many: Int, job: Job, tiles: Tiles) -> None:
    """Fill ``tiles.coefs`` with the chunks' elements or, transformed, their unscaled coefficients."""
    if job.rows > 1:
        load_block(source, chunk, job, tiles)
        return
    flat = tiles.coefs.reshape(1, tiles.coefs.size)
    load(source.memory, flat_block(chunk, many, job), flat)
    if job.transformed and suits_codelets(job):
        coefs = tiles.coefs.reshape(-1)
        for lane in range(0, many, LANES):
            dct_of_turned(coefs, lane * LENGTH, LENGTH, coefs, lane * LENGTH, LENGTH, _ONE)
    elif job.transformed:
        transform_flat(tiles, many, job.chunk_cols, source.along)


@compiled
def load_block(source: Source, chunk: Int, job: Job, tiles: Tiles) -> None:
    block, work, turned = square_block(chunk, job), tiles.work, tiles.turned
    if suits_codelets(job) and lies_open(source.memory, block):
        load_square(source.memory.floats, block.begin, block.stride, tiles)
        return
    if source.down.height > block.rows:
        work[:] = _ZERO
    load(source.memory, block, work)
    if suits_codelets(job):
        load_square(work.reshape(-1), 0, LENGTH, tiles)
        return
    height, width = job.chunk_rows, job.chunk_cols
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
def suits_codelets(job: Job) -> bool:
    return bool(job.chunk_cols == LENGTH and (job.rows == 1 or job.chunk_rows == LENGTH))


@compiled
def lies_open(memory: Memory, block: Block) -> bool:
    """Return whether codelets can work on a block where it is: it is whole, and of their type."""
    return bool(memory.kind == FLOAT32 and block.rows == LENGTH and block.cols == LENGTH)


@compiled
def load_square(floats: Floats, begin: Int, stride: Int, tiles: Tiles) -> None:
    coefs, turned, pitch = tiles.coefs.reshape(-1), tiles.turned.reshape(-1), tiles.turned.shape[1]
    for lane in range(0, LENGTH, LANES):
        dct_turned(floats, begin + lane, stride, turned, lane * pitch, pitch, _ONE)
    for lane in range(0, LENGTH, LANES):
        dct(turned, lane, pitch, coefs, lane, LENGTH, _ONE)


@compiled
def store_square(floats: Floats, begin: Int, stride: Int, factor: Float, tiles: Tiles) -> None:
    coefs, turned, pitch = tiles.coefs.reshape(-1), tiles.turned.reshape(-1), tiles.turned.shape[1]
    for lane in range(0, LENGTH, LANES):
        idct_turned(coefs, lane, LENGTH, turned, lane * pitch, pitch, _ONE)
    for lane in range(0, LENGTH, LANES):
        idct(turned, lane, pitch, floats, begin + lane, stride, factor)


@compiled
def store_chunks(source: Source, chunk: Int, many: Int, job: Job, tiles: Tiles) -> None:
    """Write what :func:`load_chunks` read; ``source`` holds the transforms that lead back."""
    if job.rows > 1:
        store_block(source, chunk, job, tiles)
        return
    if job.transformed and suits_codelets(job):
        coefs = tiles.coefs.reshape(-1)
        for lane in range(0, many, LANES):
            idct_of_turned(coefs, lane * LENGTH, LENGTH, coefs, lane * LENGTH, LENGTH, _ONE)
    elif job.transformed:
        transform_flat(tiles, many, job.chunk_cols, source.along)
    flat = tiles.coefs.reshape(1, tiles.coefs.size)
    store(source.memory, flat_block(chunk, many, job), flat, _IN_ORDER, source.factor)


@compiled
def store_block(source: Source, chunk: Int, job: Job, tiles: Tiles) -> None:
    block, work, turned = square_block(chunk, job), tiles.work, tiles.turned
    if suits_codelets(job):
        if lies_open(source.memory, block):
            store_square(source.memory.floats, block.begin, block.stride, source.factor, tiles)
        else:
            store_square(work.reshape(-1), 0, LENGTH, _ONE, tiles)
            store(source.memory, block, work, _IN_ORDER, source.factor)
        return
    height, width = job.chunk_rows, job.chunk_cols
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
    store(source.memory, block, work, source.down.outputs, source.factor)


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
