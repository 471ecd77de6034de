"""Index codes: how the picks of a chunk become bits, and back."""

from __future__ import annotations

import numpy as np

from flexcomm.kernels.base import Problem
from flexcomm.kernels.cpu import tables as t
from flexcomm.kernels.cpu.bits import get_window, put_window
from flexcomm.kernels.cpu.compiler import FullWords, Int, Ints, Longs, cached_kernel, compiled
from flexcomm.kernels.cpu.instructions import count_bits, lowest_bit, words_at
from flexcomm.kernels.cpu.tables import entries_before, entries_in, picks_of, start_of
from flexcomm.kernels.layout import IndexCode

_PACKED = int(IndexCode.PACKED)
_ELIAS_FANO = int(IndexCode.ELIAS_FANO)
_BITMAP = int(IndexCode.BITMAP)
_INDEX = int(Problem.INDEX)
_WINDOW_BITS = 64
_ONE = np.uint64(1)


@compiled
def put_numbers(words: FullWords, position: Int, width: Int, numbers: Ints, count: Int) -> None:
    """Write the lowest ``width`` bits of numbers, one behind the other, as many at a time as fit a window."""
    if width == 0:
        return
    at_once, mask = _WINDOW_BITS // width, np.uint64((1 << width) - 1)
    for begin in range(0, count, at_once):
        many, window = min(at_once, count - begin), np.uint64(0)
        for i in range(many):
            window |= (np.uint64(numbers[begin + i]) & mask) << np.uint64(i * width)
        put_window(words, position + begin * width, window, many * width)


@cached_kernel
def put_indices(row: Longs, job: Longs) -> Int:
    """Write the picks of chunks."""
    words, code, low_bits = words_at(job[t.WORDS]), row[t.CODE], row[t.LOW_BITS]
    for at in range(job[t.FIRST], job[t.LAST]):
        own, position, count = picks_of(row, job, 0, at), position_of(row, job, at), entries_in(row, job, 0, at)
        if code == _PACKED:
            put_numbers(words, position, row[t.ENTRY_BITS], own, count)
            continue
        if code == _ELIAS_FANO and count * (low_bits + 1) + row[t.CHUNK_BITS] <= _WINDOW_BITS:
            put_short(words, position, low_bits, own, count)
            continue
        if code == _BITMAP and row[t.NUMEL] <= _WINDOW_BITS:
            window = np.uint64(0)
            for entry in range(count):
                window |= _ONE << np.uint64(own[entry])
            put_window(words, position, window, row[t.NUMEL])
            continue
        # Of a bitmap, there are no low bits, and bits do not move with the entries before them.
        put_numbers(words, position, low_bits, own, count)
        position, step = position + count * low_bits, np.int64(code == _ELIAS_FANO)
        for entry in range(count):
            bit = position + (own[entry] >> low_bits) + step * entry
            words[bit >> 5] |= np.uint32(_ONE << np.uint64(bit & 31))
    return 0


@compiled
def put_short(words: FullWords, position: Int, low_bits: Int, own: Ints, count: Int) -> None:
    """Write the Elias-Fano code of picks that fit a window."""
    window, mask, high, width = np.uint64(0), np.uint64((1 << low_bits) - 1), count * low_bits, 0
    for entry in range(count):
        width = high + (own[entry] >> low_bits) + entry + 1
        window |= (np.uint64(own[entry]) & mask) << np.uint64(entry * low_bits)
        window |= _ONE << np.uint64(width - 1)
    if count:
        put_window(words, position, window, width)


@compiled
def get_short(words: FullWords, position: Int, row: Longs, picks: Ints, count: Int) -> Int:
    """Fill ``picks`` from an Elias-Fano code that fits a window; return whether they increase and stay inside."""
    low_bits, numel = row[t.LOW_BITS], row[t.NUMEL]
    lows = get_window(words, position, count * (low_bits + 1) + ((numel - 1) >> low_bits))
    bits, mask, last = lows >> np.uint64(count * low_bits), np.uint64((1 << low_bits) - 1), -1
    wrong: Int = np.int64(count_bits(bits)) != count
    for entry in range(count):
        pick = ((np.int64(lowest_bit(bits)) - entry) << low_bits) | np.int64(lows & mask)
        wrong |= pick <= last
        picks[entry], last = pick, pick
        bits &= bits - _ONE
        lows >>= np.uint64(low_bits)
    return not wrong and last < numel


@compiled
def position_of(row: Longs, job: Longs, chunk: Int) -> Int:
    """Return the bit at which a chunk's indices begin."""
    entry = entries_before(row, job, 0, chunk)
    return 32 * (start_of(job, 0) + row[t.INDICES]) + entry * row[t.ENTRY_BITS] + chunk * row[t.CHUNK_BITS]


@compiled
def get_set_bits(words: FullWords, position: Int, length: Int, picks: Ints, count: Int) -> Int:
    """Fill ``picks`` with the places of the bits that are set; return how many, of which only so many are filled."""
    found: Int = 0
    for begin in range(0, length, _WINDOW_BITS):
        window = get_window(words, position + begin, min(_WINDOW_BITS, length - begin))
        many: Int = np.int64(count_bits(window))
        # Counted before: whether another bit follows is as good as random, and a mispredicted jump costs more.
        for entry in range(found, min(found + many, count)):
            picks[entry] = begin + np.int64(lowest_bit(window))
            window &= window - _ONE
        found += many
    return found


@compiled
def add_numbers(words: FullWords, position: Int, width: Int, picks: Ints, count: Int) -> None:
    """Add the numbers of so many bits each that begin at a position."""
    if width == 0:
        return
    at_once, mask = _WINDOW_BITS // width, np.uint64((1 << width) - 1)
    for begin in range(0, count, at_once):
        many = min(at_once, count - begin)
        window = get_window(words, position + begin * width, many * width)
        for entry in range(begin, begin + many):
            picks[entry] += np.int64(window & mask)
            window >>= np.uint64(width)


@compiled
def get_indices(words: FullWords, position: Int, row: Longs, picks: Ints, count: Int) -> Int:
    """Fill ``picks`` with the indices of a chunk; return whether they increase and stay inside of it."""
    found, low_bits, numel = count, row[t.LOW_BITS], row[t.NUMEL]
    if row[t.CODE] == _ELIAS_FANO and 0 < count * (low_bits + 1) + ((numel - 1) >> low_bits) <= _WINDOW_BITS:
        return get_short(words, position, row, picks, count)
    if row[t.CODE] == _PACKED:
        for entry in range(count):
            picks[entry] = 0
        add_numbers(words, position, row[t.ENTRY_BITS], picks, count)
    elif row[t.CODE] == _ELIAS_FANO:
        found = get_set_bits(words, position + count * low_bits, count + ((numel - 1) >> low_bits), picks, count)
        for entry in range(count):
            picks[entry] = (picks[entry] - entry) << low_bits
        add_numbers(words, position, low_bits, picks, count)
    else:
        # Bits come in order, and from inside of the chunk alone.
        return get_set_bits(words, position, numel, picks, count) == count
    wrong = np.int32(found != count)
    for entry in range(1, count):
        wrong |= np.int32(picks[entry] <= picks[entry - 1])
    return not wrong and (count == 0 or (picks[0] >= 0 and picks[count - 1] < numel))


@cached_kernel
def read_indices(row: Longs, job: Longs) -> Int:
    """Fill in the picks of one sender."""
    words = words_at(job[t.WORDS])
    for at in range(job[t.FIRST], job[t.LAST]):
        count = entries_in(row, job, 0, at)
        if not get_indices(words, position_of(row, job, at), row, picks_of(row, job, 0, at), count):
            return _INDEX
    return 0


@cached_kernel
def put_counts(row: Longs, job: Longs) -> Int:
    """Write how many entries each chunk has, in front of their indices."""
    words, width = words_at(job[t.WORDS]), count_width(row)
    begin = 32 * (row[t.INDICES] - -(-row[t.CHUNKS] * width // 32))
    for at in range(job[t.FIRST], job[t.LAST]):
        put_window(words, begin + at * width, np.uint64(entries_in(row, job, 0, at)), width)
    return 0


@compiled
def count_width(row: Longs) -> Int:
    """Return how many bits a count has."""
    width = 0
    while row[t.NUMEL] >> width:
        width += 1
    return width


@cached_kernel
def read_counts(words: FullWords, width: Int, counts: Longs) -> Int:
    """Fill ``counts``; return the largest of them."""
    top = np.int64(0)
    for chunk in range(counts.size):
        counts[chunk] = np.int64(get_window(words, chunk * width, width))
        top = max(top, counts[chunk])
    return top
