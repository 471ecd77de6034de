"""Selection: which coefficients of a chunk are sent, without sorting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.kernels.counting import BIN_SHIFT
from flexcomm.kernels.cpu.compiler import compiled
from flexcomm.kernels.cpu.intrinsics import WINDOW, lowest_bit, reaching
from flexcomm.kernels.plan import Selection

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import Int, Ints, Longs
    from flexcomm.kernels.cpu.records import Job, Scratch

__all__ = ["SELECTIONS", "pick_chunks"]

_EVERYTHING = int(Selection.EVERYTHING)
_LARGEST = int(Selection.LARGEST)
_ABOVE = int(Selection.ABOVE)
_SHUFFLED = int(Selection.SHUFFLED)
_STRIDED = int(Selection.STRIDED)
SELECTIONS = (Selection.EVERYTHING, Selection.LARGEST, Selection.ABOVE, Selection.SHUFFLED, Selection.STRIDED)
"""Those that the functions below have a branch for; plans with others are refused before."""
_LOW32 = 0xFFFFFFFF
_TWO_OCTAVES = 2 << 23


@compiled
def collect(magnitudes: Ints, bound: Int, picks: Ints, base: Int) -> Int:
    """Fill ``picks`` with the places of all magnitudes that reach the bound, plus ``base``; return how many.

    Has no branch to mispredict: every place is stored, and overwritten unless it counts.
    """
    limit, found = np.int32(bound), 0
    for i in range(magnitudes.size):
        picks[found] = base + i
        found += magnitudes[i] >= limit
    return found


@compiled
def collect_few(magnitudes: Ints, bound: Int, picks: Ints, base: Int) -> Int:
    """Do what :func:`collect` does, faster where few of many magnitudes reach the bound."""
    limit, found, whole = np.int32(bound), 0, magnitudes.size - magnitudes.size % WINDOW
    for begin in range(0, whole, WINDOW):
        window = reaching(magnitudes, begin, limit)
        while window:
            picks[found] = base + begin + np.int64(lowest_bit(window))
            found += 1
            window &= window - np.uint64(1)
    return found + collect(magnitudes[whole:], bound, picks[found:], base + whole)


@compiled
def count_reaching(magnitudes: Ints, bound: Int) -> Int:
    limit, count = np.int32(bound), np.int32(0)
    for i in range(magnitudes.size):
        count = np.int32(count + np.int32(magnitudes[i] >= limit))
    return np.int64(count)


@compiled
def bound_of_largest(magnitudes: Ints, k: Int) -> Int:
    """Return the largest bound that at least ``k`` magnitudes reach, or one that exactly so many reach."""
    top = np.int32(0)
    for i in range(magnitudes.size):
        top = max(top, magnitudes[i])
    low, high = max(np.int64(0), np.int64(top) - _TWO_OCTAVES), np.int64(top) + 1
    reaching = count_reaching(magnitudes, low)
    while reaching < k:
        low, high = low >> 1, low
        reaching = count_reaching(magnitudes, low)
    while reaching != k and high - low > 1:
        middle = (low + high) >> 1
        reaching = count_reaching(magnitudes, middle)
        # Two choices, not a branch: which half it is cannot be predicted.
        enough = reaching >= k
        low = middle if enough else low
        high = high if enough else middle
    return low


@compiled
def pick_by_maxima(magnitudes: Ints, k: Int, tops: Ints, few: Ints, picks: Ints, base: Int) -> tuple[Int, Int]:
    """Pick those that reach the bound of the ``k`` largest of a long row, looking closely at few of them.

    Returns the bound and how many reach it.
    """
    spread = tops.size
    tops[:] = 0
    for begin in range(0, magnitudes.size - spread + 1, spread):
        row = magnitudes[begin : begin + spread]
        for i in range(spread):
            tops[i] = max(tops[i], row[i])
    # `k` of these maxima reach the floor, so at least as many magnitudes do, and seldom many more.
    floor = bound_of_largest(tops, k)
    count = collect_few(magnitudes, floor, picks, base)
    for entry in range(count):
        few[entry] = magnitudes[picks[entry] - base]
    bound, found = max(floor, bound_of_largest(few[:count], k)), 0
    for entry in range(count):
        picks[found] = picks[entry]
        found += few[entry] >= bound
    return bound, found


@compiled
def pick_largest(magnitudes: Ints, k: Int, tops: Ints, few: Ints, picks: Ints, base: Int) -> Int:
    """Pick the ``k`` largest magnitudes, in order; of equals those of lowest index."""
    if 4 * tops.size <= magnitudes.size:
        bound, count = pick_by_maxima(magnitudes, k, tops, few, picks, base)
    else:
        bound = bound_of_largest(magnitudes, k)
        count = collect(magnitudes, bound, picks, base)
    return drop_last(magnitudes, bound + 1, k, picks, base, count)


@compiled
def drop_last(magnitudes: Ints, bound: Int, k: Int, picks: Ints, base: Int, count: Int) -> Int:
    """Drop the last of those picks that stay below the bound, until ``k`` are left."""
    if count == k:
        return count
    spare = count - k
    for entry in range(count - 1, -1, -1):
        if spare > 0 and magnitudes[picks[entry] - base] < bound:
            picks[entry] = -1
            spare -= 1
    found = 0
    for entry in range(count):
        picks[found] = picks[entry]
        found += picks[entry] >= 0
    return found


@compiled
def mix32(value: Int) -> Int:
    """Scatter 32 bits: MurmurHash3's finaliser."""
    value ^= value >> 16
    value = (value * 0x85EBCA6B) & _LOW32
    value ^= value >> 13
    value = (value * 0xC2B2AE35) & _LOW32
    return value ^ (value >> 16)


@compiled
def shuffled(place: Int, length: Int, key: Int) -> Int:
    """Return where ``place`` goes in an order of ``range(length)`` that the key determines.

    Each round permutes the numbers of so many bits; one that leaves the range is sent through again.
    """
    width = 1
    while (1 << width) < length:
        width += 1
    mask, half = (1 << width) - 1, (width + 1) >> 1
    while True:
        for turn in range(4):
            place = (place + mix32((key + turn) & _LOW32)) & mask
            place = (place * 0x2C9277B5) & mask
            place ^= place >> half
        if place < length:
            return place


@compiled
def pick_shared(chunk: Int, job: Job, marks: Ints, picks: Ints, base: Int) -> Int:
    length = job.chunk_numel
    marks[:] = 0
    key = mix32((job.key + chunk * 0x9E3779B9) & _LOW32)
    for entry in range(job.k):
        if job.selection == _SHUFFLED:
            marks[shuffled((job.start + entry) % length, length, key)] = 1
        elif job.selection == _STRIDED:
            marks[(entry * length // job.k + job.start) % length] = 1
    return collect(marks, 1, picks, base)


@compiled
def pick_chunks(first: Int, many: Int, job: Job, before: Longs, magnitudes: Ints, scratch: Scratch) -> Int:
    """Fill ``scratch.picks`` and ``scratch.counts`` with what is sent of each chunk; return how many that is in all.

    Where everything is sent, there are no picks. Where it depends on the data how many are sent of a chunk, the
    differences of ``before[0]`` say.
    """
    length, total = job.chunk_numel, 0
    for i in range(many):
        # A row of its own, not an offset: where an index could be negative, numba's loops are not made into vectors.
        row, picks, base = magnitudes[i * length : (i + 1) * length], scratch.picks[total:], i * length
        count = 0
        if job.selection == _EVERYTHING:
            count = length
        elif job.selection == _LARGEST:
            count = pick_largest(row, job.k, scratch.tops, scratch.few, picks, base)
        elif job.selection == _ABOVE:
            reaching = collect(row, job.tau_bits, picks, base)
            count = before[0, first + i + 1] - before[0, first + i]
            drop_last(row, ((job.tau_bits >> BIN_SHIFT) + 1) << BIN_SHIFT, count, picks, base, reaching)
        elif not job.needs_magnitudes:
            count = pick_shared(first + i, job, scratch.few, picks, base)
        scratch.counts[i] = count
        total += count
    return total
