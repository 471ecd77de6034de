"""Index codes: how the picks of a chunk become bits, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.kernels.cpu.bits import get_window, put_window
from flexcomm.kernels.cpu.codelets import count_bits, lowest_bit
from flexcomm.kernels.cpu.compiler import compiled, kept
from flexcomm.kernels.cpu.tables import (
    CHUNK_BITS,
    ENTRY_BITS,
    FIRST_CHUNK,
    FIRST_ENTRY,
    INDICES,
    LOW_BITS,
    NUMEL,
    chunk_span,
    entries_before,
    tensor_of,
)
from flexcomm.kernels.layout import IndexCode

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import FullWords, Int, Ints, Longs

__all__ = ["put_indices", "read_counts", "read_indices", "write_counts"]

_PACKED = int(IndexCode.PACKED)
_ELIAS_FANO = int(IndexCode.ELIAS_FANO)
_WINDOW_BITS = 64
_ONE = np.uint64(1)


@compiled
def put_numbers(words: FullWords, position: Int, width: Int, numbers: Ints, mask: Int) -> None:
    """Write the lowest ``width`` bits of numbers, one behind the other, as many at a time as fit a window."""
    if width == 0:
        return
    at_once, lowest = _WINDOW_BITS // width, np.uint64(mask)
    for begin in range(0, numbers.size, at_once):
        many, window = min(at_once, numbers.size - begin), np.uint64(0)
        for i in range(many):
            window |= (np.uint64(numbers[begin + i]) & lowest) << np.uint64(i * width)
        put_window(words, position + begin * width, window, many * width)


@kept
def put_indices(
    table: Longs, first: Int, last: Int, code: Int, picks: Ints, before: Longs, origin: Int, words: FullWords
) -> None:
    """Write the picks of chunks; the first of ``picks`` is the group's entry ``origin``."""
    number, chunk = tensor_of(table, first), first
    while chunk < last:
        row = table[number]
        begin, end = chunk_span(row, chunk, last)
        low_bits = row[LOW_BITS]
        for at in range(begin, end):
            start, stop = entries_before(row, at, before), entries_before(row, at + 1, before)
            own = picks[row[FIRST_ENTRY] + start - origin : row[FIRST_ENTRY] + stop - origin]
            position = 32 * row[INDICES] + start * row[ENTRY_BITS] + at * row[CHUNK_BITS]
            if code == _PACKED:
                put_numbers(words, position, row[ENTRY_BITS], own, (1 << row[ENTRY_BITS]) - 1)
            elif code == _ELIAS_FANO:
                put_numbers(words, position, low_bits, own, (1 << low_bits) - 1)
                position += own.size * low_bits
                for entry in range(own.size):
                    bit = position + (own[entry] >> low_bits) + entry
                    words[bit >> 5] |= np.uint32(_ONE << np.uint64(bit & 31))
            else:
                for entry in range(own.size):
                    bit = position + own[entry]
                    words[bit >> 5] |= np.uint32(_ONE << np.uint64(bit & 31))
        chunk, number = row[FIRST_CHUNK] + end, number + 1


@compiled
def get_set_bits(words: FullWords, position: Int, length: Int, picks: Ints) -> Int:
    """Fill ``picks`` with the places of the bits that are set; return how many, of which only so many are filled."""
    found: Int = 0
    for begin in range(0, length, _WINDOW_BITS):
        window = get_window(words, position + begin, min(_WINDOW_BITS, length - begin))
        many: Int = np.int64(count_bits(window))
        # Counted before: whether another bit follows is as good as random, and a mispredicted jump costs more.
        for entry in range(found, min(found + many, picks.size)):
            picks[entry] = begin + np.int64(lowest_bit(window))
            window &= window - _ONE
        found += many
    return found


@compiled
def add_numbers(words: FullWords, position: Int, width: Int, picks: Ints) -> None:
    """Add the numbers of so many bits each that begin at a position."""
    if width == 0:
        return
    at_once, mask = _WINDOW_BITS // width, np.uint64((1 << width) - 1)
    for begin in range(0, picks.size, at_once):
        many = min(at_once, picks.size - begin)
        window = get_window(words, position + begin * width, many * width)
        for entry in range(begin, begin + many):
            picks[entry] += np.int64(window & mask)
            window >>= np.uint64(width)


@compiled
def get_indices(words: FullWords, position: Int, code: Int, row: Longs, picks: Ints) -> Int:
    """Fill ``picks`` with the indices of a chunk; return whether they increase and stay inside of it."""
    found, low_bits, numel = picks.size, row[LOW_BITS], row[NUMEL]
    if code == _PACKED:
        picks[:] = 0
        add_numbers(words, position, row[ENTRY_BITS], picks)
    elif code == _ELIAS_FANO:
        high, width = position + picks.size * low_bits, picks.size + ((numel - 1) >> low_bits)
        found = get_set_bits(words, high, width, picks)
        for entry in range(picks.size):
            picks[entry] = (picks[entry] - entry) << low_bits
        add_numbers(words, position, low_bits, picks)
    else:
        found = get_set_bits(words, position, numel, picks)
    wrong = np.int32(found != picks.size)
    for entry in range(1, picks.size):
        wrong |= np.int32(picks[entry] <= picks[entry - 1])
    return not wrong and (picks.size == 0 or (picks[0] >= 0 and picks[picks.size - 1] < numel))


@kept
def read_indices(
    table: Longs, first: Int, last: Int, code: Int, words: FullWords, start: Int, before: Longs, picks: Ints
) -> Int:
    """Fill ``picks`` with the indices of a sender, whose buffer begins at word ``start``.

    Returns 0, or 1 + the first tensor whose indices are wrong.
    """
    number, chunk = tensor_of(table, first), first
    while chunk < last:
        row = table[number]
        begin, end = chunk_span(row, chunk, last)
        for at in range(begin, end):
            entry, stop = entries_before(row, at, before), entries_before(row, at + 1, before)
            own = picks[row[FIRST_ENTRY] + entry : row[FIRST_ENTRY] + stop]
            position = 32 * (start + row[INDICES]) + entry * row[ENTRY_BITS] + at * row[CHUNK_BITS]
            if not get_indices(words, position, code, row, own):
                return 1 + number
        chunk, number = row[FIRST_CHUNK] + end, number + 1
    return 0


@kept
def write_counts(words: FullWords, counts: Longs, width: Int) -> None:
    for chunk in range(counts.size):
        put_window(words, chunk * width, np.uint64(counts[chunk]), width)


@kept
def read_counts(words: FullWords, width: Int, counts: Longs) -> Int:
    """Fill ``counts``; return the largest of them."""
    top = np.int64(0)
    for chunk in range(counts.size):
        counts[chunk] = np.int64(get_window(words, chunk * width, width))
        top = max(top, counts[chunk])
    return top
