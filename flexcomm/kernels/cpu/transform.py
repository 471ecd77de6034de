"""From tensors to coefficients and back, chunk by chunk, in cache.

``accumulate_*`` fill the coefficients of chunks, ``decay * state + factor * coefficient``; ``restore_*`` fill tensors
from coefficients. There is one of each for squares of 64 by 64, for rows of 64, for chunks that are not
transformed, and for all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.kernels import butterflies
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
from flexcomm.kernels.cpu.compiler import compiled, kept
from flexcomm.kernels.cpu.tables import (
    CHUNK_COLS,
    CHUNK_ROWS,
    COLS,
    FIRST_CHUNK,
    FIRST_ENTRY,
    GRID_COLS,
    NUMEL,
    ROWS,
    STATE,
    K,
    X,
    chunk_span,
    factor_of,
    floats_at,
    ints_at,
    row_at,
    tensor_of,
)

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import Float, Floats, Int, Ints, Longs

__all__ = [
    "accumulate_any",
    "accumulate_flat",
    "accumulate_plain",
    "accumulate_square",
    "restore_any",
    "restore_flat",
    "restore_plain",
    "restore_square",
]

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
    top, left = chunk // row[GRID_COLS] * row[CHUNK_ROWS], chunk % row[GRID_COLS] * row[CHUNK_COLS]
    return top * row[COLS] + left, min(row[CHUNK_ROWS], row[ROWS] - top), min(row[CHUNK_COLS], row[COLS] - left)


@compiled
def ahead_of(chunk: Int, pitch: Int, lane: Int) -> Int:
    """Return where the codelet of some lanes begins to fetch the next chunk, whose address is given.

    Vectors may be shorter than a line of cache: then those of one line each fetch a share of the rows.
    """
    return chunk + 4 * (lane // LINE * LINE + lane % LINE // LANES * (LENGTH * LANES // LINE) * pitch)


@kept
def accumulate_square(
    table: Longs, first: Int, last: Int, limit: Int, decay: Float, scratch: Floats, tiles: Floats, tops: Ints
) -> Int:
    """Fill the coefficients of squares of 64 by 64, and their maxima; return 0, or 1 + the first nonfinite tensor."""
    number, chunk, tile, edge = tensor_of(table, first), first, tiles.ctypes.data, tiles[SQUARE : 2 * SQUARE]
    tops[: (last - first) * BINS] = 0
    while chunk < last:
        row = table[number]
        begin, end = chunk_span(row, chunk, last)
        x, xi = floats_at(row[X], row[ROWS] * row[COLS]), ints_at(row[X], row[ROWS] * row[COLS])
        factor, base = factor_of(row), row[X]
        for at in range(begin, end):
            start, rows, cols = block_of(row, at)
            if largest(xi, start, row[COLS], rows, cols) >= limit:
                return 1 + number
            source, pitch, ahead = base + 4 * start, row[COLS], base + 4 * block_of(row, min(at + 1, end - 1))[0]
            if rows < LENGTH or cols < LENGTH:
                edge[:] = _ZERO
                load_block(x, start, row[COLS], rows, cols, edge, LENGTH)
                source, pitch, ahead = edge.ctypes.data, LENGTH, edge.ctypes.data
            for lane in range(0, LENGTH, LANES):
                after = ahead_of(ahead, pitch, lane)
                dct_columns(source + 4 * lane, pitch, tile + 4 * lane * LENGTH, LENGTH, 0, 0, after, _ONE, _ONE)
            target, top = row_at(row, at, first, scratch.ctypes.data), tops.ctypes.data
            top += 4 * BINS * (row[FIRST_CHUNK] + at - first)
            for lane in range(0, LENGTH, LANES):
                source, into = tile + 4 * lane, target + 4 * lane
                if row[STATE]:
                    state = row[STATE] + 4 * SQUARE * at
                    after = ahead_of(row[STATE] + 4 * SQUARE * min(at + 1, end - 1), LENGTH, lane)
                    dct_rows_of_state(source, LENGTH, into, 0, state + 4 * lane, top, after, decay, factor)
                else:
                    dct_rows(source, LENGTH, into, 0, 0, top, 0, _ONE, factor)
        chunk, number = row[FIRST_CHUNK] + end, number + 1
    return 0


@kept
def accumulate_flat(
    table: Longs, first: Int, last: Int, limit: Int, decay: Float, scratch: Floats, tiles: Floats, _tops: Ints
) -> Int:
    """Fill the coefficients of rows of 64; return 0, or 1 + the first nonfinite tensor."""
    number, chunk, edge = tensor_of(table, first), first, tiles[: LANES * LENGTH]
    while chunk < last:
        row = table[number]
        begin, end = chunk_span(row, chunk, last)
        x, factor = floats_at(row[X], row[COLS]), factor_of(row)
        start, inside = begin * LENGTH, min(end * LENGTH, row[COLS])
        if largest(ints_at(row[X], row[COLS]), start, 0, 1, inside - start) >= limit:
            return 1 + number
        for at in range(begin, end, LANES):
            many = min(LANES, end - at)
            numel = min(row[COLS] - at * LENGTH, many * LENGTH)
            if numel < LANES * LENGTH:
                edge[:] = _ZERO
                load_block(x, at * LENGTH, 0, 1, numel, edge, 0)
                dct_flat(edge.ctypes.data, LENGTH, edge.ctypes.data, LENGTH, 0, 0, 0, _ONE, factor)
            else:
                dct_flat(row[X] + 4 * at * LENGTH, LENGTH, edge.ctypes.data, LENGTH, 0, 0, 0, _ONE, factor)
            add_state(row, at, first, many * LENGTH, decay, _ONE, edge, scratch)
        chunk, number = row[FIRST_CHUNK] + end, number + 1
    return 0


@compiled
def add_state(
    row: Longs, chunk: Int, first: Int, numel: Int, decay: Float, factor: Float, coefs: Floats, scratch: Floats
) -> None:
    """Fill rows of coefficients with ``decay * state + factor * coefs``, or without a state with the latter."""
    target = row_at(row, chunk, first, scratch.ctypes.data)
    out, given = floats_at(target, numel), coefs[:numel]
    state = row[STATE] + 4 * chunk * row[NUMEL]
    if row[STATE] == 0:
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
def accumulate_plain(
    table: Longs, first: Int, last: Int, limit: Int, decay: Float, scratch: Floats, tiles: Floats, _tops: Ints
) -> Int:
    """Fill the coefficients of chunks that are not transformed; return 0, or 1 + the first nonfinite tensor."""
    number, chunk = tensor_of(table, first), first
    while chunk < last:
        row = table[number]
        begin, end = chunk_span(row, chunk, last)
        numel = row[NUMEL]
        x, xi, factor = floats_at(row[X], row[COLS]), ints_at(row[X], row[COLS]), factor_of(row)
        for at in range(begin, end):
            inside = min(numel, row[COLS] - at * numel)
            if largest(xi, at * numel, 0, 1, inside) >= limit:
                return 1 + number
            if inside == numel:
                add_state(row, at, first, numel, decay, factor, x[at * numel : at * numel + numel], scratch)
            else:
                tiles[:numel] = _ZERO
                load_block(x, at * numel, 0, 1, inside, tiles, 0)
                add_state(row, at, first, numel, decay, factor, tiles, scratch)
        chunk, number = row[FIRST_CHUNK] + end, number + 1
    return 0


@compiled
def apply(work: Floats, width: Int, lanes: Int, steps: Ints, factors: Floats) -> None:
    """Do the steps of a list on rows that are ``width`` apart."""
    for number in range(steps.shape[0]):
        code, i, j = steps[number, 0], steps[number, 1] * width, steps[number, 2] * width
        x, y = work[i : i + lanes], work[j : j + lanes]
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
def transform(
    source: Floats,
    rows: Int,
    lanes: Int,
    target: Floats,
    pitches: tuple[Int, Int],
    places: Ints,
    steps: Ints,
    factors: Floats,
    work: Floats,
) -> None:
    """Transform the columns of ``source[rows, lanes]``; ``pitches`` are those of a row and a lane in ``target``.

    ``places`` are the rows of ``work`` that take the inputs, those that have the outputs, and how many there are.
    """
    work[: places[2 * rows] * lanes] = _ZERO
    for i in range(rows):
        line, row = source[i * lanes : (i + 1) * lanes], work[places[i] * lanes : (places[i] + 1) * lanes]
        for j in range(lanes):
            row[j] = line[j]
    apply(work, lanes, lanes, steps, factors)
    for i in range(rows):
        row = work[places[rows + i] * lanes : (places[rows + i] + 1) * lanes]
        for j in range(lanes):
            target[i * pitches[0] + j * pitches[1]] = row[j]


@kept
def accumulate_any(
    table: Longs,
    first: Int,
    last: Int,
    limit: Int,
    decay: Float,
    scratch: Floats,
    tiles: Floats,
    down: Ints,
    down_steps: Ints,
    down_factors: Floats,
    along: Ints,
    along_steps: Ints,
    along_factors: Floats,
) -> Int:
    """Fill the coefficients of chunks of any size, by lists; return 0, or 1 + the first nonfinite tensor."""
    number, chunk = tensor_of(table, first), first
    while chunk < last:
        row = table[number]
        begin, end = chunk_span(row, chunk, last)
        x, xi = floats_at(row[X], row[ROWS] * row[COLS]), ints_at(row[X], row[ROWS] * row[COLS])
        height, width, many = row[CHUNK_ROWS], row[CHUNK_COLS], side_by_side(row)
        room = many * row[NUMEL]
        tile, turned, work = tiles[:room], tiles[room : 2 * room], tiles[2 * room :]
        for at in range(begin, end, many):
            start, rows, cols = block_of(row, at)
            tile[:] = _ZERO
            if height == 1:
                # Rows fill a core's vectors together: as columns, one beside the other.
                many_here = min(many, end - at)
                cols = min(many_here * width, row[COLS] - start)
                if largest(xi, start, 0, 1, cols) >= limit:
                    return 1 + number
                for i in range(cols):
                    tile[i % width * many + i // width] = x[start + i]
                transform(tile, width, many, turned, (1, width), along, along_steps, along_factors, work)
                add_state(row, at, first, many_here * width, decay, factor_of(row), turned, scratch)
                continue
            if largest(xi, start, row[COLS], rows, cols) >= limit:
                return 1 + number
            load_block(x, start, row[COLS], rows, cols, tile, width)
            transform(tile, height, width, turned, (1, height), down, down_steps, down_factors, work)
            transform(turned, width, height, tile, (height, 1), along, along_steps, along_factors, work)
            add_state(row, at, first, row[NUMEL], decay, factor_of(row), tile, scratch)
        chunk, number = row[FIRST_CHUNK] + end, number + 1
    return 0


@compiled
def side_by_side(row: Longs) -> Int:
    """Return how many chunks are transformed together."""
    return LANES if row[CHUNK_ROWS] == 1 else 1


# --- back -------------------------------------------------------------------------------------------------------------


@compiled
def add_chunk(
    row: Longs,
    chunk: Int,
    everything: Int,
    picks: Ints,
    pick_origins: Longs,
    sent: Floats,
    origins: Longs,
    before: Longs,
    counted: Int,
    total: Floats,
    given: Ints,
    touched: Ints,
) -> Int:
    """Add what all senders sent of a chunk to ``total``, which is zero, in their order, and divide.

    Returns how many coefficients ``touched`` lists; none, if everything was sent. ``given`` is zero before and after.
    """
    senders, places = origins.size, 0
    for sender in range(senders):
        begin, end = (
            (before[sender, chunk], before[sender, chunk + 1])
            if before.shape[0]
            else (row[FIRST_ENTRY] + chunk * row[K], row[FIRST_ENTRY] + (chunk + 1) * row[K])
        )
        values = sent[sender, begin - origins[sender] : end - origins[sender]]
        if everything:
            for i in range(values.size):
                total[i] += values[i]
            continue
        shift = min(sender, picks.shape[0] - 1)
        chosen = picks[shift, begin - pick_origins[sender] : end - pick_origins[sender]]
        for entry in range(values.size):
            at = chosen[entry]
            total[at] += values[entry]
            touched[places] = at
            places += given[at] == 0
            given[at] += np.int32(1)
    if everything and senders > 1:
        for i in range(row[NUMEL]):
            total[i] = total[i] / np.float32(senders)
    for place in range(places):
        at = touched[place]
        if senders > 1:
            total[at] = total[at] / np.float32(given[at] if counted else senders)
        given[at] = 0
    return places


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
def restore_square(
    table: Longs,
    first: Int,
    last: Int,
    everything: Int,
    picks: Ints,
    pick_origins: Longs,
    sent: Floats,
    origins: Longs,
    before: Longs,
    counted: Int,
    tiles: Floats,
    marks: Ints,
) -> None:
    """Write the averages of squares of 64 by 64.

    Columns of a chunk without a coefficient are zero: those with one are transformed side by side, then the rows.
    """
    number, chunk = tensor_of(table, first), first
    total, columns, turned = tiles[:SQUARE], tiles[SQUARE : 2 * SQUARE], tiles[2 * SQUARE : 3 * SQUARE]
    edge, given, touched = tiles[3 * SQUARE : 4 * SQUARE], marks[:SQUARE], marks[SQUARE : 2 * SQUARE + 1]
    slots, places = np.full(LENGTH, -1, np.int64), np.empty(LENGTH + LANES, np.int64)
    tiles[: 3 * SQUARE] = _ZERO
    given[:] = 0
    while chunk < last:
        row = table[number]
        begin, end = chunk_span(row, chunk, last)
        out, base, factor = floats_at(row[X], row[ROWS] * row[COLS]), row[X], factor_of(row)
        for at in range(begin, end):
            count = add_chunk(
                row, at, everything, picks, pick_origins, sent, origins, before, counted, total, given, touched
            )
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
            target, pitch, ahead = base + 4 * start, row[COLS], base + 4 * block_of(row, min(at + 1, end - 1))[0]
            is_whole = rows == LENGTH and cols == LENGTH
            if not is_whole:
                target, pitch, ahead = edge.ctypes.data, LENGTH, edge.ctypes.data
            for lane in range(0, LENGTH, LANES):
                rows_at, after = turned.ctypes.data + 4 * lane, ahead_of(ahead, pitch, lane)
                idct_rows(rows_at, LENGTH, target + 4 * lane, pitch, 0, 0, after, _ONE, factor)
            if not is_whole:
                store_block(edge, LENGTH, out, start, row[COLS], rows, cols)
            if everything:
                total[:] = _ZERO
            else:
                clear_columns(total, touched[:count], columns, slots, turned)
        chunk, number = row[FIRST_CHUNK] + end, number + 1


@kept
def restore_flat(
    table: Longs,
    first: Int,
    last: Int,
    everything: Int,
    picks: Ints,
    pick_origins: Longs,
    sent: Floats,
    origins: Longs,
    before: Longs,
    counted: Int,
    tiles: Floats,
    marks: Ints,
) -> None:
    """Write the averages of rows of 64."""
    number, chunk = tensor_of(table, first), first
    tile, given, touched = tiles[: LANES * LENGTH], marks[:LENGTH], marks[LENGTH : 2 * LENGTH + 1]
    given[:] = 0
    while chunk < last:
        row = table[number]
        begin, end = chunk_span(row, chunk, last)
        out = floats_at(row[X], row[COLS])
        for at in range(begin, end, LANES):
            tile[:] = _ZERO
            for i in range(min(LANES, end - at)):
                total = tile[i * LENGTH : (i + 1) * LENGTH]
                add_chunk(
                    row, at + i, everything, picks, pick_origins, sent, origins, before, counted, total, given, touched
                )
            numel = min(min(LANES, end - at) * LENGTH, row[COLS] - at * LENGTH)
            idct_flat(tile.ctypes.data, LENGTH, tile.ctypes.data, LENGTH, 0, 0, 0, _ONE, factor_of(row))
            store_block(tile, 0, out, at * LENGTH, 0, 1, numel)
        chunk, number = row[FIRST_CHUNK] + end, number + 1


@kept
def restore_plain(
    table: Longs,
    first: Int,
    last: Int,
    everything: Int,
    picks: Ints,
    pick_origins: Longs,
    sent: Floats,
    origins: Longs,
    before: Longs,
    counted: Int,
    tiles: Floats,
    marks: Ints,
) -> None:
    """Write the averages of chunks that are not transformed."""
    number, chunk = tensor_of(table, first), first
    while chunk < last:
        row = table[number]
        begin, end = chunk_span(row, chunk, last)
        numel, out = row[NUMEL], floats_at(row[X], row[COLS])
        given, touched = marks[:numel], marks[numel : 2 * numel + 1]
        given[:] = 0
        for at in range(begin, end):
            inside = min(numel, row[COLS] - at * numel)
            total = out[at * numel : at * numel + inside] if inside == numel else tiles[:numel]
            total[:] = _ZERO
            add_chunk(row, at, everything, picks, pick_origins, sent, origins, before, counted, total, given, touched)
            if inside < numel:
                store_block(total, 0, out, at * numel, 0, 1, inside)
        chunk, number = row[FIRST_CHUNK] + end, number + 1


@kept
def restore_any(
    table: Longs,
    first: Int,
    last: Int,
    everything: Int,
    picks: Ints,
    pick_origins: Longs,
    sent: Floats,
    origins: Longs,
    before: Longs,
    counted: Int,
    tiles: Floats,
    marks: Ints,
    down: Ints,
    down_steps: Ints,
    down_factors: Floats,
    along: Ints,
    along_steps: Ints,
    along_factors: Floats,
) -> None:
    """Write the averages of chunks of any size, by lists; they are those that lead back."""
    number, chunk = tensor_of(table, first), first
    while chunk < last:
        row = table[number]
        begin, end = chunk_span(row, chunk, last)
        numel, out, factor = row[NUMEL], floats_at(row[X], row[ROWS] * row[COLS]), factor_of(row)
        height, width, many = row[CHUNK_ROWS], row[CHUNK_COLS], side_by_side(row)
        tile, turned, work = tiles[: many * numel], tiles[many * numel : 2 * many * numel], tiles[2 * many * numel :]
        given, touched = marks[:numel], marks[numel : 2 * numel + 1]
        given[:] = 0
        for at in range(begin, end, many):
            tile[:] = _ZERO
            for i in range(min(many, end - at)):
                total = tile[i * numel : (i + 1) * numel]
                add_chunk(
                    row, at + i, everything, picks, pick_origins, sent, origins, before, counted, total, given, touched
                )
            start, rows, cols = block_of(row, at)
            if height == 1:
                for i in range(many * width):
                    turned[i % width * many + i // width] = tile[i]
                transform(turned, width, many, tile, (1, width), along, along_steps, along_factors, work)
                rows, cols = 1, min(many * width, row[COLS] - start)
            else:
                transform(tile, width, height, turned, (1, width), along, along_steps, along_factors, work)
                transform(turned, height, width, tile, (width, 1), down, down_steps, down_factors, work)
            for i in range(many * numel):
                tile[i] = tile[i] * factor
            store_block(tile, width, out, start, row[COLS], rows, cols)
        chunk, number = row[FIRST_CHUNK] + end, number + 1
