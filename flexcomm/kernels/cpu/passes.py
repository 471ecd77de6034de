"""Passes over a range of chunks: every chunk is read once, worked on in cache, and written once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.kernels.cpu.bits import get, get_indices, put, put_indices
from flexcomm.kernels.cpu.compiler import compiled
from flexcomm.kernels.cpu.floats import to_bits
from flexcomm.kernels.cpu.records import Coding, Desk, Tiles
from flexcomm.kernels.cpu.selection import pick_chunks
from flexcomm.kernels.cpu.transform import lanes_of, load_chunks, store_chunks
from flexcomm.kernels.cpu.values import get_values, put_values
from flexcomm.kernels.plan import IndexCode, Selection, ValueCode

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import Floats, FullWords, Int, Integers, Ints, Longs
    from flexcomm.kernels.cpu.records import Job, Source, Target, Words

__all__ = [
    "add_checksum",
    "decode_chunks",
    "encode_chunks",
    "find_fault_in_chunks",
    "histogram_of_chunks",
    "largest_bits",
    "read_counts",
    "survey_chunks",
    "write_counts",
]

_LARGEST = int(Selection.LARGEST)
_ABOVE = int(Selection.ABOVE)
_FP32 = int(ValueCode.FP32)
_BF16 = int(ValueCode.BF16)
_INT8 = int(ValueCode.INT8)
_SIGN = int(ValueCode.SIGN)
_NO_INDEX = int(IndexCode.NONE)
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_SUM_LANES = 32


@compiled
def make_tiles(source: Source, job: Job) -> Tiles:
    lanes = lanes_of(job)
    return Tiles(
        np.empty((lanes, job.chunk_numel), np.float32),
        np.empty((lanes, job.chunk_numel), np.int32),
        np.empty((source.down.height, job.chunk_cols), np.float32),
        np.empty((source.along.height, max(lanes, job.chunk_rows)), np.float32),
    )


@compiled
def make_desk(job: Job) -> Desk:
    length, lanes, spread = job.chunk_numel, lanes_of(job), 64
    while job.selection == _LARGEST and spread < 2 * job.keep:
        spread *= 2
    return Desk(
        np.empty((lanes + 2) * length + 1, np.int32),
        np.empty(lanes * length, np.float32),
        np.empty(lanes, np.int64),
        np.empty(spread, np.int32),
        np.empty(length + 1, np.int32),
        np.empty(_SUM_LANES, np.float32),
    )


@compiled
def accumulate(rows: Floats, coefs: Floats, chunk: Int, source: Source) -> None:
    """Fill rows with ``decay * state + factor * coefs``, in float32, or without a state with the latter."""
    decay, factor = source.decay, source.factor
    if source.state.shape[0] == 0:
        for i in range(rows.size):
            rows[i] = factor * coefs[i]
        return
    begin = chunk * source.state.shape[1]
    before = source.state.reshape(-1)[begin : begin + rows.size]
    for i in range(rows.size):
        rows[i] = decay * before[i] + factor * coefs[i]


@compiled
def fill_magnitudes(magnitudes: Ints, rows: Floats) -> None:
    bits = rows.view(np.int32)
    for i in range(rows.size):
        magnitudes[i] = bits[i] & np.int32(_MAGNITUDE)


@compiled
def entries_before(before: Longs, sender: Int, chunk: Int, keep: Int) -> Int:
    """Return how many entries precede a chunk: the same of every chunk, unless ``before[sender, chunk]`` says."""
    return before[sender, chunk] if before.shape[0] else chunk * keep


@compiled
def encode_chunks(
    first: Int, last: Int, source: Source, next_state: Floats, job: Job, coding: Coding, before: Longs, target: Target
) -> Int:
    """Encode chunks; return how many of the sent coefficients are not finite, which only a broken state can cause."""
    tiles, desk, lanes, length, broken = make_tiles(source, job), make_desk(job), lanes_of(job), job.chunk_numel, 0
    for begin in range(first, last, lanes):
        many = min(lanes, last - begin)
        load_chunks(source, begin, many, job, tiles)
        rows, magnitudes = tiles.coefs.reshape(-1)[: many * length], tiles.magnitudes.reshape(-1)
        if next_state.shape[0]:
            rows = next_state.reshape(-1)[begin * length : (begin + many) * length]
        accumulate(rows, tiles.coefs.reshape(-1), begin, source)
        if job.selection == _LARGEST or job.selection == _ABOVE:
            fill_magnitudes(magnitudes, rows)
        count = pick_chunks(begin, many, job, magnitudes, desk)
        take(rows, count, desk)
        broken += count_broken(desk.taken, count)
        start = entries_before(before, 0, begin, job.keep)
        if coding.code != _NO_INDEX:
            put_index_run(target.indices, target.index_origin, begin, many, length, coding, start, desk)
        put_values(target, start * job.value_bits - target.value_origin, begin, many, job, count, desk)
        give_back(rows, count, desk)
    return broken


@compiled
def put_index_run(
    words: FullWords, origin: Int, first: Int, many: Int, length: Int, coding: Coding, start: Int, desk: Desk
) -> None:
    """Write the picks of chunks whose first is preceded by ``start`` entries."""
    done = 0
    for i in range(many):
        position = (start + done) * coding.entry_bits + (first + i) * coding.chunk_bits
        put_indices(words, position - origin, coding, desk.picks, done, desk.counts[i], i * length)
        done += desk.counts[i]


@compiled
def take(rows: Floats, count: Int, desk: Desk) -> None:
    """Lay what was picked one behind the other."""
    if count == rows.size:
        desk.taken[:count] = rows
        return
    for entry in range(count):
        desk.taken[entry] = rows[desk.picks[entry]]


@compiled
def give_back(rows: Floats, count: Int, desk: Desk) -> None:
    """Put what was not sent of the picked coefficients where they were."""
    if count == rows.size:
        rows[:] = desk.taken[:count]
        return
    for entry in range(count):
        rows[desk.picks[entry]] = desk.taken[entry]


@compiled
def count_broken(taken: Floats, count: Int) -> Int:
    broken = 0
    for entry in range(count):
        broken += (to_bits(taken[entry]) & _MAGNITUDE) >= _INFINITY
    return broken


@compiled
def survey_chunks(first: Int, last: Int, source: Source, job: Job, counts: Longs) -> None:
    """Count what reaches the threshold in each chunk; nothing is changed."""
    tiles, lanes = make_tiles(source, job), lanes_of(job)
    for begin in range(first, last, lanes):
        many = min(lanes, last - begin)
        load_chunks(source, begin, many, job, tiles)
        for i in range(many):
            accumulate(tiles.coefs[i], tiles.coefs[i], begin + i, source)
            bits, count = tiles.coefs[i].view(np.int32), np.int32(0)
            for j in range(bits.size):
                count += np.int32((bits[j] & np.int32(_MAGNITUDE)) >= np.int32(job.tau_bits))
            counts[begin + i] = count


@compiled
def histogram_of_chunks(first: Int, last: Int, source: Source, job: Job, bins: Longs) -> None:
    """Count magnitudes by the upper half of their bits; nothing else is changed."""
    tiles, lanes = make_tiles(source, job), lanes_of(job)
    for begin in range(first, last, lanes):
        many = min(lanes, last - begin)
        load_chunks(source, begin, many, job, tiles)
        for i in range(many):
            accumulate(tiles.coefs[i], tiles.coefs[i], begin + i, source)
            bits = tiles.coefs[i].view(np.int32)
            for j in range(bits.size):
                bins[(bits[j] & _MAGNITUDE) >> 16] += 1


@compiled
def write_counts(words: FullWords, counts: Longs, width: Int) -> None:
    for chunk in range(counts.size):
        put(words, chunk * width, counts[chunk], width)


@compiled
def read_counts(words: FullWords, width: Int, limit: Int, counts: Longs) -> Int:
    """Fill ``counts``; return how many of them are beyond the limit."""
    wrong = 0
    for chunk in range(counts.size):
        counts[chunk] = get(words, chunk * width, width)
        wrong += counts[chunk] > limit
    return wrong


@compiled
def find_fault_in_chunks(
    first: Int, last: Int, job: Job, coding: Coding, words: Words, sections: Longs, before: Longs
) -> Int:
    """Return what is wrong with the chunks: 0 nothing, 1 an index, 2 a scale, 3 a value."""
    if coding.code != _NO_INDEX and not all_increase(first, last, job, coding, words.full, sections[0], before):
        return 1
    begin = 2 * sections[1]
    for place in range(begin + first * job.scales, begin + last * job.scales):
        if words.halves[place] >= 0x7F80:
            return 2
    start, end = entries_before(before, 0, first, job.keep), entries_before(before, 0, last, job.keep)
    return 0 if all_finite(words, sections[2], job.values, start, end) else 3


@compiled
def all_increase(first: Int, last: Int, job: Job, coding: Coding, words: FullWords, section: Int, before: Longs) -> Int:
    """Return whether the indices of every chunk are as many as counted, increase, and stay inside the chunk."""
    picks = np.empty(2 * job.chunk_numel + 1, np.int32)
    for chunk in range(first, last):
        start = entries_before(before, 0, chunk, job.keep)
        count = entries_before(before, 0, chunk + 1, job.keep) - start
        position = 32 * section + start * coding.entry_bits + chunk * coding.chunk_bits
        found = get_indices(words, position, coding, job.chunk_numel, count, picks, 0, 0)
        if found != count or not increases(picks, count, job.chunk_numel):
            return False
    return True


@compiled
def increases(picks: Ints, count: Int, limit: Int) -> Int:
    """Return whether indices increase strictly, from 0 on, and stay below the limit."""
    wrong = np.int32(0)
    for entry in range(1, count):
        wrong |= np.int32(picks[entry] <= picks[entry - 1])
    return not wrong and (count == 0 or (picks[0] >= 0 and picks[count - 1] < limit))


@compiled
def all_finite(words: Words, section: Int, values: Int, start: Int, end: Int) -> Int:
    wrong = np.int32(0)
    if values == _FP32:
        full = words.full[section + start : section + end]
        for entry in range(full.size):
            wrong |= np.int32((full[entry] & np.uint32(_INFINITY)) == np.uint32(_INFINITY))
    elif values != _INT8 and values < _SIGN:
        halves = words.halves[2 * section + start : 2 * section + end]
        infinite = np.uint16(0x7F80) if values == _BF16 else np.uint16(0x7C00)
        for entry in range(halves.size):
            wrong |= np.int32((halves[entry] & infinite) == infinite)
    return not wrong


@compiled
def decode_chunks(
    first: Int, last: Int, target: Source, job: Job, words: Words, sections: Longs, before: Longs, by_contributors: Int
) -> None:
    """Add the senders' payloads in order, divide, transform back once, and write the elements.

    ``sections[sender]`` holds where indices, scales and values begin, in words, and then how indices are written.
    """
    tiles, desk, lanes = make_tiles(target, job), make_desk(job), lanes_of(job)
    given, touched = np.zeros(lanes * job.chunk_numel, np.int32), np.empty(lanes * job.chunk_numel + 1, np.int32)
    # Where indices are not sent, everybody sends the same ones.
    senders = sections.shape[0]
    counted = by_contributors and sections[0, 3] != _NO_INDEX
    for begin in range(first, last, lanes):
        many, places = min(lanes, last - begin), 0
        total = tiles.coefs.reshape(-1)[: many * job.chunk_numel]
        total[:] = _ZERO
        for sender in range(senders):
            count = get_entries(begin, many, job, words, sections[sender], before, sender, desk)
            add(total, count, desk)
            if counted:
                places = count_contributors(given, touched, places, count, desk)
        if counted:
            divide_by_contributors(total, given, touched, places)
        elif senders > 1:
            for i in range(total.size):
                total[i] = total[i] / np.float32(senders)
        store_chunks(target, begin, many, job, tiles)


@compiled
def get_entries(
    first: Int, many: Int, job: Job, words: Words, sections: Longs, before: Longs, sender: Int, desk: Desk
) -> Int:
    """Fill ``desk`` with what a sender sent of some chunks; return how many entries that is."""
    start = entries_before(before, sender, first, job.keep)
    coding = Coding(sections[3], sections[4], sections[5], sections[6])
    for i in range(many):
        desk.counts[i] = entries_before(before, sender, first + i + 1, job.keep)
        desk.counts[i] -= entries_before(before, sender, first + i, job.keep)
    count = entries_before(before, sender, first + many, job.keep) - start
    if coding.code != _NO_INDEX:
        get_index_run(words.full, 32 * sections[0], first, many, job.chunk_numel, coding, start, desk)
    elif sender == 0:
        pick_chunks(first, many, job, desk.few, desk)
    get_values(words, 32 * sections[2] + start * job.value_bits, sections[1], first, many, job, count, desk)
    return count


@compiled
def get_index_run(
    words: FullWords, origin: Int, first: Int, many: Int, length: Int, coding: Coding, start: Int, desk: Desk
) -> None:
    """Read what :func:`put_index_run` wrote."""
    done = 0
    for i in range(many):
        position = origin + (start + done) * coding.entry_bits + (first + i) * coding.chunk_bits
        get_indices(words, position, coding, length, desk.counts[i], desk.picks, done, i * length)
        done += desk.counts[i]


@compiled
def add(total: Floats, count: Int, desk: Desk) -> None:
    sent, picks = desk.taken, desk.picks
    if count == total.size:
        for i in range(count):
            total[i] += sent[i]
        return
    for entry in range(count):
        total[picks[entry]] += sent[entry]


@compiled
def count_contributors(given: Ints, touched: Ints, places: Int, count: Int, desk: Desk) -> Int:
    """Count one more sender of each pick; return how many places were picked so far, which ``touched`` lists."""
    for entry in range(count):
        at = desk.picks[entry]
        touched[places] = at
        places += given[at] == 0
        given[at] += np.int32(1)
    return places


@compiled
def divide_by_contributors(total: Floats, given: Ints, touched: Ints, places: Int) -> None:
    """Divide the picked places' sums, and forget the counts."""
    for place in range(places):
        at = touched[place]
        total[at] = total[at] / np.float32(given[at])
        given[at] = 0


@compiled
def largest_bits(bits: Integers, mask: Int) -> Int:
    """Return the largest of the elements' bits, without their sign: as magnitudes, the largest magnitude."""
    largest = bits[0] & mask
    for i in range(bits.size):
        largest = max(largest, bits[i] & mask)
    return np.int64(largest)


@compiled
def add_checksum(words: FullWords, first: Int) -> Int:
    """Return the sum of scattered words, each scattered with its place: it adds up in any order, on any device."""
    total = np.uint32(0)
    for i in range(words.size):
        value = np.uint32(words[i] ^ np.uint32(np.uint32(first + i) * np.uint32(0x9E3779B9)))
        value = np.uint32(value ^ (value >> np.uint32(16)))
        value = np.uint32(value * np.uint32(0x85EBCA6B))
        value = np.uint32(value ^ (value >> np.uint32(13)))
        value = np.uint32(value * np.uint32(0xC2B2AE35))
        value = np.uint32(value ^ (value >> np.uint32(16)))
        total = np.uint32(total + value)
    return np.int64(total)
