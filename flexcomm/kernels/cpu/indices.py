"""Index codes: how a chunk's indices become bits, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.kernels.cpu.bits import get, get_window, put, put_window
from flexcomm.kernels.cpu.compiler import compiled
from flexcomm.kernels.cpu.intrinsics import count_bits, lowest_bit
from flexcomm.kernels.layout import IndexCode

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import FullWords, Int, Ints, Longs
    from flexcomm.kernels.cpu.records import Coding, Job, Scratch

__all__ = ["all_increase", "entries_before", "get_index_run", "put_index_run"]

_PACKED = int(IndexCode.PACKED)
_ELIAS_FANO = int(IndexCode.ELIAS_FANO)
_WINDOW_BITS = 64
_CHUNKS_AT_ONCE = 64


@compiled
def entries_before(before: Longs, sender: Int, chunk: Int, k: Int) -> Int:
    """Return how many entries precede a chunk: the same of every chunk, unless ``before[sender, chunk]`` says."""
    return before[sender, chunk] if before.shape[0] else chunk * k


@compiled
def put_index_run(
    words: FullWords, origin: Int, first: Int, many: Int, job: Job, coding: Coding, start: Int, scratch: Scratch
) -> None:
    """Write the picks of chunks whose first is preceded by ``start`` entries."""
    length, done = job.chunk_numel, 0
    if is_short(coding, job):
        put_short_run(words, origin, first, many, job, coding, scratch.picks)
        return
    for i in range(many):
        position = (start + done) * coding.entry_bits + (first + i) * coding.chunk_bits
        put_indices(words, position - origin, coding, scratch.picks, done, scratch.counts[i], i * length)
        done += scratch.counts[i]


@compiled
def put_short_run(words: FullWords, origin: Int, first: Int, many: Int, job: Job, coding: Coding, picks: Ints) -> None:
    """Write the picks of chunks with short codes."""
    length, k, low_bits = job.chunk_numel, job.k, coding.low_bits
    low_width, high_width, mask = k * low_bits, k + ((length - 1) >> low_bits), (1 << low_bits) - 1
    stride, at = k * coding.entry_bits + coding.chunk_bits, 0
    for i in range(many):
        position, lows, highs = (first + i) * stride - origin, np.uint64(0), np.uint64(0)
        for entry in range(k):
            index = np.int64(picks[at]) - i * length
            lows |= np.uint64(index & mask) << np.uint64(entry * low_bits)
            highs |= np.uint64(1) << np.uint64((index >> low_bits) + entry)
            at += 1
        put_window(words, position, lows, low_width)
        put_window(words, position + low_width, highs, high_width)


@compiled
def put_indices(words: FullWords, position: Int, coding: Coding, picks: Ints, at: Int, count: Int, base: Int) -> None:
    """Write ``count`` indices: the picks from ``at`` on, less ``base``."""
    if coding.code == _PACKED:
        for entry in range(count):
            put(words, position + entry * coding.entry_bits, np.int64(picks[at + entry]) - base, coding.entry_bits)
    elif coding.code == _ELIAS_FANO:
        low = (1 << coding.low_bits) - 1
        high = position + count * coding.low_bits
        for entry in range(count):
            index = np.int64(picks[at + entry]) - base
            put(words, position + entry * coding.low_bits, index & low, coding.low_bits)
            put(words, high + (index >> coding.low_bits) + entry, 1, 1)
    else:
        for entry in range(count):
            put(words, position + picks[at + entry] - base, 1, 1)


@compiled
def get_index_run(
    words: FullWords, origin: Int, first: Int, many: Int, job: Job, coding: Coding, start: Int, scratch: Scratch
) -> None:
    """Read what :func:`put_index_run` wrote."""
    length, done = job.chunk_numel, 0
    if is_short(coding, job):
        get_short_run(words, origin, first, many, job, coding, scratch.picks)
        return
    for i in range(many):
        position = origin + (start + done) * coding.entry_bits + (first + i) * coding.chunk_bits
        get_indices(words, position, coding, length, scratch.counts[i], scratch.picks, done, i * length)
        done += scratch.counts[i]


@compiled
def get_indices(
    words: FullWords, position: Int, coding: Coding, length: Int, count: Int, picks: Ints, at: Int, base: Int
) -> Int:
    """Fill ``picks`` from ``at`` on, where two chunks must have room, with the indices of a chunk, plus ``base``.

    Returns how many there are: ``count``, unless that lies.
    """
    if coding.code == _PACKED:
        for entry in range(count):
            picks[at + entry] = base + get(words, position + entry * coding.entry_bits, coding.entry_bits)
        return count
    if coding.code == _ELIAS_FANO:
        high, width = position + count * coding.low_bits, count + ((length - 1) >> coding.low_bits)
        found = get_set_bits(words, high, width, picks, at, 0)
        for entry in range(min(found, count)):
            picks[at + entry] = base + ((picks[at + entry] - entry) << coding.low_bits)
        add_low_bits(words, position, coding.low_bits, picks, at, min(found, count))
        return found
    return get_set_bits(words, position, length, picks, at, base)


@compiled
def is_short(coding: Coding, job: Job) -> Int:
    """Return whether chunks have as many entries each, and both parts of Elias and Fano's code fit a window."""
    lows, highs = job.k * coding.low_bits, job.k + ((job.chunk_numel - 1) >> coding.low_bits)
    fits = 0 < lows <= _WINDOW_BITS and highs <= _WINDOW_BITS
    return job.is_variable == 0 and coding.code == _ELIAS_FANO and fits


@compiled
def get_short_run(words: FullWords, origin: Int, first: Int, many: Int, job: Job, coding: Coding, picks: Ints) -> Int:
    """Fill ``picks`` with the indices of chunks with short codes; return whether any are wrong. No branch on data."""
    length, k, low_bits = job.chunk_numel, job.k, coding.low_bits
    low_width, high_width, mask = k * low_bits, k + ((length - 1) >> low_bits), np.uint64((1 << low_bits) - 1)
    stride, at, wrong = k * coding.entry_bits + coding.chunk_bits, 0, np.int64(0)
    for i in range(many):
        position, last = origin + (first + i) * stride, np.int64(-1)
        lows, highs = get_window(words, position, low_width), get_window(words, position + low_width, high_width)
        wrong |= np.int64(count_bits(highs)) ^ k
        for entry in range(k):
            index = ((np.int64(lowest_bit(highs)) - entry) << low_bits) | np.int64(lows & mask)
            wrong |= np.int64(index <= last)
            picks[at] = i * length + index
            at, last = at + 1, index
            lows >>= np.uint64(low_bits)
            highs &= highs - np.uint64(1)
        wrong |= np.int64(last >= length)
    return wrong != 0


@compiled
def get_set_bits(words: FullWords, position: Int, length: Int, picks: Ints, at: Int, base: Int) -> Int:
    """Fill ``picks`` from ``at`` on with the places of the bits that are set, plus ``base``; return how many."""
    found = at
    for begin in range(0, length, _WINDOW_BITS):
        window = get_window(words, position + begin, min(_WINDOW_BITS, length - begin))
        # Counted before: whether another bit follows is as good as random, and a mispredicted jump costs more.
        for _ in range(count_bits(window)):
            picks[found] = base + begin + np.int64(lowest_bit(window))
            window &= window - np.uint64(1)
            found += 1
    return found - at


@compiled
def add_low_bits(words: FullWords, position: Int, width: Int, picks: Ints, at: Int, count: Int) -> None:
    """Add the numbers of so many bits each that begin at a position."""
    if width == 0:
        return
    at_once, mask = _WINDOW_BITS // width, np.uint64((1 << width) - 1)
    for begin in range(0, count, at_once):
        many = min(at_once, count - begin)
        window = get_window(words, position + begin * width, many * width)
        for entry in range(at + begin, at + begin + many):
            picks[entry] += np.int64(window & mask)
            window >>= np.uint64(width)


@compiled
def all_increase(first: Int, last: Int, job: Job, coding: Coding, words: FullWords, section: Int, before: Longs) -> Int:
    """Return whether the indices of every chunk are as many as counted, increase, and stay inside the chunk."""
    if is_short(coding, job):
        return all_short_increase(first, last, job, coding, words, section)
    picks = np.empty(2 * job.chunk_numel + 1, np.int32)
    for chunk in range(first, last):
        start = entries_before(before, 0, chunk, job.k)
        count = entries_before(before, 0, chunk + 1, job.k) - start
        position = 32 * section + start * coding.entry_bits + chunk * coding.chunk_bits
        found = get_indices(words, position, coding, job.chunk_numel, count, picks, 0, 0)
        if found != count or not increases(picks, count, job.chunk_numel):
            return False
    return True


@compiled
def all_short_increase(first: Int, last: Int, job: Job, coding: Coding, words: FullWords, section: Int) -> Int:
    picks = np.empty(_CHUNKS_AT_ONCE * job.k, np.int32)
    for chunk in range(first, last, _CHUNKS_AT_ONCE):
        if get_short_run(words, 32 * section, chunk, min(_CHUNKS_AT_ONCE, last - chunk), job, coding, picks):
            return False
    return True


@compiled
def increases(picks: Ints, count: Int, limit: Int) -> Int:
    """Return whether indices increase strictly, from 0 on, and stay below the limit."""
    wrong = np.int32(0)
    for entry in range(1, count):
        wrong |= np.int32(picks[entry] <= picks[entry - 1])
    return not wrong and (count == 0 or (picks[0] >= 0 and picks[count - 1] < limit))
