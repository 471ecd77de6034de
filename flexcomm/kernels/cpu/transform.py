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
    halves_at,
    ints_at,
    longs_at,
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
_BUTTERFLY, _MIX, _SCALE = butterflies.BUTTERFLY, butterflies.MIX, butterflies.SCALE


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
def is_whole(row: Longs, rows: Int, cols: Int) -> Int:
    """Return whether a square is one of floats, and entirely inside of the tensor."""
    return rows == LENGTH and cols == LENGTH and row[t.DTYPE] == 0


@cached_kernel
def accumulate_squares(row: Longs, job: Longs) -> Int:
    """Fill the coefficients of squares of 64 by 64, and their maxima."""
    tile = job[t.TILES]
    job[t.TARGET], job[t.TURNED], job[t.PITCH] = tile, tile + 4 * SQUARE, row[t.COLS]
    for at in range(job[t.FIRST], job[t.LAST]):
        (place, rows, cols), after = block_of(row, at), min(at + 1, row[t.CHUNKS] - 1)
        job[t.AHEAD], job[t.STATE_AHEAD] = element_at(row, block_of(row, after)[0]), row[t.STATE] + 4 * SQUARE * after
        if is_whole(row, rows, cols):
            job[t.SOURCE] = element_at(row, place)
            top = load_square(row, job)
        else:
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
        code, own = steps[3 * number], 4 * number
        x, y = floats_at(work + 4 * steps[3 * number + 1] * lanes), floats_at(work + 4 * steps[3 * number + 2] * lanes)
        c0, c1, c2, c3 = factors[own], factors[own + 1], factors[own + 2], factors[own + 3]
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
def transpose(source: Int, rows: Int, cols: Int, target: Int) -> None:
    """Copy a matrix, columns as rows."""
    given, turned = floats_at(source), floats_at(target)
    for i in range(rows):
        for j in range(cols):
            turned[j * rows + i] = given[i * cols + j]


@cached_kernel
def accumulate_any(row: Longs, job: Longs) -> Int:
    """Fill the coefficients of chunks of any size, by lists."""
    height, width, many = row[t.CHUNK_ROWS], row[t.CHUNK_COLS], side_by_side(row)
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
def side_by_side(row: Longs) -> Int:
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
def add_chunks(row: Longs, job: Longs, chunk: Int, many: Int, into: Int, marks: Int, list_at: Int) -> Int:
    """Add what all senders sent of some chunks to what is ``into``, which is zero, in their order, and divide.

    Returns how many coefficients are listed; none, if everything was sent. ``marks`` are zero before and after.
    """
    places, numel = 0, row[t.NUMEL]
    total, given, touched = floats_at(into), ints_at(marks), ints_at(list_at)
    for sender in range(job[t.SENDERS]):
        values, picks, entry = sent_of(row, job, sender, chunk), picks_of(row, job, sender, chunk), 0
        if row[t.EVERYTHING]:
            for i in range(many * numel):
                total[i] += values[i]
            continue
        for number in range(many):
            end = entry + entries_in(row, job, sender, chunk + number)
            while entry < end:
                at = number * numel + picks[entry]
                total[at] += values[entry]
                touched[places] = at
                places += given[at] == 0
                given[at] += 1
                entry += 1
    if row[t.EVERYTHING] and job[t.DIVISOR] != 1:
        for i in range(many * numel):
            total[i] = total[i] / np.float32(job[t.DIVISOR])
    for place in range(places):
        at = touched[place]
        # By one does not change a bit.
        total[at] = total[at] / np.float32(given[at] if job[t.COUNTED] else job[t.DIVISOR])
        given[at] = 0
    return places


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
def step_element(row: Longs, job: Longs, place: Int, average: Float) -> None:
    """Step one element of the tensor, without weight decay."""
    tile = job[t.TILES] + 4 * row[t.NUMEL] if row[t.DTYPE] else element_at(row, place)
    if row[t.DTYPE]:
        load_block(row, place, 1, 1, tile, 0)
    floats_at(tile)[0] = stepped(job[t.EPILOGUE], floats_at(tile)[0], average, float_of(job[t.LR]), _ONE)
    if row[t.DTYPE]:
        store_block(row, place, 1, 1, tile, 0)


@compiled
def sort_columns(total: Floats, touched: Ints, count: Int, columns: Floats, slots: Longs) -> Int:
    """Copy the columns of a square that hold something side by side; return how many there are.

    ``slots`` are their new places, -1 for the others.
    """
    used = 0
    for place in range(count):
        at = touched[place]
        column = at & (LENGTH - 1)
        if slots[column] < 0:
            slots[column] = used
            used += 1
        columns[at - column + slots[column]] = total[at]
        total[at] = _ZERO
    return used


@cached_kernel
def decode_squares(row: Longs, job: Longs) -> Int:
    """Finish squares of 64 by 64.

    Columns of a chunk without a coefficient are zero: those with one are transformed side by side, then the rows.
    """
    everything, total, columns = row[t.EVERYTHING], job[t.TILES], job[t.TILES] + 4 * SQUARE
    turned, tile = columns + 4 * SQUARE, columns + 8 * SQUARE
    marks, touched = job[t.MEMORY], job[t.MEMORY] + 4 * SQUARE
    slots, turned_rows = longs_at(touched + 4 * (SQUARE + LANES)), touched + 4 * (SQUARE + LANES) + 8 * LENGTH
    rows_of = longs_at(turned_rows)
    job[t.SOURCE], job[t.TARGET], job[t.TURNED], job[t.TURNED_ROWS] = columns, tile, turned, turned_rows
    job[t.PITCH] = row[t.COLS]
    clear(total, 3 * SQUARE)
    clear(marks, SQUARE)
    for column in range(LENGTH):
        slots[column] = column if everything else -1
    for at in range(job[t.FIRST], job[t.LAST]):
        count = add_chunks(row, job, at, 1, total, marks, touched)
        used = LENGTH
        if not everything:
            used = sort_columns(floats_at(total), ints_at(touched), count, floats_at(columns), slots)
        for lane in range(used, used + LANES):
            rows_of[lane] = tile
        for column in range(LENGTH):
            if slots[column] >= 0:
                rows_of[slots[column]] = turned + 4 * LENGTH * column
        job[t.SOURCE], job[t.GROUPS] = total if everything else columns, -(-used // LANES)
        job[t.AHEAD] = element_at(row, block_of(row, min(at + 1, row[t.CHUNKS] - 1))[0])
        idct_square(row, job)
        finish_square(row, job, at, tile)
        if everything:
            clear(total, SQUARE)
        else:
            forget_columns(ints_at(touched), count, floats_at(columns), slots, turned)
    return 0


@compiled
def finish_square(row: Longs, job: Longs, chunk: Int, tile: Int) -> None:
    """Do the epilogue of a square."""
    place, rows, cols = block_of(row, chunk)
    if is_whole(row, rows, cols):
        job[t.SOURCE] = element_at(row, place)
        step_square(row, job)
    else:
        for i in range(rows):
            finish(row, job, place + i * row[t.COLS], tile + 4 * i * LENGTH, cols, tile + 4 * SQUARE)


@compiled
def forget_columns(touched: Ints, count: Int, columns: Floats, slots: Longs, turned: Int) -> None:
    """Zero what :func:`sort_columns` filled, and the rows that it became."""
    for place in range(count):
        column = touched[place] & (LENGTH - 1)
        columns[touched[place] - column + slots[column]] = _ZERO
    for column in range(LENGTH):
        if slots[column] >= 0:
            slots[column] = -1
            clear(turned + 4 * column * LENGTH, LENGTH)


@cached_kernel
def decode_flat(row: Longs, job: Longs) -> Int:
    """Finish rows of 64."""
    tile, marks, touched = job[t.TILES], job[t.MEMORY], job[t.MEMORY] + 4 * LANES * LENGTH
    clear(marks, LANES * LENGTH)
    job[t.SOURCE], job[t.TARGET] = tile, tile
    for at in range(job[t.FIRST], job[t.LAST], LANES):
        clear(tile, LANES * LENGTH)
        many = min(LANES, job[t.LAST] - at)
        add_chunks(row, job, at, many, tile, marks, touched)
        idct_flat(row, job)
        numel = min(many * LENGTH, row[t.COLS] - at * LENGTH)
        finish(row, job, at * LENGTH, tile, numel, tile + 4 * LANES * LENGTH)
    return 0


@compiled
def step_shared(row: Longs, job: Longs) -> None:
    """Step the elements that all senders sent of chunks; they sent the same ones."""
    divisor, count = np.float32(job[t.DIVISOR]), row[t.K]
    for at in range(job[t.FIRST], job[t.LAST]):
        picks, total = picks_of(row, job, 0, at), sent_of(row, job, 0, at)
        if at + 1 < job[t.LAST]:
            ahead = picks_of(row, job, 0, at + 1)
            for entry in range(count):
                prefetch(element_at(row, (at + 1) * row[t.NUMEL] + ahead[entry]))
        for entry in range(count):
            total[entry] = _ZERO + total[entry]
        for sender in range(1, job[t.SENDERS]):
            values = sent_of(row, job, sender, at)
            for entry in range(count):
                total[entry] += values[entry]
        for entry in range(count):
            place = at * row[t.NUMEL] + picks[entry]
            # Zeros behind a tensor's end may be sent, too.
            if place < row[t.COLS]:
                step_element(row, job, place, total[entry] / divisor)


@cached_kernel
def decode_plain(row: Longs, job: Longs) -> Int:
    """Finish chunks that are not transformed: a step without weight decay touches only what was sent."""
    numel = row[t.NUMEL]
    touches_few = job[t.EPILOGUE] != _STORE and float_of(job[t.KEEP]) == _ONE and not row[t.EVERYTHING]
    if touches_few and job[t.BEFORE] == 0 and (job[t.SENDERS] == 1 or job[t.PICK_PITCH] == 0):
        step_shared(row, job)
        return 0
    tile, marks, list_at = job[t.TILES], job[t.MEMORY], job[t.MEMORY] + 4 * numel
    average, touched = floats_at(tile), ints_at(list_at)
    clear(tile, numel)
    clear(marks, numel)
    for at in range(job[t.FIRST], job[t.LAST]):
        count = add_chunks(row, job, at, 1, tile, marks, list_at)
        if not touches_few:
            finish(row, job, at * numel, tile, min(numel, row[t.COLS] - at * numel), tile + 4 * numel)
            clear(tile, numel)
            continue
        for number in range(count):
            index = touched[number]
            if at * numel + index < row[t.COLS]:
                step_element(row, job, at * numel + index, average[index])
            average[index] = _ZERO
    return 0


@cached_kernel
def decode_any(row: Longs, job: Longs) -> Int:
    """Finish chunks of any size, by lists; they are those that lead back."""
    numel, factor, pitch = row[t.NUMEL], float_of(row[t.FACTOR]), row[t.COLS]
    height, width, many = row[t.CHUNK_ROWS], row[t.CHUNK_COLS], side_by_side(row)
    room = many * numel
    tile, turned, work = job[t.TILES], job[t.TILES] + 4 * room, job[t.TILES] + 8 * room
    marks, touched, averages = job[t.MEMORY], job[t.MEMORY] + 4 * room, floats_at(tile)
    clear(marks, room)
    for at in range(job[t.FIRST], job[t.LAST], many):
        clear(tile, room)
        many_here = min(many, job[t.LAST] - at)
        add_chunks(row, job, at, many_here, tile, marks, touched)
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
