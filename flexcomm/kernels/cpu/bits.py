"""Bit strings: little-endian 32-bit words, lowest bit first, zero before anything is put."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.kernels.cpu.compiler import compiled

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import FullWords, Int, Ints

__all__ = ["get", "get_run", "get_window", "put", "put_run", "put_window"]

_LOW32 = 0xFFFFFFFF
_FULL_WINDOW = np.uint64(0xFFFFFFFFFFFFFFFF)


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
def put_window(words: FullWords, position: Int, window: Int, width: Int) -> None:
    """Write 1 to 64 bits of an unsigned number, which has no others."""
    at, shift = position >> 5, position & 31
    spread = window << np.uint64(shift)
    words[at] |= np.uint32(spread)
    if shift + width > 32:
        words[at + 1] |= np.uint32(spread >> np.uint64(32))
    if shift + width > 64:
        words[at + 2] |= np.uint32(window >> np.uint64(64 - shift))


@compiled
def get_window(words: FullWords, position: Int, width: Int) -> Int:
    """Return 1 to 64 bits as an unsigned number."""
    at, shift = position >> 5, np.uint64(position & 31)
    # What lies behind the last word is never asked for, but may be looked at.
    second = np.uint64(words[min(at + 1, words.size - 1)])
    third = np.uint64(words[min(at + 2, words.size - 1)])
    low = np.uint64(words[at]) | (second << np.uint64(32))
    # Two shifts: the third word moves by 64 where the first begins at its lowest bit, and no machine shifts by that.
    high = (third << np.uint64(1)) << (np.uint64(63) - shift)
    return ((low >> shift) | high) & (_FULL_WINDOW >> np.uint64(64 - width))


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
