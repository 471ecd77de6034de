"""From tensors to coefficients and back, chunk by chunk, in cache.

``accumulate_*`` fill the coefficients of chunks, ``decay * state + factor * coefficient``; ``restore_*`` fill tensors
from coefficients. There is one of each for squares of 64 by 64, for rows of 64, for chunks that are not
transformed, and for all others.
"""

from __future__ import annotations

import numpy as np

from flexcomm.kernels import butterflies
from flexcomm.kernels.cpu import tables as t
from flexcomm.kernels.cpu.codelets import (
    BINS,
    LANES,
    LENGTH,
    LINE,
    dct_columns,
    dct_flat,
    dct_rows,
    dct_rows_of_state,
    idct_columns,
    idct_flat,
    idct_rows,
)
from flexcomm.kernels.cpu.compiler import Float, Floats, Int, Ints, Longs, compiled, kept
from flexcomm.kernels.cpu.tables import (
    chunk_span,
    coefs_at,
    float_of,
    floats_at,
    ints_at,
    picks_of,
    sent_of,
    tensor_of,
)

SQUARE = LENGTH * LENGTH
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MAGNITUDE = np.int32(0x7FFFFFFF)
LIMIT = (127 + 100) << 23
"""The bits of 2**100: elements stay below."""
_BUTTERFLY, _MIX, _SCALE = butterflies.BUTTERFLY, butterflies.MIX, butterflies.SCALE


@compiled
def largest(x: Ints, begin: Int, pitch: Int, rows: Int, cols: Int) -> Int:
    """Return the largest magnitude of a block, as bits."""
    top = np.int32(0)
    for i in range(rows):
        line = x[begin + i * pitch : begin + i * pitch + cols]
        for j in range(cols):
            # numba makes int64 of two int32, and half as many fit a vector.
            size = np.int32(line[j] & _MAGNITUDE)
            top = size if size > top else top
    return np.int64(top)


@compiled
def load_block(x: Floats, begin: Int, pitch: Int, rows: Int, cols: Int, tile: Floats, width: Int) -> None:
    """Copy a block into rows of a tile, which is zero elsewhere."""
    for i in range(rows):
        line, row = x[begin + i * pitch : begin + i * pitch + cols], tile[i * width : i * width + cols]
        for j in range(cols):
            row[j] = line[j]


@compiled
def store_block(tile: Floats, width: Int, x: Floats, begin: Int, pitch: Int, rows: Int, cols: Int) -> None:
    for i in range(rows):
        line, row = x[begin + i * pitch : begin + i * pitch + cols], tile[i * width : i * width + cols]
        for j in range(cols):
            line[j] = row[j]


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
def accumulate_square(table: Longs, job: Longs) -> Int:
    """Fill the coefficients of squares of 64 by 64, and their maxima; return 0, or 1 + the first nonfinite tensor."""
    number, chunk, decay = tensor_of(table, job[t.FIRST]), job[t.FIRST], float_of(job[t.DECAY])
    tile, edge = job[t.TILES], floats_at(job[t.TILES] + 4 * SQUARE, SQUARE)
    ints_at(job[t.TOPS], (job[t.LAST] - chunk) * BINS)[:] = 0
    while chunk < job[t.LAST]:
        row = table[number]
        begin, end = chunk_span(row, chunk, job[t.LAST])
        x, xi = floats_at(row[t.X], row[t.ROWS] * row[t.COLS]), ints_at(row[t.X], row[t.ROWS] * row[t.COLS])
        factor, base = float_of(row[t.FACTOR]), row[t.X]
        for at in range(begin, end):
            start, rows, cols = block_of(row, at)
            if largest(xi, start, row[t.COLS], rows, cols) >= job[t.LIMIT]:
                return 1 + number
            source, pitch, ahead = base + 4 * start, row[t.COLS], base + 4 * block_of(row, min(at + 1, end - 1))[0]
            if rows < LENGTH or cols < LENGTH:
                edge[:] = _ZERO
                load_block(x, start, row[t.COLS], rows, cols, edge, LENGTH)
                source, pitch, ahead = edge.ctypes.data, LENGTH, edge.ctypes.data
            for lane in range(0, LENGTH, LANES):
                after = ahead_of(ahead, pitch, lane)
                dct_columns(source + 4 * lane, pitch, tile + 4 * lane * LENGTH, LENGTH, 0, 0, after, _ONE, _ONE)
            target, top = coefs_at(row, job, at), job[t.TOPS] + 4 * BINS * (row[t.FIRST_CHUNK] + at - job[t.FIRST])
            for lane in range(0, LENGTH, LANES):
                source, into = tile + 4 * lane, target + 4 * lane
                if row[t.STATE]:
                    state = row[t.STATE] + 4 * SQUARE * at
                    after = ahead_of(row[t.STATE] + 4 * SQUARE * min(at + 1, end - 1), LENGTH, lane)
                    dct_rows_of_state(source, LENGTH, into, 0, state + 4 * lane, top, after, decay, factor)
                else:
                    dct_rows(source, LENGTH, into, 0, 0, top, 0, _ONE, factor)
        chunk, number = row[t.FIRST_CHUNK] + end, number + 1
    return 0


@kept
def accumulate_flat(table: Longs, job: Longs) -> Int:
    """Fill the coefficients of rows of 64; return 0, or 1 + the first nonfinite tensor."""
    number, chunk = tensor_of(table, job[t.FIRST]), job[t.FIRST]
    edge = floats_at(job[t.TILES], LANES * LENGTH)
    while chunk < job[t.LAST]:
        row = table[number]
        begin, end = chunk_span(row, chunk, job[t.LAST])
        x, factor = floats_at(row[t.X], row[t.COLS]), float_of(row[t.FACTOR])
        start, inside = begin * LENGTH, min(end * LENGTH, row[t.COLS])
        if largest(ints_at(row[t.X], row[t.COLS]), start, 0, 1, inside - start) >= job[t.LIMIT]:
            return 1 + number
        for at in range(begin, end, LANES):
            many = min(LANES, end - at)
            numel = min(row[t.COLS] - at * LENGTH, many * LENGTH)
            if numel < LANES * LENGTH:
                edge[:] = _ZERO
                load_block(x, at * LENGTH, 0, 1, numel, edge, 0)
                dct_flat(edge.ctypes.data, LENGTH, edge.ctypes.data, LENGTH, 0, 0, 0, _ONE, factor)
            else:
                dct_flat(row[t.X] + 4 * at * LENGTH, LENGTH, edge.ctypes.data, LENGTH, 0, 0, 0, _ONE, factor)
            add_state(row, job, at, many * LENGTH, _ONE, edge)
        chunk, number = row[t.FIRST_CHUNK] + end, number + 1
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
def accumulate_plain(table: Longs, job: Longs) -> Int:
    """Fill the coefficients of chunks that are not transformed; return 0, or 1 + the first nonfinite tensor."""
    number, chunk = tensor_of(table, job[t.FIRST]), job[t.FIRST]
    while chunk < job[t.LAST]:
        row = table[number]
        begin, end = chunk_span(row, chunk, job[t.LAST])
        numel = row[t.NUMEL]
        x, xi, factor = floats_at(row[t.X], row[t.COLS]), ints_at(row[t.X], row[t.COLS]), float_of(row[t.FACTOR])
        for at in range(begin, end):
            inside = min(numel, row[t.COLS] - at * numel)
            if largest(xi, at * numel, 0, 1, inside) >= job[t.LIMIT]:
                return 1 + number
            if inside == numel:
                add_state(row, job, at, numel, factor, x[at * numel : at * numel + numel])
            else:
                tile = floats_at(job[t.TILES], numel)
                tile[:] = _ZERO
                load_block(x, at * numel, 0, 1, inside, tile, 0)
                add_state(row, job, at, numel, factor, tile)
        chunk, number = row[t.FIRST_CHUNK] + end, number + 1
    return 0


@compiled
def transform(
    source: Floats, rows: Int, lanes: Int, target: Floats, pitches: tuple[Int, Int], steps: Longs, work: Floats
) -> None:
    """Transform the columns of ``source[rows, lanes]``; ``pitches`` are those of a row and a lane in ``target``.

    ``steps`` are four addresses of a list: the rows of ``work`` that take the inputs, those that have the outputs, and
    how many there are; its steps, and their factors; and the number of steps.
    """
    places = ints_at(steps[0], 2 * rows + 1)
    work[: places[2 * rows] * lanes] = _ZERO
    for i in range(rows):
        line, row = source[i * lanes : (i + 1) * lanes], work[places[i] * lanes : (places[i] + 1) * lanes]
        for j in range(lanes):
            row[j] = line[j]
    apply(work, lanes, ints_at(steps[1], 3 * steps[3]), floats_at(steps[2], 4 * steps[3]))
    for i in range(rows):
        row = work[places[rows + i] * lanes : (places[rows + i] + 1) * lanes]
        for j in range(lanes):
            target[i * pitches[0] + j * pitches[1]] = row[j]


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
def accumulate_any(table: Longs, job: Longs) -> Int:
    """Fill the coefficients of chunks of any size, by lists; return 0, or 1 + the first nonfinite tensor."""
    number, chunk = tensor_of(table, job[t.FIRST]), job[t.FIRST]
    while chunk < job[t.LAST]:
        row = table[number]
        begin, end = chunk_span(row, chunk, job[t.LAST])
        x, xi = floats_at(row[t.X], row[t.ROWS] * row[t.COLS]), ints_at(row[t.X], row[t.ROWS] * row[t.COLS])
        height, width, many = row[t.CHUNK_ROWS], row[t.CHUNK_COLS], side_by_side(row)
        room = many * row[t.NUMEL]
        tile, turned = floats_at(job[t.TILES], room), floats_at(job[t.TILES] + 4 * room, room)
        work = floats_at(job[t.TILES] + 8 * room, work_numel(row, job))
        for at in range(begin, end, many):
            start, rows, cols = block_of(row, at)
            tile[:] = _ZERO
            if height == 1:
                # Rows fill a core's vectors together: as columns, one beside the other.
                many_here = min(many, end - at)
                cols = min(many_here * width, row[t.COLS] - start)
                if largest(xi, start, 0, 1, cols) >= job[t.LIMIT]:
                    return 1 + number
                for i in range(cols):
                    tile[i % width * many + i // width] = x[start + i]
                transform(tile, width, many, turned, (1, width), job[t.ALONG : t.ALONG + 4], work)
                add_state(row, job, at, many_here * width, float_of(row[t.FACTOR]), turned)
                continue
            if largest(xi, start, row[t.COLS], rows, cols) >= job[t.LIMIT]:
                return 1 + number
            load_block(x, start, row[t.COLS], rows, cols, tile, width)
            transform(tile, height, width, turned, (1, height), job[t.DOWN : t.DOWN + 4], work)
            transform(turned, width, height, tile, (height, 1), job[t.ALONG : t.ALONG + 4], work)
            add_state(row, job, at, row[t.NUMEL], float_of(row[t.FACTOR]), tile)
        chunk, number = row[t.FIRST_CHUNK] + end, number + 1
    return 0


@compiled
def work_numel(row: Longs, job: Longs) -> Int:
    """Return how much memory the lists of a chunk's columns and rows work in."""
    height, width = row[t.CHUNK_ROWS], row[t.CHUNK_COLS]
    down, along = ints_at(job[t.DOWN], 2 * height + 1)[2 * height], ints_at(job[t.ALONG], 2 * width + 1)[2 * width]
    return max(down * width, along * max(height, side_by_side(row)))


@compiled
def side_by_side(row: Longs) -> Int:
    """Return how many chunks are transformed together."""
    return LANES if row[t.CHUNK_ROWS] == 1 else 1


# --- back -------------------------------------------------------------------------------------------------------------


@compiled
def add_chunk(row: Longs, job: Longs, chunk: Int, total: Floats, given: Ints, touched: Ints) -> Int:
    """Add what all senders sent of a chunk to ``total``, which is zero, in their order, and divide.

    Returns how many coefficients ``touched`` lists; none, if everything was sent. ``given`` is zero before and after.
    """
    senders, places = job[t.SENDERS], 0
    for sender in range(senders):
        values = sent_of(row, job, sender, chunk)
        if job[t.EVERYTHING]:
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
    if job[t.EVERYTHING] and senders > 1:
        for i in range(row[t.NUMEL]):
            total[i] = total[i] / np.float32(senders)
    for place in range(places):
        at = touched[place]
        if senders > 1:
            total[at] = total[at] / np.float32(given[at] if job[t.COUNTED] else senders)
        given[at] = 0
    return places


@compiled
def marks_of(job: Longs, numel: Int) -> tuple[Ints, Ints]:
    """Return memory for :func:`add_chunk`: counts, which are zero, and a list."""
    given = ints_at(job[t.MEMORY], numel)
    given[:] = 0
    return given, ints_at(job[t.MEMORY] + 4 * numel, numel + 1)


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


@kept
def restore_square(table: Longs, job: Longs) -> None:
    """Write the averages of squares of 64 by 64.

    Columns of a chunk without a coefficient are zero: those with one are transformed side by side, then the rows.
    """
    number, chunk = tensor_of(table, job[t.FIRST]), job[t.FIRST]
    tiles, everything = floats_at(job[t.TILES], 4 * SQUARE), job[t.EVERYTHING]
    total, columns, turned = tiles[:SQUARE], tiles[SQUARE : 2 * SQUARE], tiles[2 * SQUARE : 3 * SQUARE]
    edge, (given, touched) = tiles[3 * SQUARE :], marks_of(job, SQUARE)
    slots, places = np.full(LENGTH, -1, np.int64), np.empty(LENGTH + LANES, np.int64)
    tiles[: 3 * SQUARE] = _ZERO
    while chunk < job[t.LAST]:
        row = table[number]
        begin, end = chunk_span(row, chunk, job[t.LAST])
        out, base, factor = floats_at(row[t.X], row[t.ROWS] * row[t.COLS]), row[t.X], float_of(row[t.FACTOR])
        for at in range(begin, end):
            count = add_chunk(row, job, at, total, given, touched)
            source = total if everything else columns
            used = LENGTH if everything else sort_columns(total, touched[:count], columns, slots)
            places[used : used + LANES] = edge.ctypes.data
            for column in range(LENGTH):
                if everything or slots[column] >= 0:
                    places[column if everything else slots[column]] = turned.ctypes.data + 4 * LENGTH * column
            for lane in range(0, used, LANES):
                columns_at = source.ctypes.data + 4 * lane
                idct_columns(columns_at, LENGTH, 0, 0, places.ctypes.data + 8 * lane, 0, 0, _ONE, _ONE)
            start, rows, cols = block_of(row, at)
            target, pitch, ahead = base + 4 * start, row[t.COLS], base + 4 * block_of(row, min(at + 1, end - 1))[0]
            is_whole = rows == LENGTH and cols == LENGTH
            if not is_whole:
                target, pitch, ahead = edge.ctypes.data, LENGTH, edge.ctypes.data
            for lane in range(0, LENGTH, LANES):
                rows_at, after = turned.ctypes.data + 4 * lane, ahead_of(ahead, pitch, lane)
                idct_rows(rows_at, LENGTH, target + 4 * lane, pitch, 0, 0, after, _ONE, factor)
            if not is_whole:
                store_block(edge, LENGTH, out, start, row[t.COLS], rows, cols)
            if everything:
                total[:] = _ZERO
            else:
                clear_columns(total, touched[:count], columns, slots, turned)
        chunk, number = row[t.FIRST_CHUNK] + end, number + 1


@kept
def restore_flat(table: Longs, job: Longs) -> None:
    """Write the averages of rows of 64."""
    number, chunk = tensor_of(table, job[t.FIRST]), job[t.FIRST]
    tile, (given, touched) = floats_at(job[t.TILES], LANES * LENGTH), marks_of(job, LENGTH)
    while chunk < job[t.LAST]:
        row = table[number]
        begin, end = chunk_span(row, chunk, job[t.LAST])
        out = floats_at(row[t.X], row[t.COLS])
        for at in range(begin, end, LANES):
            tile[:] = _ZERO
            for i in range(min(LANES, end - at)):
                total = tile[i * LENGTH : (i + 1) * LENGTH]
                add_chunk(row, job, at + i, total, given, touched)
            numel = min(min(LANES, end - at) * LENGTH, row[t.COLS] - at * LENGTH)
            idct_flat(tile.ctypes.data, LENGTH, tile.ctypes.data, LENGTH, 0, 0, 0, _ONE, float_of(row[t.FACTOR]))
            store_block(tile, 0, out, at * LENGTH, 0, 1, numel)
        chunk, number = row[t.FIRST_CHUNK] + end, number + 1


@kept
def restore_plain(table: Longs, job: Longs) -> None:
    """Write the averages of chunks that are not transformed."""
    number, chunk = tensor_of(table, job[t.FIRST]), job[t.FIRST]
    while chunk < job[t.LAST]:
        row = table[number]
        begin, end = chunk_span(row, chunk, job[t.LAST])
        numel, out = row[t.NUMEL], floats_at(row[t.X], row[t.COLS])
        given, touched = marks_of(job, numel)
        for at in range(begin, end):
            inside = min(numel, row[t.COLS] - at * numel)
            total = out[at * numel : at * numel + inside] if inside == numel else floats_at(job[t.TILES], numel)
            total[:] = _ZERO
            add_chunk(row, job, at, total, given, touched)
            if inside < numel:
                store_block(total, 0, out, at * numel, 0, 1, inside)
        chunk, number = row[t.FIRST_CHUNK] + end, number + 1


@kept
def restore_any(table: Longs, job: Longs) -> None:
    """Write the averages of chunks of any size, by lists; they are those that lead back."""
    number, chunk = tensor_of(table, job[t.FIRST]), job[t.FIRST]
    while chunk < job[t.LAST]:
        row = table[number]
        begin, end = chunk_span(row, chunk, job[t.LAST])
        numel, out, factor = row[t.NUMEL], floats_at(row[t.X], row[t.ROWS] * row[t.COLS]), float_of(row[t.FACTOR])
        height, width, many = row[t.CHUNK_ROWS], row[t.CHUNK_COLS], side_by_side(row)
        room = many * numel
        tile, turned = floats_at(job[t.TILES], room), floats_at(job[t.TILES] + 4 * room, room)
        work = floats_at(job[t.TILES] + 8 * room, work_numel(row, job))
        given, touched = marks_of(job, numel)
        for at in range(begin, end, many):
            tile[:] = _ZERO
            for i in range(min(many, end - at)):
                total = tile[i * numel : (i + 1) * numel]
                add_chunk(row, job, at + i, total, given, touched)
            start, rows, cols = block_of(row, at)
            if height == 1:
                for i in range(many * width):
                    turned[i % width * many + i // width] = tile[i]
                transform(turned, width, many, tile, (1, width), job[t.ALONG : t.ALONG + 4], work)
                rows, cols = 1, min(many * width, row[t.COLS] - start)
            else:
                transform(tile, width, height, turned, (1, width), job[t.ALONG : t.ALONG + 4], work)
                transform(turned, height, width, tile, (width, 1), job[t.DOWN : t.DOWN + 4], work)
            for i in range(many * numel):
                tile[i] = tile[i] * factor
            store_block(tile, width, out, start, row[t.COLS], rows, cols)
        chunk, number = row[t.FIRST_CHUNK] + end, number + 1
