"""Selections: which coefficients of each chunk are sent. Picks are places in the chunk, in increasing order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flexcomm.kernels.cpu import tables as t
from flexcomm.kernels.cpu.codelets import LANES, LENGTH, find_bounds
from flexcomm.kernels.cpu.compiler import Int, Ints, Longs, cached_kernel, compiled
from flexcomm.kernels.cpu.instructions import WINDOW, count_bits, ints_at, longs_at, lowest_bit, reaching
from flexcomm.kernels.cpu.tables import coefs_at, entries_in, picks_of
from flexcomm.kernels.plan import BIN_SHIFT, Selection, TensorPlan

_MAGNITUDE = np.int32(0x7FFFFFFF)
_TWO_OCTAVES = 2 << 23
_LOW32 = 0xFFFFFFFF
_MOST_BINS = 1024
MOST_BEHIND = 4
"""How many entries behind the last pick :func:`list_bits` may write."""


def bins_for(numel: int, k: int) -> int:
    """Return into how many running maxima the magnitudes of a chunk are sorted; 0: it is not worth it.

    ``k`` of these maxima reach the ``k``-th of them, so at least as many magnitudes do, and seldom many more.
    """
    bins = 128
    while bins < 2 * k:
        bins *= 2
    return bins if bins <= _MOST_BINS and 4 * bins <= numel and numel % bins == 0 else 0


@compiled
def count_windows(address: Int, windows: Int, bound: Int) -> Int:
    """Return how many magnitudes reach a bound."""
    count = np.int64(0)
    for window in range(windows):
        count += np.int64(count_bits(reaching(address + 4 * WINDOW * window, np.int32(bound))))
    return count


@compiled
def bound_of_largest(address: Int, windows: Int, k: Int, low: Int, top: Int) -> Int:
    """Return the largest bound that at least ``k`` magnitudes reach, or one that exactly so many reach.

    None is above ``top``, and ``low`` is where to begin.
    """
    high, reached = top + 1, count_windows(address, windows, low)
    while reached < k:
        low, high = low >> 1, low
        reached = count_windows(address, windows, low)
    while reached != k and high - low > 1:
        middle = (low + high) >> 1
        reached = count_windows(address, windows, middle)
        # Two choices, not a branch: which half it is cannot be predicted.
        enough = reached >= k
        low = middle if enough else low
        high = high if enough else middle
    return low


@compiled
def largest_of(address: Int, count: Int) -> Int:
    numbers, top = ints_at(address), np.int32(0)
    for i in range(count):
        top = numbers[i] if numbers[i] > top else top
    return np.int64(top)


@compiled
def collect(address: Int, windows: Int, bound: Int, picks: Ints) -> Int:
    """Fill ``picks`` with the places of all magnitudes that reach the bound; return how many."""
    found = 0
    for window in range(windows):
        found = list_bits(reaching(address + 4 * WINDOW * window, np.int32(bound)), WINDOW * window, picks, found)
    return found


@compiled
def list_bits(bits: Int, first: Int, picks: Ints, found: Int) -> Int:
    """Fill ``picks`` from ``found`` on with the places of the bits that are set; return where they end.

    Some entries behind that are written, too: how many bits follow is as good as random, and a mispredicted jump costs
    more than a few stores.
    """
    end = found + np.int64(count_bits(bits))
    for entry in range(found, found + MOST_BEHIND):
        picks[entry] = first + np.int64(lowest_bit(bits))
        bits &= bits - np.uint64(1)
    for entry in range(found + MOST_BEHIND, end):
        picks[entry] = first + np.int64(lowest_bit(bits))
        bits &= bits - np.uint64(1)
    return end


@compiled
def fill_magnitudes(values: Ints, numel: Int, magnitudes: Ints) -> None:
    """Copy magnitudes, and zeros behind them up to a whole window."""
    for i in range(numel):
        magnitudes[i] = np.int32(values[i] & _MAGNITUDE)
    for i in range(numel, -(-numel // WINDOW) * WINDOW):
        magnitudes[i] = 0


@compiled
def drop_last(magnitudes: Ints, bound: Int, k: Int, picks: Ints, count: Int) -> None:
    """Drop the last of those picks whose magnitudes stay below the bound, until ``k`` are left."""
    spare, left = count - k, 0
    for entry in range(count):
        left += magnitudes[entry] < bound
    taken, dropped_from, left = 0, left - spare, 0
    for entry in range(count):
        is_below = magnitudes[entry] < bound
        picks[taken] = picks[entry]
        taken += not (is_below and left >= dropped_from)
        left += is_below


@cached_kernel
def pick_top_k(row: Longs, job: Longs) -> Int:
    """Pick the ``k`` largest magnitudes of every chunk; of equals those of lowest index.

    TOPS has so many BINS of running maxima for each chunk, which are filled here unless the transform did.
    """
    k, numel, bins, windows = row[t.K], row[t.NUMEL], row[t.BINS], -(-row[t.NUMEL] // WINDOW)
    few_at = job[t.MEMORY] + 4 * (numel + WINDOW)
    picks, few = ints_at(job[t.MEMORY]), ints_at(few_at)
    for at in range(job[t.FIRST], job[t.LAST]):
        address, chosen = coefs_at(row, job, at), picks_of(row, job, 0, at)
        values, maxima, searched = ints_at(address), job[t.TOPS] + 4 * bins * (at - job[t.FIRST]), bins // WINDOW
        if bins == 0:
            fill_magnitudes(values, numel, few)
            address, maxima, searched = few_at, few_at, windows
        elif row[t.FILLS_BINS]:
            fill_maxima(values, numel, ints_at(maxima), bins)
        top = largest_of(maxima, searched * WINDOW)
        # Zeros are never looked for: where they are needed, the first ones are taken.
        bound = max(bound_of_largest(maxima, searched, k, max(0, top - _TWO_OCTAVES), top), 1)
        count = collect(address, windows, bound, picks)
        if count < k:
            fill_up_with_zeros(picks, count, chosen, k)
            continue
        if count > k:
            for entry in range(count):
                few[entry] = values[picks[entry]] & _MAGNITUDE
            if bins:
                count, bound = narrow(few_at, picks, count, k, bound, top)
            drop_last(few, bound + 1, k, picks, count)
        for entry in range(k):
            chosen[entry] = picks[entry]
    return 0


@cached_kernel
def pick_top_k_of_rows(row: Longs, job: Longs) -> Int:
    """Pick as :func:`pick_top_k` does, of chunks of 64, so many at a time as a vector has lanes."""
    k, rows, bounds = row[t.K], job[t.TILES], ints_at(job[t.TOPS])
    job[t.TARGET], job[t.MAXIMA] = rows + 4 * LANES * LENGTH, job[t.TOPS]
    for begin in range(job[t.FIRST], job[t.LAST], LANES):
        many, source = min(LANES, job[t.LAST] - begin), coefs_at(row, job, begin)
        if many < LANES:
            # What is behind the last chunk is not ours.
            copied, coefs = ints_at(rows), ints_at(source)
            for i in range(LANES * LENGTH):
                copied[i] = coefs[i] if i < many * LENGTH else 0
            source = rows
        job[t.SOURCE] = source
        find_bounds(row, job)
        for number in range(many):
            address = source + 4 * LENGTH * number
            bits = reaching(address, bounds[number])
            spare = np.int64(count_bits(bits)) - k
            if spare > 0:
                # Of equals the last ones stay.
                equal = bits & ~reaching(address, np.int32(bounds[number] + 1))
                for _ in range(np.int64(count_bits(equal)) - spare):
                    equal &= equal - np.uint64(1)
                bits &= ~equal
            list_bits(bits, 0, picks_of(row, job, 0, begin + number), 0)
    return 0


@compiled
def fill_maxima(values: Ints, numel: Int, maxima: Ints, bins: Int) -> None:
    for i in range(bins):
        maxima[i] = 0
    for begin in range(0, numel - bins + 1, bins):
        for i in range(bins):
            # numba makes int64 of two int32, and half as many fit a vector.
            size = np.int32(values[begin + i] & _MAGNITUDE)
            maxima[i] = size if size > maxima[i] else maxima[i]


@compiled
def narrow(few_at: Int, picks: Ints, count: Int, k: Int, bound: Int, top: Int) -> tuple[Int, Int]:
    """Drop the picks that do not reach the bound of the ``k`` largest; return how many are left, and the bound."""
    few, windows, left = ints_at(few_at), -(-count // WINDOW), 0
    for i in range(count, windows * WINDOW):
        few[i] = 0
    bound = bound_of_largest(few_at, windows, k, bound, top)
    for entry in range(count):
        size = few[entry]
        picks[left], few[left] = picks[entry], size
        left += size >= bound
    return left, bound


@compiled
def fill_up_with_zeros(picks: Ints, count: Int, chosen: Ints, k: Int) -> None:
    """Choose all picks, and of the other places the first ones."""
    entry, spare, place, found = 0, k - count, 0, 0
    while found < k:
        if entry < count and (spare == 0 or picks[entry] == place):
            chosen[found] = place = picks[entry]
            entry += 1
        else:
            chosen[found] = place
            spare -= 1
        place += 1
        found += 1


@cached_kernel
def count_reaching(row: Longs, job: Longs) -> Int:
    """Count the magnitudes of each chunk that reach a bound."""
    counts, limit = longs_at(job[t.COUNTS]), np.int32(job[t.BOUND])
    for at in range(job[t.FIRST], job[t.LAST]):
        values, count = ints_at(coefs_at(row, job, at)), np.int32(0)
        for i in range(row[t.NUMEL]):
            count += np.int32((values[i] & _MAGNITUDE) >= limit)
        counts[at] = count
    return 0


@cached_kernel
def fill_histogram(row: Longs, job: Longs) -> Int:
    """Count magnitudes by the upper half of their bits."""
    bins = longs_at(job[t.COUNTS])
    for at in range(job[t.FIRST], job[t.LAST]):
        values = ints_at(coefs_at(row, job, at))
        for i in range(row[t.NUMEL]):
            bins[(values[i] & _MAGNITUDE) >> BIN_SHIFT] += 1
    return 0


@cached_kernel
def pick_threshold(row: Longs, job: Longs) -> Int:
    """Pick the magnitudes that reach the tensor's threshold: so many of each chunk as BEFORE says.

    Where more reach it, the last of the threshold's own bin stay.
    """
    numel, windows, tau = row[t.NUMEL], -(-row[t.NUMEL] // WINDOW), row[t.TAU_BITS]
    few_at = job[t.MEMORY] + 4 * (numel + WINDOW)
    picks, few, above = ints_at(job[t.MEMORY]), ints_at(few_at), ((tau >> BIN_SHIFT) + 1) << BIN_SHIFT
    for at in range(job[t.FIRST], job[t.LAST]):
        values, chosen, k = ints_at(coefs_at(row, job, at)), picks_of(row, job, 0, at), entries_in(row, job, 0, at)
        fill_magnitudes(values, numel, few)
        count = collect(few_at, windows, tau, picks) if tau else collect_all(picks, numel)
        for entry in range(count):
            few[entry] = values[picks[entry]] & _MAGNITUDE
        if count > k:
            drop_last(few, above, k, picks, count)
        for entry in range(k):
            chosen[entry] = picks[entry]
    return 0


@compiled
def collect_all(picks: Ints, numel: Int) -> Int:
    for place in range(numel):
        picks[place] = place
    return numel


@compiled
def mix32(value: Int) -> Int:
    """Scatter 32 bits: MurmurHash3's finaliser."""
    value = np.uint32(value)
    value ^= value >> np.uint32(16)
    value = np.uint32(value * np.uint32(0x85EBCA6B))
    value ^= value >> np.uint32(13)
    value = np.uint32(value * np.uint32(0xC2B2AE35))
    return np.uint32(value ^ (value >> np.uint32(16)))


@compiled
def permute(place: Int, k0: Int, k1: Int, k2: Int, k3: Int, mask: Int, half: Int) -> Int:
    for turn in (k0, k1, k2, k3):
        place = np.uint32(np.uint32(place + turn) & mask)
        place = np.uint32(np.uint32(place * np.uint32(0x2C9277B5)) & mask)
        place = np.uint32(place ^ np.uint32(place >> half))
    return place


@cached_kernel
def pick_random_k(row: Longs, job: Longs) -> Int:
    """Pick ``k`` of every chunk from an order of its places that the key determines, from START on.

    Four rounds permute the numbers of so many bits; one that leaves the chunk is sent through again.
    """
    numel, width = row[t.NUMEL], 1
    while (1 << width) < numel:
        width += 1
    mask, half = np.uint32((1 << width) - 1), np.uint32((width + 1) >> 1)
    marks, windows = longs_at(job[t.MEMORY]), -(-numel // WINDOW)
    places = ints_at(job[t.MEMORY] + 4 * (numel + WINDOW))
    for at in range(job[t.FIRST], job[t.LAST]):
        key = mix32(np.uint32(row[t.KEY]) + np.uint32(at) * np.uint32(0x9E3779B9))
        k0, k1 = mix32(key), mix32(np.uint32(key + np.uint32(1)))
        k2, k3 = mix32(np.uint32(key + np.uint32(2))), mix32(np.uint32(key + np.uint32(3)))
        for window in range(windows):
            marks[window] = 0
        # All once, in vectors; those that leave the chunk again, one by one.
        for entry in range(row[t.K]):
            start = np.uint32(row[t.START] + entry)
            start = np.uint32(start - np.uint32(numel)) if start >= np.uint32(numel) else start
            places[entry] = np.int32(permute(start, k0, k1, k2, k3, mask, half))
        for entry in range(row[t.K]):
            place = np.uint32(places[entry])
            while place >= np.uint32(numel):
                place = permute(place, k0, k1, k2, k3, mask, half)
            marks[place >> np.uint32(6)] |= np.int64(np.uint64(1) << np.uint64(place & np.uint32(63)))
        chosen, found = picks_of(row, job, 0, at), 0
        for window in range(windows):
            found = list_bits(np.uint64(marks[window]), WINDOW * window, places, found)
        for entry in range(row[t.K]):
            chosen[entry] = places[entry]
    return 0


@cached_kernel
def pick_striding(row: Longs, job: Longs) -> Int:
    """Pick ``k`` of every chunk, evenly spaced, from START on."""
    k, numel, start, turned = row[t.K], row[t.NUMEL], row[t.START], 0
    # Places increase up to the end of the chunk, and go on at its beginning: those are the least.
    while turned < k and turned * numel // k + start < numel:
        turned += 1
    pattern = picks_of(row, job, 0, job[t.FIRST])
    for entry in range(k):
        pattern[entry] = ((entry + turned) % k * numel // k + start) % numel
    for at in range(job[t.FIRST] + 1, job[t.LAST]):
        chosen = picks_of(row, job, 0, at)
        for entry in range(k):
            chosen[entry] = pattern[entry]
    return 0


def picker_of(plan: TensorPlan) -> Callable[[Longs, Longs], Int] | None:
    """Return the loop that picks what is sent of chunks; None if all is sent, or a number that depends on the data."""
    if plan.selection is Selection.TOP_K and plan.chunk_numel == LENGTH:
        return pick_top_k_of_rows
    return None if plan.sends_everything else PICKERS.get(plan.selection)


PICKERS: dict[Selection, Callable[[Longs, Longs], Int]] = {
    Selection.TOP_K: pick_top_k,
    Selection.RANDOM_K: pick_random_k,
    Selection.STRIDING: pick_striding,
}
"""The loops by selection, of those that send a fixed number of entries."""
SELECTIONS = (Selection.EVERYTHING, Selection.THRESHOLD, *PICKERS)
"""Those that are known here; plans with others are refused before."""
