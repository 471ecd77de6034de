"""Bit strings: little-endian 32-bit words, lowest bit first, zero before anything is put."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.kernels.cpu.compiler import compiled
from flexcomm.kernels.plan import IndexCode

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import FullWords, Int, Ints
    from flexcomm.kernels.cpu.records import Coding

__all__ = ["get", "get_indices", "get_run", "put", "put_indices", "put_run"]

_PACKED = int(IndexCode.PACKED)
_ELIAS_FANO = int(IndexCode.ELIAS_FANO)
_LOW32 = 0xFFFFFFFF


@compiled
def put(words: FullWords, position: Int, value: Int, width: Int) -> None:
    at, shift = position >> 5, position & 31
    spread = value << shift
    words[at] |= spread & _LOW32
    if shift + width > 32:
        words[at + 1] |= spread >> 32


@compiled
def get(words: FullWords, position: Int, width: Int) -> Int:
    at, shift = position >> 5, position & 31
    value = np.int64(words[at]) >> shift
    if shift + width > 32:
        value |= np.int64(words[at + 1]) << (32 - shift)
    return value & ((1 << width) - 1)


@compiled
def put_run(words: FullWords, position: Int, width: Int, numbers: Ints, count: Int) -> None:
    """Write the lowest ``width`` bits of numbers, one behind the other, as many at a time as a word holds."""
    at_once, mask = 32 // width, (1 << width) - 1
    for begin in range(0, count, at_once):
        many, window = min(at_once, count - begin), np.int64(0)
        for i in range(many):
            window |= (np.int64(numbers[begin + i]) & mask) << (i * width)
        put(words, position + begin * width, window, many * width)


@compiled
def get_run(words: FullWords, position: Int, width: Int, numbers: Ints, count: Int) -> None:
    """Read what :func:`put_run` wrote."""
    at_once, mask = 32 // width, (1 << width) - 1
    for begin in range(0, count, at_once):
        many = min(at_once, count - begin)
        window = get(words, position + begin * width, many * width)
        for i in range(many):
            numbers[begin + i] = (window >> (i * width)) & mask


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
        high = position + count * coding.low_bits
        found = get_set_bits(words, high, count + ((length - 1) >> coding.low_bits), picks, at, 0)
        for entry in range(min(found, count)):
            low = get(words, position + entry * coding.low_bits, coding.low_bits)
            picks[at + entry] = base + (((np.int64(picks[at + entry]) - entry) << coding.low_bits) | low)
        return found
    return get_set_bits(words, position, length, picks, at, base)


@compiled
def get_set_bits(words: FullWords, position: Int, length: Int, picks: Ints, at: Int, base: Int) -> Int:
    """Fill ``picks`` from ``at`` on with the places of the bits that are set, plus ``base``; return how many."""
    found = at
    for begin in range(0, length, 32):
        width = min(32, length - begin)
        window = get(words, position + begin, width)
        for bit in range(width):
            # No branch on the bit: it is as good as random, and a mispredicted jump costs more than a store.
            picks[found] = base + begin + bit
            found += (window >> bit) & 1
    return found - at
