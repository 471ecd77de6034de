"""Checks: what is wrong with a tensor or a payload, found before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.kernels.cpu.bits import get
from flexcomm.kernels.cpu.compiler import compiled, kept
from flexcomm.kernels.cpu.indices import all_increase, entries_before
from flexcomm.kernels.cpu.records import Coding
from flexcomm.kernels.layout import IndexCode

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import FullWords, Int, Integers, Longs
    from flexcomm.kernels.cpu.records import Job, Words

__all__ = ["add_checksum", "find_error_in_payloads", "largest_bits", "read_counts"]

_NO_INDEX = int(IndexCode.NONE)
_FULL_BITS, _HALF_BITS = 32, 16


@kept
def find_error_in_payloads(first: Int, last: Int, job: Job, words: Words, sections: Longs, before: Longs) -> Int:
    """Return what is wrong with the chunks of several senders, of several errors the least.

    ``sections[sender]`` holds where indices, scales and values begin, in words, and then how indices are written.
    """
    least = 0
    for sender in range(sections.shape[0]):
        own, counts = sections[sender], before[sender : sender + 1]
        error = find_error_in_chunks(first, last, job, Coding(own[3], own[4], own[5], own[6]), words, own, counts)
        if error and (least == 0 or error < least):
            least = error
    return least


@compiled
def find_error_in_chunks(
    first: Int, last: Int, job: Job, coding: Coding, words: Words, sections: Longs, before: Longs
) -> Int:
    """Return what is wrong with the chunks: 0 nothing, 1 an index, 2 a scale, 3 a value."""
    if coding.code != _NO_INDEX and not all_increase(first, last, job, coding, words.full, sections[0], before):
        return 1
    begin = 2 * sections[1]
    for place in range(begin + first * job.scales, begin + last * job.scales):
        if words.halves[place] >= 0x7F80:
            return 2
    start, end = entries_before(before, 0, first, job.k), entries_before(before, 0, last, job.k)
    return 0 if all_finite(words, sections[2], job, start, end) else 3


@compiled
def all_finite(words: Words, section: Int, job: Job, start: Int, end: Int) -> Int:
    wrong = np.int32(0)
    if job.nonfinite_mask and job.value_bits == _FULL_BITS:
        full, infinite = words.full[section + start : section + end], np.uint32(job.nonfinite_mask)
        for entry in range(full.size):
            wrong |= np.int32((full[entry] & infinite) == infinite)
    elif job.nonfinite_mask and job.value_bits == _HALF_BITS:
        halves, half = words.halves[2 * section + start : 2 * section + end], np.uint16(job.nonfinite_mask)
        for entry in range(halves.size):
            wrong |= np.int32((halves[entry] & half) == half)
    elif job.nonfinite_mask:
        for entry in range(start, end):
            code = get(words.full, 32 * section + entry * job.value_bits, job.value_bits)
            wrong |= np.int32((code & job.nonfinite_mask) == job.nonfinite_mask)
    return not wrong


@kept
def read_counts(words: FullWords, width: Int, limit: Int, counts: Longs) -> Int:
    """Fill ``counts``; return how many of them are beyond the limit."""
    wrong = 0
    for chunk in range(counts.size):
        counts[chunk] = get(words, chunk * width, width)
        wrong += counts[chunk] > limit
    return wrong


@kept
def largest_bits(bits: Integers, mask: Int) -> Int:
    """Return the largest of the elements' bits, without their sign: as magnitudes, the largest magnitude."""
    largest = bits[0] & mask
    for i in range(bits.size):
        largest = max(largest, bits[i] & mask)
    return np.int64(largest)


@kept
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
