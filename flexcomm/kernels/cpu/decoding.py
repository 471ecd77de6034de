"""Decoding: payloads of all senders are added up in cache, transformed back once, and written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.kernels.cpu.coefficients import make_scratch, make_tiles
from flexcomm.kernels.cpu.compiler import compiled, kept
from flexcomm.kernels.cpu.indices import entries_before, get_index_run
from flexcomm.kernels.cpu.records import Coding
from flexcomm.kernels.cpu.selection import pick_chunks
from flexcomm.kernels.cpu.transform import lanes_of, store_chunks
from flexcomm.kernels.cpu.values import get_values
from flexcomm.kernels.layout import IndexCode

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import Floats, Int, Ints, Longs
    from flexcomm.kernels.cpu.records import Job, Scratch, Source, Words

__all__ = ["decode_chunks"]

_NO_INDEX = int(IndexCode.NONE)
_ZERO = np.float32(0.0)


@kept
def decode_chunks(
    first: Int, last: Int, target: Source, job: Job, words: Words, sections: Longs, before: Longs, by_contributors: Int
) -> None:
    """Add the senders' payloads in order, divide, transform back once, and write the elements.

    ``sections[sender]`` holds where indices, scales and values begin, in words, and then how indices are written.
    """
    tiles, scratch, lanes = make_tiles(target, job), make_scratch(job), lanes_of(job)
    given, touched = np.zeros(lanes * job.chunk_numel, np.int32), np.empty(lanes * job.chunk_numel + 1, np.int32)
    # Where indices are not sent, everybody sends the same ones.
    senders = sections.shape[0]
    counted = by_contributors and sections[0, 3] != _NO_INDEX
    for begin in range(first, last, lanes):
        many, places = min(lanes, last - begin), 0
        total = tiles.coefs.reshape(-1)[: many * job.chunk_numel]
        total[:] = _ZERO
        for sender in range(senders):
            count = get_entries(begin, many, job, words, sections[sender], before, sender, scratch)
            add(total, count, scratch)
            if counted:
                places = count_contributors(given, touched, places, count, scratch)
        if counted:
            divide_by_contributors(total, given, touched, places)
        elif senders > 1:
            for i in range(total.size):
                total[i] = total[i] / np.float32(senders)
        store_chunks(target, begin, many, job, tiles)


@compiled
def get_entries(
    first: Int, many: Int, job: Job, words: Words, sections: Longs, before: Longs, sender: Int, scratch: Scratch
) -> Int:
    """Fill ``scratch`` with what a sender sent of some chunks; return how many entries that is."""
    start = entries_before(before, sender, first, job.k)
    coding = Coding(sections[3], sections[4], sections[5], sections[6])
    for i in range(many):
        scratch.counts[i] = entries_before(before, sender, first + i + 1, job.k)
        scratch.counts[i] -= entries_before(before, sender, first + i, job.k)
    count = entries_before(before, sender, first + many, job.k) - start
    if coding.code != _NO_INDEX:
        get_index_run(words.full, 32 * sections[0], first, many, job, coding, start, scratch)
    elif sender == 0:
        pick_chunks(first, many, job, before, scratch.few, scratch)
    get_values(words, 32 * sections[2] + start * job.value_bits, sections[1], first, many, job, count, scratch)
    return count


@compiled
def add(total: Floats, count: Int, scratch: Scratch) -> None:
    sent, picks = scratch.taken, scratch.picks
    if count == total.size:
        for i in range(count):
            total[i] += sent[i]
        return
    for entry in range(count):
        total[picks[entry]] += sent[entry]


@compiled
def count_contributors(given: Ints, touched: Ints, places: Int, count: Int, scratch: Scratch) -> Int:
    """Count one more sender of each pick; return how many places were picked so far, which ``touched`` lists."""
    for entry in range(count):
        at = scratch.picks[entry]
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
