"""From tensors to coefficients and back, chunk by chunk, in cache.

``accumulate_*`` fill the coefficients of chunks, ``decay * state + factor * coefficient``; ``decode_*`` average what
all senders sent of chunks and transform it back, and the epilogue stores it or steps by it. There is one of each for
squares of 64 by 64, for rows of 64, for chunks that are not transformed, and for all others.

A chunk with a nonfinite element is found before its state is written.
"""

from __future__ import annotations

from typing import get_args

import numpy as np

from flexcomm.kernels import butterflies
from flexcomm.kernels.base import EpilogueKind, Problem
from flexcomm.kernels.cpu import tables as t
from flexcomm.kernels.cpu.codelets import (
    LANES,
    LENGTH,
    LINE,
    SQUARE_BINS,
    dct_columns,
    dct_flat,
    dct_rows,
    dct_rows_of_state,
    idct_columns,
    idct_flat,
    idct_rows,
    idct_rows_plain_step,
    idct_rows_sign_step,
    prefetch,
)
from flexcomm.kernels.cpu.compiler import Float, Floats, Int, Ints, Longs, compiled, kept
from flexcomm.kernels.cpu.tables import coefs_at, float_of, floats_at, ints_at, picks_of, sent_of

SQUARE = LENGTH * LENGTH
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MAGNITUDE = np.int32(0x7FFFFFFF)
LIMIT = (127 + 100) << 23
"""The bits of 2**100: elements stay below."""
_NONFINITE = int(Problem.NONFINITE)
_STORE, _SIGN_STEP, _PLAIN_STEP = range(len(get_args(EpilogueKind)))
_BUTTERFLY, _MIX, _SCALE = butterflies.BUTTERFLY, butterflies.MIX, butterflies.SCALE


@compiled
def largest(x: Ints) -> Int:
    """Return the largest magnitude, as bits."""
    top = np.int32(0)
    for i in range(x.size):
        # numba makes int64 of two int32, and half as many fit a vector.
        size = np.int32(x[i] & _MAGNITUDE)
        top = size if size > top else top
    return np.int64(top)


@compiled
def nonfinite_at(job: Longs, chunk: Int) -> Int:
    job[t.FAILED] = chunk
    return _NONFINITE


@compiled
def load_block(x: Floats, begin: Int, pitch: Int, rows: Int, cols: Int, tile: Floats, width: Int) -> None:
    """Copy a block into rows of a tile, and zeros behind and below."""
    tile[:] = _ZERO
    for i in range(rows):
        line, row = x[begin + i * pitch : begin + i * pitch + cols], tile[i * width : i * width + cols]
        for j in range(cols):
            row[j] = line[j]


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
def ahead_of(chunk: Int, pitch: Int, lane: Int) -> Int:
    """Return where the codelet of some lanes begins to fetch the next chunk, whose address is given.

    Vectors may be shorter than a line of cache: then those of one line each fetch a share of the rows.
    """
    return chunk + 4 * (lane // LINE * LINE + lane % LINE // LANES * (LENGTH * LANES // LINE) * pitch)


@kept
def accumulate_square(row: Longs, job: Longs) -> Int:
    """Fill the coefficients of squares of 64 by 64, and their maxima."""
    decay, factor, base, last = float_of(job[t.DECAY]), float_of(row[t.FACTOR]), row[t.X], row[t.CHUNKS] - 1
    tile, edge = job[t.TILES], floats_at(job[t.TILES] + 4 * SQUARE, SQUARE)
    top_of_lanes = ints_at(job[t.TILES] + 8 * SQUARE, LANES)
    ints_at(job[t.TOPS], (job[t.LAST] - job[t.FIRST]) * SQUARE_BINS)[:] = 0
    for at in range(job[t.FIRST], job[t.LAST]):
        start, rows, cols = block_of(row, at)
        source, pitch, ahead = base + 4 * start, row[t.COLS], base + 4 * block_of(row, min(at + 1, last))[0]
        if rows < LENGTH or cols < LENGTH:
            load_block(floats_at(base, row[t.ROWS] * pitch), start, pitch, rows, cols, edge, LENGTH)
            source, pitch, ahead = edge.ctypes.data, LENGTH, edge.ctypes.data
        top_of_lanes[:] = 0
        for lane in range(0, LENGTH, LANES):
            dct_columns(
                source + 4 * lane, pitch, tile + 4 * lane * LENGTH, LENGTH, 0, top_of_lanes.ctypes.data,
                ahead_of(ahead, pitch, lane), _ONE, _ONE, _ONE,
            )  # fmt: skip
        if largest(top_of_lanes) >= job[t.LIMIT]:
            return nonfinite_at(job, at)
        target, top = coefs_at(row, job, at), job[t.TOPS] + 4 * SQUARE_BINS * (at - job[t.FIRST])
        state, after = row[t.STATE] + 4 * SQUARE * at, row[t.STATE] + 4 * SQUARE * min(at + 1, last)
        for lane in range(0, LENGTH, LANES):
            source, into = tile + 4 * lane, target + 4 * lane
            if row[t.STATE]:
                then = ahead_of(after, LENGTH, lane)
                dct_rows_of_state(source, LENGTH, into, 0, state + 4 * lane, top, then, decay, factor, _ONE)
            else:
                dct_rows(source, LENGTH, into, 0, 0, top, 0, _ONE, factor, _ONE)
    return 0


@kept
def accumulate_flat(row: Longs, job: Longs) -> Int:
    """Fill the coefficients of rows of 64."""
    edge, tile = floats_at(job[t.TILES], LANES * LENGTH), floats_at(job[t.TILES] + 4 * LANES * LENGTH, LANES * LENGTH)
    x, factor = floats_at(row[t.X], row[t.COLS]), float_of(row[t.FACTOR])
    for at in range(job[t.FIRST], job[t.LAST], LANES):
        many = min(LANES, job[t.LAST] - at)
        numel, source = min(row[t.COLS] - at * LENGTH, many * LENGTH), row[t.X] + 4 * at * LENGTH
        if largest(ints_at(source, numel)) >= job[t.LIMIT]:
            return nonfinite_at(job, at)
        if numel < LANES * LENGTH:
            load_block(x, at * LENGTH, 0, 1, numel, edge, 0)
            source = edge.ctypes.data
        dct_flat(source, LENGTH, tile.ctypes.data, LENGTH, 0, 0, 0, _ONE, factor, _ONE)
        add_state(row, job, at, many * LENGTH, _ONE, tile)
    return 0


@compiled
def add_state(row: Longs, job: Longs, chunk: Int, numel: Int, factor: Float, coefs: Floats) -> None:
    """Fill in coefficients, ``decay * state + factor * coefs``, or without a state the latter."""
    target, state = coefs_at(row, job, chunk), row[t.STATE] + 4 * chunk * row[t.NUMEL]
    out, given, decay = floats_at(target, numel), coefs[:numel], float_of(job[t.DECAY])
    if row[t.STATE] == 0:
        for i in range(numel):
            out[i] = factor * given[i]
    elif state == target:
        # Where memory may overlap, loops do not fit into vectors: so there is one that is told of one array alone.
        for i in range(numel):
            out[i] = decay * out[i] + factor * given[i]
    else:
        before = floats_at(state, numel)
        for i in range(numel):
            out[i] = decay * before[i] + factor * given[i]


@kept
def accumulate_plain(row: Longs, job: Longs) -> Int:
    """Fill the coefficients of chunks that are not transformed."""
    numel, x, factor = row[t.NUMEL], floats_at(row[t.X], row[t.COLS]), float_of(row[t.FACTOR])
    for at in range(job[t.FIRST], job[t.LAST]):
        inside = min(numel, row[t.COLS] - at * numel)
        given = x[at * numel : at * numel + inside]
        if largest(given.view(np.int32)) >= job[t.LIMIT]:
            return nonfinite_at(job, at)
        if inside < numel:
            tile = floats_at(job[t.TILES], numel)
            load_block(x, at * numel, 0, 1, inside, tile, 0)
            given = tile
        add_state(row, job, at, numel, factor, given)
    return 0


@compiled
def transform(
    source: Floats, rows: Int, lanes: Int, target: Floats, pitches: tuple[Int, Int], row: Longs, at: Int, work: Floats
) -> None:
    """Transform the columns of ``source[rows, lanes]``; ``pitches`` are those of a row and a lane in ``target``.

    The list is in the tensor's columns from ``at`` on: the address of the rows of ``work`` that take the inputs, of
    those that have the outputs, and of how many there are; those of its steps and of their factors; and the number of
    steps.
    """
    places, count = ints_at(row[at], 2 * rows + 1), row[at + 3]
    work[: places[2 * rows] * lanes] = _ZERO
    for i in range(rows):
        line, taken = source[i * lanes : (i + 1) * lanes], work[places[i] * lanes : (places[i] + 1) * lanes]
        for j in range(lanes):
            taken[j] = line[j]
    apply(work, lanes, ints_at(row[at + 1], 3 * count), floats_at(row[at + 2], 4 * count))
    for i in range(rows):
        done = work[places[rows + i] * lanes : (places[rows + i] + 1) * lanes]
        for j in range(lanes):
            target[i * pitches[0] + j * pitches[1]] = done[j]


@compiled
def apply(work: Floats, lanes: Int, steps: Ints, factors: Floats) -> None:
    """Do the steps of a list on rows."""
    for number in range(steps.size // 3):
        code, i, j = steps[3 * number], steps[3 * number + 1] * lanes, steps[3 * number + 2] * lanes
        x, y, own = work[i : i + lanes], work[j : j + lanes], factors[4 * number : 4 * number + 4]
        c0, c1, c2, c3 = own[0], own[1], own[2], own[3]
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


@kept
def accumulate_any(row: Longs, job: Longs) -> Int:
    """Fill the coefficients of chunks of any size, by lists."""
    x, factor = floats_at(row[t.X], row[t.ROWS] * row[t.COLS]), float_of(row[t.FACTOR])
    height, width, many = row[t.CHUNK_ROWS], row[t.CHUNK_COLS], side_by_side(row)
    room = many * row[t.NUMEL]
    tile, turned = floats_at(job[t.TILES], room), floats_at(job[t.TILES] + 4 * room, room)
    work = floats_at(job[t.TILES] + 8 * room, work_numel(row))
    for at in range(job[t.FIRST], job[t.LAST], many):
        start, rows, cols = block_of(row, at)
        many_here = min(many, job[t.LAST] - at)
        if height == 1:
            cols = min(many_here * width, row[t.COLS] - start)
        load_block(x, start, row[t.COLS], rows, cols, tile, width)
        if largest(tile.view(np.int32)) >= job[t.LIMIT]:
            return nonfinite_at(job, at)
        if height == 1:
            # Rows fill a core's vectors together: as columns, one beside the other.
            for i in range(width):
                for j in range(many):
                    turned[i * many + j] = tile[j * width + i]
            transform(turned, width, many, tile, (1, width), row, t.ALONG, work)
        else:
            transform(tile, height, width, turned, (1, height), row, t.DOWN, work)
            transform(turned, width, height, tile, (height, 1), row, t.ALONG, work)
        add_state(row, job, at, many_here * row[t.NUMEL], factor, tile)
    return 0


@compiled
def work_numel(row: Longs) -> Int:
    """Return how much memory the lists of a chunk's columns and rows work in."""
    height, width = row[t.CHUNK_ROWS], row[t.CHUNK_COLS]
    down, along = ints_at(row[t.DOWN], 2 * height + 1)[2 * height], ints_at(row[t.ALONG], 2 * width + 1)[2 * width]
    return max(down * width, along * max(height, side_by_side(row)))


@compiled
def side_by_side(row: Longs) -> Int:
    """Return how many chunks are transformed together."""
    return LANES if row[t.CHUNK_ROWS] == 1 else 1


# --- back -------------------------------------------------------------------------------------------------------------


@kept
def add_sent(row: Longs, job: Longs) -> Int:
    """Add the SHARE of what the only sender sent of chunks to their states."""
    share = float_of(job[t.SHARE])
    for at in range(job[t.FIRST], job[t.LAST]):
        coefs, values = floats_at(coefs_at(row, job, at), row[t.NUMEL]), sent_of(row, job, 0, at)
        if row[t.EVERYTHING]:
            for i in range(values.size):
                coefs[i] += share * values[i]
        else:
            picks = picks_of(row, job, 0, at)
            for entry in range(values.size):
                coefs[picks[entry]] += share * values[entry]
    return 0


@compiled
def add_chunk(row: Longs, job: Longs, chunk: Int, total: Floats, given: Ints, touched: Ints) -> Int:
    """Add what all senders sent of a chunk to ``total``, which is zero, in their order, and divide.

    Returns how many coefficients ``touched`` lists; none, if everything was sent. ``given`` is zero before and after.
    """
    places, divisor = 0, np.float32(job[t.DIVISOR])
    for sender in range(job[t.SENDERS]):
        values = sent_of(row, job, sender, chunk)
        if row[t.EVERYTHING]:
            for i in range(values.size):
                total[i] += values[i]
            continue
        picks = picks_of(row, job, sender, chunk)
        for entry in range(values.size):
            at = picks[entry]
            total[at] += values[entry]
            touched[places] = at
            places += given[at] == 0
            given[at] += np.int32(1)
    if row[t.EVERYTHING] and divisor != _ONE:
        for i in range(row[t.NUMEL]):
            total[i] = total[i] / divisor
    for place in range(places):
        at = touched[place]
        if job[t.COUNTED]:
            total[at] = total[at] / np.float32(given[at])
        elif divisor != _ONE:
            total[at] = total[at] / divisor
        given[at] = 0
    return places


@compiled
def marks_of(job: Longs, numel: Int) -> tuple[Ints, Ints]:
    """Return memory for :func:`add_chunk`: counts, which are zero, and a list."""
    given = ints_at(job[t.MEMORY], numel)
    given[:] = 0
    return given, ints_at(job[t.MEMORY] + 4 * numel, numel + 1)


@compiled
def stepped(kind: Int, x: Float, y: Float, lr: Float, keep: Float) -> Float:
    """Return what an element becomes by its average ``y``."""
    if kind == _SIGN_STEP:
        return keep * x - (lr if y > _ZERO else -lr if y < _ZERO else _ZERO)
    return keep * x - y if kind == _PLAIN_STEP else y


@compiled
def finish(job: Longs, out: Floats, average: Floats) -> None:
    """Do the epilogue of some elements, one behind the other."""
    kind, lr, keep = job[t.EPILOGUE], float_of(job[t.LR]), float_of(job[t.KEEP])
    # A loop for each kind: only so they fit into vectors.
    if kind == _STORE:
        for i in range(out.size):
            out[i] = average[i]
    elif kind == _SIGN_STEP:
        for i in range(out.size):
            out[i] = stepped(_SIGN_STEP, out[i], average[i], lr, keep)
    else:
        for i in range(out.size):
            out[i] = stepped(_PLAIN_STEP, out[i], average[i], lr, keep)


@compiled
def finish_block(row: Longs, job: Longs, chunk: Int, tile: Floats) -> None:
    """Do the epilogue of a chunk of a matrix, whose averages are the rows of a tile."""
    (start, rows, cols), width = block_of(row, chunk), row[t.CHUNK_COLS]
    out, pitch = floats_at(row[t.X], row[t.ROWS] * row[t.COLS]), row[t.COLS]
    for i in range(rows):
        finish(job, out[start + i * pitch : start + i * pitch + cols], tile[i * width : i * width + cols])


@compiled
def sort_columns(total: Floats, touched: Ints, columns: Floats, slots: Longs) -> Int:
    """Copy the columns of a square that hold something side by side; return how many there are.

    ``slots`` are their new places, -1 for the others.
    """
    used = 0
    for place in range(touched.size):
        column = touched[place] & (LENGTH - 1)
        if slots[column] < 0:
            slots[column] = used
            used += 1
        columns[touched[place] - column + slots[column]] = total[touched[place]]
    return used


@compiled
def clear_columns(total: Floats, touched: Ints, columns: Floats, slots: Longs, turned: Floats) -> None:
    """Zero what :func:`sort_columns` filled, and the rows that it became."""
    for place in range(touched.size):
        column = touched[place] & (LENGTH - 1)
        columns[touched[place] - column + slots[column]] = total[touched[place]] = _ZERO
    for column in range(LENGTH):
        if slots[column] >= 0:
            slots[column] = -1
            turned[column * LENGTH : (column + 1) * LENGTH] = _ZERO


@compiled
def finish_rows(
    kind: Int, rows: Int, target: Int, pitch: Int, ahead: Int, keep: Float, factor: Float, lr: Float
) -> None:
    """Transform some lanes of rows back, and do the epilogue."""
    if kind == _STORE:
        idct_rows(rows, LENGTH, target, pitch, 0, 0, ahead, keep, factor, lr)
    elif kind == _SIGN_STEP:
        idct_rows_sign_step(rows, LENGTH, target, pitch, 0, 0, ahead, keep, factor, lr)
    else:
        idct_rows_plain_step(rows, LENGTH, target, pitch, 0, 0, ahead, keep, factor, lr)


@kept
def decode_square(row: Longs, job: Longs) -> Int:
    """Finish squares of 64 by 64.

    Columns of a chunk without a coefficient are zero: those with one are transformed side by side, then the rows.
    """
    tiles, everything, base, last = floats_at(job[t.TILES], 4 * SQUARE), row[t.EVERYTHING], row[t.X], row[t.CHUNKS] - 1
    total, columns, turned = tiles[:SQUARE], tiles[SQUARE : 2 * SQUARE], tiles[2 * SQUARE : 3 * SQUARE]
    edge, (given, touched) = tiles[3 * SQUARE :], marks_of(job, SQUARE)
    slots, places = np.full(LENGTH, -1, np.int64), np.empty(LENGTH + LANES, np.int64)
    factor, lr, keep = float_of(row[t.FACTOR]), float_of(job[t.LR]), float_of(job[t.KEEP])
    tiles[: 3 * SQUARE] = _ZERO
    for at in range(job[t.FIRST], job[t.LAST]):
        count = add_chunk(row, job, at, total, given, touched)
        source = total if everything else columns
        used = LENGTH if everything else sort_columns(total, touched[:count], columns, slots)
        places[used : used + LANES] = edge.ctypes.data
        for column in range(LENGTH):
            if everything or slots[column] >= 0:
                places[column if everything else slots[column]] = turned.ctypes.data + 4 * LENGTH * column
        for lane in range(0, used, LANES):
            columns_at = source.ctypes.data + 4 * lane
            idct_columns(columns_at, LENGTH, 0, 0, places.ctypes.data + 8 * lane, 0, 0, _ONE, _ONE, _ONE)
        start, rows, cols = block_of(row, at)
        is_tensor_blocks = rows == LENGTH and cols == LENGTH
        kind, target, pitch = job[t.EPILOGUE], base + 4 * start, row[t.COLS]
        ahead = base + 4 * block_of(row, min(at + 1, last))[0]
        if not is_tensor_blocks:
            kind, target, pitch, ahead = _STORE, edge.ctypes.data, LENGTH, edge.ctypes.data
        for lane in range(0, LENGTH, LANES):
            rows_at, into, after = turned.ctypes.data + 4 * lane, target + 4 * lane, ahead_of(ahead, pitch, lane)
            finish_rows(kind, rows_at, into, pitch, after, keep, factor, lr)
        if not is_tensor_blocks:
            finish_block(row, job, at, edge)
        if everything:
            total[:] = _ZERO
        else:
            clear_columns(total, touched[:count], columns, slots, turned)
    return 0


@kept
def decode_flat(row: Longs, job: Longs) -> Int:
    """Finish rows of 64."""
    tile, (given, touched) = floats_at(job[t.TILES], LANES * LENGTH), marks_of(job, LENGTH)
    out = floats_at(row[t.X], row[t.COLS])
    for at in range(job[t.FIRST], job[t.LAST], LANES):
        tile[:] = _ZERO
        many = min(LANES, job[t.LAST] - at)
        for i in range(many):
            add_chunk(row, job, at + i, tile[i * LENGTH : (i + 1) * LENGTH], given, touched)
        idct_flat(tile.ctypes.data, LENGTH, tile.ctypes.data, LENGTH, 0, 0, 0, _ONE, float_of(row[t.FACTOR]), _ONE)
        finish(job, out[at * LENGTH : min((at + many) * LENGTH, row[t.COLS])], tile)
    return 0


@compiled
def step_shared(row: Longs, job: Longs, out: Floats) -> None:
    """Step the elements that all senders sent of chunks; they sent the same ones."""
    kind, lr, divisor, senders = job[t.EPILOGUE], float_of(job[t.LR]), np.float32(job[t.DIVISOR]), job[t.SENDERS]
    for at in range(job[t.FIRST], job[t.LAST]):
        picks, total = picks_of(row, job, 0, at), sent_of(row, job, 0, at)
        if at + 1 < job[t.LAST]:
            ahead = picks_of(row, job, 0, at + 1)
            for entry in range(ahead.size):
                prefetch(row[t.X] + 4 * ((at + 1) * row[t.NUMEL] + ahead[entry]))
        for entry in range(total.size):
            total[entry] = _ZERO + total[entry]
        for sender in range(1, senders):
            values = sent_of(row, job, sender, at)
            for entry in range(total.size):
                total[entry] += values[entry]
        chunk = out[at * row[t.NUMEL] : min((at + 1) * row[t.NUMEL], row[t.COLS])]
        for entry in range(total.size):
            index = picks[entry]
            # Zeros behind a tensor's end may be sent, too.
            if index < chunk.size:
                average = total[entry] / divisor if divisor != _ONE else total[entry]
                chunk[index] = stepped(kind, chunk[index], average, lr, _ONE)


@kept
def decode_plain(row: Longs, job: Longs) -> Int:
    """Finish chunks that are not transformed: a step without weight decay touches only what was sent."""
    numel, kind, out = row[t.NUMEL], job[t.EPILOGUE], floats_at(row[t.X], row[t.COLS])
    lr, keep = float_of(job[t.LR]), float_of(job[t.KEEP])
    touches_few = kind != _STORE and keep == _ONE and not row[t.EVERYTHING]
    if touches_few and (job[t.SENDERS] == 1 or job[t.PICK_PITCH] == 0):
        step_shared(row, job, out)
        return 0
    tile, (given, touched) = floats_at(job[t.TILES], numel), marks_of(job, numel)
    tile[:] = _ZERO
    for at in range(job[t.FIRST], job[t.LAST]):
        chunk = out[at * numel : min((at + 1) * numel, row[t.COLS])]
        count = add_chunk(row, job, at, tile, given, touched)
        if not touches_few:
            finish(job, chunk, tile)
            tile[:] = _ZERO
            continue
        for place in range(count):
            index = touched[place]
            if index < chunk.size:
                chunk[index] = stepped(kind, chunk[index], tile[index], lr, keep)
            tile[index] = _ZERO
    return 0


@kept
def decode_any(row: Longs, job: Longs) -> Int:
    """Finish chunks of any size, by lists; they are those that lead back."""
    numel, out, factor = row[t.NUMEL], floats_at(row[t.X], row[t.ROWS] * row[t.COLS]), float_of(row[t.FACTOR])
    height, width, many = row[t.CHUNK_ROWS], row[t.CHUNK_COLS], side_by_side(row)
    room = many * numel
    tile, turned = floats_at(job[t.TILES], room), floats_at(job[t.TILES] + 4 * room, room)
    work = floats_at(job[t.TILES] + 8 * room, work_numel(row))
    given, touched = marks_of(job, numel)
    for at in range(job[t.FIRST], job[t.LAST], many):
        tile[:] = _ZERO
        many_here = min(many, job[t.LAST] - at)
        for i in range(many_here):
            add_chunk(row, job, at + i, tile[i * numel : (i + 1) * numel], given, touched)
        if height == 1:
            for i in range(many * width):
                turned[i % width * many + i // width] = tile[i]
            transform(turned, width, many, tile, (1, width), row, t.ALONG, work)
        else:
            transform(tile, width, height, turned, (1, width), row, t.ALONG, work)
            transform(turned, height, width, tile, (width, 1), row, t.DOWN, work)
        for i in range(room):
            tile[i] = tile[i] * factor
        if height == 1:
            finish(job, out[at * width : min((at + many_here) * width, row[t.COLS])], tile)
        else:
            finish_block(row, job, at, tile)
    return 0
