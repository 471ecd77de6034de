"""From tensors to coefficients and back, chunk by chunk, in cache.

``accumulate_*`` fill the coefficients of chunks, ``decay * state + factor * coefficient``; ``decode_*`` average what
all senders sent of chunks and transform it back, and the epilogue stores it or steps by it. There is one of each for
squares of 64 by 64, for rows of 64, for chunks that are not transformed, and for all others.

A chunk with a nonfinite element is found before its state is written.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import torch

from flexcomm.kernels import butterflies
from flexcomm.kernels.base import EpilogueKind, Problem
from flexcomm.kernels.cpu import tables as t
from flexcomm.kernels.cpu.bits import bf16_value, fp16_bits, fp16_value, nearest_bf16
from flexcomm.kernels.cpu.codelets import (
    LANES,
    LENGTH,
    SQUARE,
    SQUARE_BINS,
    accumulate_square,
    dct_flat,
    dct_square,
    idct_flat,
    idct_square,
    load_square,
    scale_square,
    step_square,
)
from flexcomm.kernels.cpu.compiler import Float, Floats, Int, Ints, Longs, cached_kernel, compiled
from flexcomm.kernels.cpu.instructions import (
    floats_at,
    fused,
    halves_at,
    ints_at,
    longs_at,
    lowest_bit,
    prefetch,
    words_at,
)
from flexcomm.kernels.cpu.tables import coefs_at, entries_in, float_of, picks_of, sent_of

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_BF16, _FP16 = (t.DTYPES.index(dtype) for dtype in (torch.bfloat16, torch.float16))
LIMIT = (127 + 100) << 23
"""The bits of 2**100: elements stay below."""
_NONFINITE = int(Problem.NONFINITE)
_STORE, _SIGN_STEP, _PLAIN_STEP = range(len(get_args(EpilogueKind)))
_BUTTERFLY, _ROTATE, _SCALE = butterflies.BUTTERFLY, butterflies.ROTATE, butterflies.SCALE


@compiled
def largest(address: Int, numel: Int) -> Int:
    """Return the largest magnitude, as bits."""
    top, x = np.int32(0), ints_at(address)
    for i in range(numel):
        # numba makes int64 of two int32, and half as many fit a vector.
        size = np.int32(x[i] & _MAGNITUDE)
        top = size if size > top else top
    return np.int64(top)


@compiled
def clear(address: Int, numel: Int) -> None:
    """Zero integers, or floats."""
    numbers = ints_at(address)
    for i in range(numel):
        numbers[i] = 0


@compiled
def nonfinite_at(job: Longs, chunk: Int) -> Int:
    job[t.FAILED] = chunk
    return _NONFINITE


@compiled
def element_at(row: Longs, place: Int) -> Int:
    """Return the address of an element of the tensor."""
    return row[t.X] + (2 if row[t.DTYPE] else 4) * place


@compiled
def pitch_of(row: Longs) -> Int:
    """Return how far apart rows of the tensor are, in floats."""
    return row[t.COLS] // 2 if row[t.DTYPE] else row[t.COLS]


@compiled
def load_block(row: Longs, place: Int, rows: Int, cols: Int, tile: Int, width: Int) -> None:
    """Copy a block of the tensor into rows of a tile."""
    for i in range(rows):
        source, line = element_at(row, place + i * row[t.COLS]), floats_at(tile + 4 * i * width)
        given, halves = floats_at(source), halves_at(source)
        # A loop for each dtype: only so they fit into vectors.
        if row[t.DTYPE] == _BF16:
            for j in range(cols):
                line[j] = bf16_value(halves[j])
        elif row[t.DTYPE] == _FP16:
            for j in range(cols):
                line[j] = fp16_value(halves[j])
        else:
            for j in range(cols):
                line[j] = given[j]


@compiled
def store_block(row: Longs, place: Int, rows: Int, cols: Int, tile: Int, width: Int) -> None:
    """Copy rows of a tile into a block of the tensor."""
    for i in range(rows):
        target, line = element_at(row, place + i * row[t.COLS]), floats_at(tile + 4 * i * width)
        filled, halves, bits = floats_at(target), halves_at(target), words_at(tile + 4 * i * width)
        if row[t.DTYPE] == _BF16:
            for j in range(cols):
                halves[j] = nearest_bf16(bits[j])
        elif row[t.DTYPE] == _FP16:
            for j in range(cols):
                halves[j] = fp16_bits(bits[j])
        else:
            for j in range(cols):
                filled[j] = line[j]


@compiled
def block_of(row: Longs, chunk: Int) -> tuple[Int, Int, Int]:
    """Return where a chunk of a matrix begins, and how many of its rows and columns are inside."""
    top, left = chunk // row[t.GRID_COLS] * row[t.CHUNK_ROWS], chunk % row[t.GRID_COLS] * row[t.CHUNK_COLS]
    return (
        top * row[t.COLS] + left,
        min(row[t.CHUNK_ROWS], row[t.ROWS] - top),
        min(row[t.CHUNK_COLS], row[t.COLS] - left),
    )


@compiled
def is_full_square(row: Longs, rows: Int, cols: Int) -> Int:
    """Return whether a square is one of floats, and entirely inside of the tensor."""
    return rows == LENGTH and cols == LENGTH and row[t.DTYPE] == 0


@cached_kernel
def accumulate_squares(row: Longs, job: Longs) -> Int:
    """Fill the coefficients of squares of 64 by 64, and their maxima."""
    tile = job[t.TILES]
    job[t.TARGET], job[t.TURNED], job[t.PITCH] = tile, tile + 4 * SQUARE, pitch_of(row)
    for at in range(job[t.FIRST], job[t.LAST]):
        (place, rows, cols), after = block_of(row, at), min(at + 1, row[t.CHUNKS] - 1)
        job[t.AHEAD], job[t.STATE_AHEAD] = element_at(row, block_of(row, after)[0]), row[t.STATE] + 4 * SQUARE * after
        if is_full_square(row, rows, cols):
            job[t.SOURCE] = element_at(row, place)
            top = load_square(row, job)
        else:
            if rows * cols < SQUARE:
                clear(tile, SQUARE)
            load_block(row, place, rows, cols, tile, LENGTH)
            top = largest(tile, SQUARE)
        if top >= job[t.LIMIT]:
            return nonfinite_at(job, at)
        dct_square(row, job)
        job[t.SOURCE], job[t.STATE_AT] = coefs_at(row, job, at), row[t.STATE] + 4 * SQUARE * at
        job[t.MAXIMA] = job[t.TOPS] + 4 * SQUARE_BINS * (at - job[t.FIRST])
        if row[t.STATE]:
            accumulate_square(row, job)
        else:
            scale_square(row, job)
    return 0


@cached_kernel
def accumulate_flat(row: Longs, job: Longs) -> Int:
    """Fill the coefficients of rows of 64."""
    edge, tile = job[t.TILES], job[t.TILES] + 4 * LANES * LENGTH
    job[t.TARGET] = tile
    for at in range(job[t.FIRST], job[t.LAST], LANES):
        many, source = min(LANES, job[t.LAST] - at), element_at(row, at * LENGTH)
        numel = min(row[t.COLS] - at * LENGTH, many * LENGTH)
        if numel < LANES * LENGTH or row[t.DTYPE]:
            clear(edge, LANES * LENGTH)
            load_block(row, at * LENGTH, 1, numel, edge, 0)
            source = edge
        if largest(source, LANES * LENGTH) >= job[t.LIMIT]:
            return nonfinite_at(job, at)
        job[t.SOURCE] = source
        dct_flat(row, job)
        add_state(row, job, at, many * LENGTH, _ONE, tile)
    return 0


@compiled
def add_state(row: Longs, job: Longs, chunk: Int, numel: Int, factor: Float, coefs: Int) -> None:
    """Fill in coefficients, ``decay * state + factor * coefs``, or without a state the latter."""
    target, state = coefs_at(row, job, chunk), row[t.STATE] + 4 * chunk * row[t.NUMEL]
    out, before, given, decay = floats_at(target), floats_at(state), floats_at(coefs), float_of(job[t.DECAY])
    if row[t.STATE] == 0:
        for i in range(numel):
            out[i] = factor * given[i]
    elif state == target:
        # Where memory may overlap, loops do not fit into vectors: so there is one that is told of one array alone.
        for i in range(numel):
            out[i] = decay * out[i] + factor * given[i]
    else:
        for i in range(numel):
            out[i] = decay * before[i] + factor * given[i]


@cached_kernel
def accumulate_plain(row: Longs, job: Longs) -> Int:
    """Fill the coefficients of chunks that are not transformed."""
    numel, factor = row[t.NUMEL], float_of(row[t.FACTOR])
    for at in range(job[t.FIRST], job[t.LAST]):
        inside, source = min(numel, row[t.COLS] - at * numel), element_at(row, at * numel)
        if inside < numel or row[t.DTYPE]:
            clear(job[t.TILES], numel)
            load_block(row, at * numel, 1, inside, job[t.TILES], 0)
            source = job[t.TILES]
        if largest(source, numel) >= job[t.LIMIT]:
            return nonfinite_at(job, at)
        add_state(row, job, at, numel, factor, source)
    return 0


@compiled
def transform(
    source: Int, rows: Int, lanes: Int, target: Int, row_pitch: Int, lane_pitch: Int, row: Longs, at: Int, work: Int
) -> None:
    """Transform the columns of ``source[rows, lanes]``; the pitches are those of a row and a lane in ``target``.

    The list is in the tensor's columns from ``at`` on: the address of the rows of ``work`` that take the inputs, of
    those that have the outputs, and of how many there are; those of its steps and of their factors; and the number of
    steps.
    """
    places, filled = ints_at(row[at]), floats_at(target)
    clear(work, places[2 * rows] * lanes)
    for i in range(rows):
        given, taken = floats_at(source + 4 * i * lanes), floats_at(work + 4 * places[i] * lanes)
        for j in range(lanes):
            taken[j] = given[j]
    apply(work, lanes, ints_at(row[at + 1]), floats_at(row[at + 2]), row[at + 3])
    for i in range(rows):
        done = floats_at(work + 4 * places[rows + i] * lanes)
        for j in range(lanes):
            filled[i * row_pitch + j * lane_pitch] = done[j]


@compiled
def apply(work: Int, lanes: Int, steps: Ints, factors: Floats, count: Int) -> None:
    """Do the steps of a list on rows."""
    for number in range(count):
        code, c0, c1 = steps[3 * number], factors[2 * number], factors[2 * number + 1]
        x, y = floats_at(work + 4 * steps[3 * number + 1] * lanes), floats_at(work + 4 * steps[3 * number + 2] * lanes)
        if code == _BUTTERFLY:
            for lane in range(lanes):
                a, b = x[lane], y[lane]
                x[lane] = a + b
                y[lane] = a - b
        elif code == _ROTATE:
            for lane in range(lanes):
                a = fused(c0, y[lane], x[lane])
                b = fused(c1, a, y[lane])
                x[lane] = fused(c0, b, a)
                y[lane] = b
        elif code == _SCALE:
            for lane in range(lanes):
                x[lane] = c0 * x[lane]
        else:
            for lane in range(lanes):
                x[lane] = fused(c0, y[lane], x[lane])


@compiled
def transpose(source: Int, rows: Int, cols: Int, target: Int) -> None:
    """Copy a matrix, columns as rows."""
    given, turned = floats_at(source), floats_at(target)
    for i in range(rows):
        for j in range(cols):
            turned[j * rows + i] = given[i * cols + j]


@cached_kernel
def accumulate_any(row: Longs, job: Longs) -> Int:
    """Fill the coefficients of chunks of any size, by lists."""
    height, width, many = row[t.CHUNK_ROWS], row[t.CHUNK_COLS], at_once(row)
    room = many * row[t.NUMEL]
    tile, turned, work = job[t.TILES], job[t.TILES] + 4 * room, job[t.TILES] + 8 * room
    for at in range(job[t.FIRST], job[t.LAST], many):
        place, rows, cols = block_of(row, at)
        many_here = min(many, job[t.LAST] - at)
        if height == 1:
            cols = min(many_here * width, row[t.COLS] - at * width)
        clear(tile, room)
        load_block(row, place, rows, cols, tile, width)
        if largest(tile, room) >= job[t.LIMIT]:
            return nonfinite_at(job, at)
        if height == 1:
            # Rows fill a core's vectors together: as columns, one beside the other.
            transpose(tile, many, width, turned)
            transform(turned, width, many, tile, 1, width, row, t.ALONG, work)
        else:
            transform(tile, height, width, turned, 1, height, row, t.DOWN, work)
            transform(turned, width, height, tile, height, 1, row, t.ALONG, work)
        add_state(row, job, at, many_here * row[t.NUMEL], float_of(row[t.FACTOR]), tile)
    return 0


@compiled
def at_once(row: Longs) -> Int:
    """Return how many chunks are transformed together."""
    return LANES if row[t.CHUNK_ROWS] == 1 else 1


# --- back -------------------------------------------------------------------------------------------------------------


@cached_kernel
def add_sent(row: Longs, job: Longs) -> Int:
    """Add so much of what the only sender sent of chunks to their states as STAYS says."""
    stays = float_of(job[t.STAYS])
    for at in range(job[t.FIRST], job[t.LAST]):
        coefs, values, count = floats_at(coefs_at(row, job, at)), sent_of(row, job, 0, at), entries_in(row, job, 0, at)
        picks = picks_of(row, job, 0, at)
        for entry in range(count):
            coefs[entry if row[t.EVERYTHING] else picks[entry]] += stays * values[entry]
    return 0


@compiled
def sum_chunks(row: Longs, job: Longs, chunk: Int, many: Int, into: Int, counts: Int) -> None:
    """Add what all senders sent of some chunks to what is ``into``, which is zero, in their order, and divide.

    ``counts``, of how many senders sent each coefficient, are zero before and after.
    """
    numel, total, given, divides = row[t.NUMEL], floats_at(into), ints_at(counts), has_divisor(job)
    if row[t.EVERYTHING]:
        sum_everything(row, job, chunk, many * numel, total)
        return
    for sender in range(job[t.SENDERS]):
        values, picks, begin = sent_of(row, job, sender, chunk), picks_of(row, job, sender, chunk), 0
        for number in range(many):
            end = begin + entries_in(row, job, sender, chunk + number)
            for entry in range(begin, end):
                at = number * numel + picks[entry]
                total[at] += values[entry]
                if divides:
                    given[at] += 1
            begin = end
    for sender in range(job[t.SENDERS] if divides else 0):
        picks, begin = picks_of(row, job, sender, chunk), 0
        for number in range(many):
            end = begin + entries_in(row, job, sender, chunk + number)
            for entry in range(begin, end):
                divide(job, total, given, number * numel + picks[entry])
            begin = end


@compiled
def sum_everything(row: Longs, job: Longs, chunk: Int, numel: Int, total: Floats) -> None:
    """Add what all senders sent of some chunks of which they send everything, and divide."""
    for sender in range(job[t.SENDERS]):
        values = sent_of(row, job, sender, chunk)
        for i in range(numel):
            total[i] += values[i]
    if has_divisor(job):
        for i in range(numel):
            total[i] = total[i] / np.float32(job[t.DIVISOR])


@compiled
def has_divisor(job: Longs) -> Int:
    """Return whether sums are divided by more than one."""
    return job[t.SENDERS] > 1 or (job[t.DIVISOR] > 1 and job[t.COUNTED] == 0)


@compiled
def divide(job: Longs, total: Floats, given: Ints, at: Int) -> None:
    """Divide a sum by how many senders sent it or by their number, if that has not been done, and forget the count."""
    count = given[at] if job[t.COUNTED] or given[at] == 0 else job[t.DIVISOR]
    # By one does not change a bit.
    if count > 1:
        total[at] = total[at] / np.float32(count)
    given[at] = 0


@compiled
def stepped(kind: Int, x: Float, y: Float, lr: Float, keep: Float) -> Float:
    """Return what an element becomes by its average ``y``."""
    if kind == _SIGN_STEP:
        return keep * x - (lr if y > _ZERO else -lr if y < _ZERO else _ZERO)
    return keep * x - y if kind == _PLAIN_STEP else y


@compiled
def finish(row: Longs, job: Longs, place: Int, averages: Int, numel: Int, scratch: Int) -> None:
    """Do the epilogue of some elements of the tensor, one behind the other."""
    kind, lr, keep = job[t.EPILOGUE], float_of(job[t.LR]), float_of(job[t.KEEP])
    target = scratch if row[t.DTYPE] else element_at(row, place)
    if row[t.DTYPE] and kind != _STORE:
        load_block(row, place, 1, numel, scratch, 0)
    out, average = floats_at(target), floats_at(averages)
    # A loop for each kind: only so they fit into vectors.
    if kind == _STORE:
        for i in range(numel):
            out[i] = average[i]
    elif kind == _SIGN_STEP:
        for i in range(numel):
            out[i] = stepped(_SIGN_STEP, out[i], average[i], lr, keep)
    else:
        for i in range(numel):
            out[i] = stepped(_PLAIN_STEP, out[i], average[i], lr, keep)
    if row[t.DTYPE]:
        store_block(row, place, 1, numel, scratch, 0)


@compiled
def as_steps(job: Longs, averages: Floats, count: Int) -> None:
    """Turn averages into what a step takes off their elements."""
    if job[t.EPILOGUE] == _SIGN_STEP:
        lr = float_of(job[t.LR])
        for entry in range(count):
            averages[entry] = lr if averages[entry] > _ZERO else -lr if averages[entry] < _ZERO else _ZERO


@compiled
def step_elements(row: Longs, job: Longs, first: Int, picks: Ints, steps: Floats, count: Int) -> None:
    """Step so many elements of the chunk that begins at ``first``, without weight decay."""
    if row[t.DTYPE] == 0:
        out = floats_at(element_at(row, first))
        for entry in range(count):
            out[picks[entry]] -= steps[entry]
        return
    tile = job[t.TILES] + 4 * row[t.NUMEL]
    for entry in range(count):
        load_block(row, first + picks[entry], 1, 1, tile, 0)
        floats_at(tile)[0] -= steps[entry]
        store_block(row, first + picks[entry], 1, 1, tile, 0)


@compiled
def find_columns(row: Longs, job: Longs, chunk: Int, turned: Int, slots: Longs, rows_of: Longs) -> Int:
    """Find the columns of a square of which anything was sent; return how many there are.

    ``slots`` are their places side by side, ``rows_of`` the addresses of the rows of ``turned`` that they become.
    """
    used, bits = 0, np.uint64(0)
    for sender in range(job[t.SENDERS]):
        picks = picks_of(row, job, sender, chunk)
        for entry in range(entries_in(row, job, sender, chunk)):
            bits |= np.uint64(1) << np.uint64(picks[entry] & (LENGTH - 1))
    while bits:
        column = np.int64(lowest_bit(bits))
        slots[column], rows_of[used] = used, turned + 4 * LENGTH * column
        bits &= bits - np.uint64(1)
        used += 1
    return used


@compiled
def sum_columns(row: Longs, job: Longs, chunk: Int, columns: Floats, given: Ints, slots: Longs) -> None:
    """Add what all senders sent of a square, as :func:`sum_chunks` does, to its columns side by side."""
    for sender in range(job[t.SENDERS]):
        picks, values = picks_of(row, job, sender, chunk), sent_of(row, job, sender, chunk)
        for entry in range(entries_in(row, job, sender, chunk)):
            at = side_by_side(picks[entry], slots)
            columns[at] += values[entry]
            given[at] += 1
    for sender in range(job[t.SENDERS]):
        picks = picks_of(row, job, sender, chunk)
        for entry in range(entries_in(row, job, sender, chunk)):
            divide(job, columns, given, side_by_side(picks[entry], slots))


@compiled
def side_by_side(place: Int, slots: Longs) -> Int:
    """Return where an element of a square is when only some of its columns are there, side by side."""
    column = place & (LENGTH - 1)
    return place - column + slots[column]


@cached_kernel
def decode_squares(row: Longs, job: Longs) -> Int:
    """Finish squares of 64 by 64.

    Columns of a chunk without a coefficient are zero: those with one are transformed side by side, then the rows.
    """
    everything, columns, turned = row[t.EVERYTHING], job[t.TILES], job[t.TILES] + 4 * SQUARE
    tile, counts, slots_at = turned + 4 * SQUARE, job[t.MEMORY], job[t.MEMORY] + 4 * SQUARE
    slots, rows_of = longs_at(slots_at), longs_at(slots_at + 8 * LENGTH)
    job[t.TARGET], job[t.TURNED], job[t.TURNED_ROWS], job[t.PITCH] = tile, turned, slots_at + 8 * LENGTH, pitch_of(row)
    clear(columns, 2 * SQUARE)
    clear(counts, SQUARE)
    for column in range(LENGTH):
        rows_of[column] = turned + 4 * LENGTH * column
    for at in range(job[t.FIRST], job[t.LAST]):
        used = LENGTH
        if everything:
            sum_everything(row, job, at, SQUARE, floats_at(columns))
        else:
            used = find_columns(row, job, at, turned, slots, rows_of)
            sum_columns(row, job, at, floats_at(columns), ints_at(counts), slots)
        for lane in range(used, used + LANES):
            rows_of[lane] = tile
        job[t.SOURCE], job[t.GROUPS] = columns, -(-used // LANES)
        job[t.AHEAD] = element_at(row, block_of(row, min(at + 1, row[t.CHUNKS] - 1))[0])
        idct_square(row, job)
        finish_square(row, job, at, tile)
        if everything:
            clear(columns, SQUARE)
        else:
            forget_columns(row, job, at, floats_at(columns), slots)
            for lane in range(used):
                clear(rows_of[lane], LENGTH)
    return 0


@compiled
def forget_columns(row: Longs, job: Longs, chunk: Int, columns: Floats, slots: Longs) -> None:
    """Zero what :func:`sum_columns` filled."""
    for sender in range(job[t.SENDERS]):
        picks = picks_of(row, job, sender, chunk)
        for entry in range(entries_in(row, job, sender, chunk)):
            columns[side_by_side(picks[entry], slots)] = _ZERO


@compiled
def finish_square(row: Longs, job: Longs, chunk: Int, tile: Int) -> None:
    """Do the epilogue of a square."""
    place, rows, cols = block_of(row, chunk)
    if is_full_square(row, rows, cols):
        job[t.SOURCE] = element_at(row, place)
        step_square(row, job)
    else:
        for i in range(rows):
            finish(row, job, place + i * row[t.COLS], tile + 4 * i * LENGTH, cols, tile + 4 * SQUARE)


@cached_kernel
def decode_flat(row: Longs, job: Longs) -> Int:
    """Finish rows of 64."""
    tile, counts = job[t.TILES], job[t.MEMORY]
    clear(counts, LANES * LENGTH)
    job[t.SOURCE], job[t.TARGET] = tile, tile
    for at in range(job[t.FIRST], job[t.LAST], LANES):
        clear(tile, LANES * LENGTH)
        many = min(LANES, job[t.LAST] - at)
        sum_chunks(row, job, at, many, tile, counts)
        idct_flat(row, job)
        numel = min(many * LENGTH, row[t.COLS] - at * LENGTH)
        finish(row, job, at * LENGTH, tile, numel, tile + 4 * LANES * LENGTH)
    return 0


@compiled
def step_shared(row: Longs, job: Longs) -> None:
    """Step the elements that all senders sent of chunks; they sent the same ones."""
    divisor, numel, size = np.float32(job[t.DIVISOR]), row[t.NUMEL], 2 if row[t.DTYPE] else 4
    for at in range(job[t.FIRST], job[t.LAST]):
        picks, total, first, count = picks_of(row, job, 0, at), sent_of(row, job, 0, at), at * numel, row[t.K]
        for entry in range(count):
            total[entry] = _ZERO + total[entry]
        for sender in range(1, job[t.SENDERS]):
            values = sent_of(row, job, sender, at)
            for entry in range(count):
                total[entry] += values[entry]
        if job[t.DIVISOR] > 1:
            for entry in range(count):
                total[entry] = total[entry] / divisor
        as_steps(job, total, count)
        ahead, next_chunk = picks_of(row, job, 0, min(at + 1, job[t.LAST] - 1)), row[t.X] + size * (first + numel)
        for entry in range(count):
            prefetch(next_chunk + size * ahead[entry])
        # Zeros behind a tensor's end may be sent, too.
        while count and first + picks[count - 1] >= row[t.COLS]:
            count -= 1
        step_elements(row, job, first, picks, total, count)


@cached_kernel
def decode_plain(row: Longs, job: Longs) -> Int:
    """Finish chunks that are not transformed: a step without weight decay touches only what was sent."""
    numel = row[t.NUMEL]
    touches_few = job[t.EPILOGUE] != _STORE and float_of(job[t.KEEP]) == _ONE and not row[t.EVERYTHING]
    if touches_few and job[t.BEFORE] == 0 and (job[t.SENDERS] == 1 or job[t.PICK_PITCH] == 0):
        step_shared(row, job)
        return 0
    tile, counts, average = job[t.TILES], job[t.MEMORY], floats_at(job[t.TILES])
    clear(tile, numel)
    clear(counts, numel)
    for at in range(job[t.FIRST], job[t.LAST]):
        sum_chunks(row, job, at, 1, tile, counts)
        if touches_few:
            step_sent(row, job, at, average)
        else:
            finish(row, job, at * numel, tile, min(numel, row[t.COLS] - at * numel), tile + 4 * numel)
            clear(tile, numel)
    return 0


@compiled
def step_sent(row: Longs, job: Longs, chunk: Int, average: Floats) -> None:
    """Step the elements of a chunk that anybody sent, and zero their averages."""
    first = chunk * row[t.NUMEL]
    for sender in range(job[t.SENDERS]):
        picks, count = picks_of(row, job, sender, chunk), entries_in(row, job, sender, chunk)
        # What was sent has been added up.
        steps = sent_of(row, job, sender, chunk)
        for entry in range(count):
            # An average of zero moves nothing: so an entry that another sender has, too, is used once.
            steps[entry] = average[picks[entry]]
            average[picks[entry]] = _ZERO
        as_steps(job, steps, count)
        while count and first + picks[count - 1] >= row[t.COLS]:
            count -= 1
        step_elements(row, job, first, picks, steps, count)


@cached_kernel
def decode_any(row: Longs, job: Longs) -> Int:
    """Finish chunks of any size, by lists; they are those that lead back."""
    numel, factor, pitch = row[t.NUMEL], float_of(row[t.FACTOR]), row[t.COLS]
    height, width, many = row[t.CHUNK_ROWS], row[t.CHUNK_COLS], at_once(row)
    room = many * numel
    tile, turned, work = job[t.TILES], job[t.TILES] + 4 * room, job[t.TILES] + 8 * room
    counts, averages = job[t.MEMORY], floats_at(tile)
    clear(counts, room)
    for at in range(job[t.FIRST], job[t.LAST], many):
        clear(tile, room)
        many_here = min(many, job[t.LAST] - at)
        sum_chunks(row, job, at, many_here, tile, counts)
        if height == 1:
            transpose(tile, many, width, turned)
            transform(turned, width, many, tile, 1, width, row, t.ALONG, work)
        else:
            transform(tile, width, height, turned, 1, width, row, t.ALONG, work)
            transform(turned, height, width, tile, width, 1, row, t.DOWN, work)
        for i in range(room):
            averages[i] = averages[i] * factor
        place, rows, cols = block_of(row, at)
        if height == 1:
            cols = min(many_here * width, pitch - at * width)
        for i in range(rows):
            finish(row, job, place + i * pitch, tile + 4 * i * width, cols, turned)
    return 0
