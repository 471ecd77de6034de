"""Encoding: every chunk is read once, worked on in cache, and written once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexcomm.kernels.cpu.bits import put
from flexcomm.kernels.cpu.coefficients import MAGNITUDE, accumulate, fill_magnitudes, make_scratch, make_tiles
from flexcomm.kernels.cpu.compiler import compiled, kept
from flexcomm.kernels.cpu.floats import to_bits
from flexcomm.kernels.cpu.indices import entries_before, put_index_run
from flexcomm.kernels.cpu.selection import pick_chunks
from flexcomm.kernels.cpu.transform import lanes_of, load_chunks
from flexcomm.kernels.cpu.values import put_values
from flexcomm.kernels.layout import IndexCode

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import Float, Floats, FullWords, Int, Longs
    from flexcomm.kernels.cpu.records import Coding, Job, Scratch, Source, Target

__all__ = ["encode_chunks", "write_counts"]

_NO_INDEX = int(IndexCode.NONE)
_INFINITY = 0x7F800000


@kept
def encode_chunks(
    first: Int, last: Int, source: Source, next_state: Floats, job: Job, coding: Coding, before: Longs, target: Target
) -> Int:
    """Encode chunks; return how many of the sent coefficients are not finite, which only a broken state can cause."""
    tiles, scratch, lanes, length, broken = (
        make_tiles(source, job),
        make_scratch(job),
        lanes_of(job),
        job.chunk_numel,
        0,
    )
    for begin in range(first, last, lanes):
        many = min(lanes, last - begin)
        load_chunks(source, begin, many, job, tiles)
        rows, magnitudes = tiles.coefs.reshape(-1)[: many * length], tiles.magnitudes.reshape(-1)
        if next_state.shape[0]:
            rows = next_state.reshape(-1)[begin * length : (begin + many) * length]
        accumulate(rows, tiles.coefs.reshape(-1), begin, source)
        if job.needs_magnitudes:
            fill_magnitudes(magnitudes, rows)
        count = pick_chunks(begin, many, job, before, magnitudes, scratch)
        take(rows, count, scratch)
        broken += count_broken(scratch.taken, count)
        start = entries_before(before, 0, begin, job.k)
        if coding.code != _NO_INDEX:
            put_index_run(target.indices, target.index_origin, begin, many, job, coding, start, scratch)
        put_values(target, start * job.value_bits - target.value_origin, begin, many, job, count, scratch)
        give_back(rows, count, scratch, source.stays)
    return broken


@compiled
def take(rows: Floats, count: Int, scratch: Scratch) -> None:
    """Lay what was picked one behind the other."""
    if count == rows.size:
        scratch.taken[:count] = rows
        return
    for entry in range(count):
        scratch.taken[entry] = rows[scratch.picks[entry]]


@compiled
def give_back(rows: Floats, count: Int, scratch: Scratch, stays: Float) -> None:
    """Put what was not sent of the picked coefficients where they were, and the share of what was that stays."""
    if stays != 0:
        add_what_stays(rows, count, scratch, stays)
    if count == rows.size:
        rows[:] = scratch.taken[:count]
        return
    for entry in range(count):
        rows[scratch.picks[entry]] = scratch.taken[entry]


@compiled
def add_what_stays(rows: Floats, count: Int, scratch: Scratch, stays: Float) -> None:
    for entry in range(count):
        picked = rows[entry] if count == rows.size else rows[scratch.picks[entry]]
        scratch.taken[entry] += stays * (picked - scratch.taken[entry])


@compiled
def count_broken(taken: Floats, count: Int) -> Int:
    broken = 0
    for entry in range(count):
        broken += (to_bits(taken[entry]) & MAGNITUDE) >= _INFINITY
    return broken


@kept
def write_counts(words: FullWords, counts: Longs, width: Int) -> None:
    for chunk in range(counts.size):
        put(words, chunk * width, counts[chunk], width)
