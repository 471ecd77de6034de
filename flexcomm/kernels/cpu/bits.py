"""Bit strings: little-endian 32-bit words, lowest bit first; and floats as bits, which round alike on every device."""

from __future__ import annotations

import numpy as np

from flexcomm.kernels.cpu.compiler import Float, Floats, FullWords, Int, compiled

_FULL_WINDOW = np.uint64(0xFFFFFFFFFFFFFFFF)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_LARGEST_BF16 = 0x7F7F
_ZERO = np.float32(0.0)
_HALF_ONE = np.float32(0.5)
_TWO_TO_112 = np.float32(2.0**112)
_SUM_LANES = 32


@compiled
def put_window(words: FullWords, position: Int, window: Int, width: Int) -> None:
    """Write 1 to 64 bits of an unsigned number, which has no others, where zeros are."""
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
    # Of words that hold none of the bits, another one is read instead: what lies behind the last is not ours.
    reached = (position & 31) + width
    second = np.uint64(words[at + (reached > 32)])
    third = np.uint64(words[at + (reached > 32) + (reached > 64)])
    low = np.uint64(words[at]) | (second << np.uint64(32))
    # Two shifts: the third word moves by 64 where the first begins at its lowest bit, and no machine shifts by that.
    high = (third << np.uint64(1)) << (np.uint64(63) - shift)
    return ((low >> shift) | high) & (_FULL_WINDOW >> np.uint64(64 - width))


@compiled
def to_bits(value: Float) -> Int:
    return np.int64(np.float32(value).view(np.uint32))


@compiled
def from_bits(bits: Int) -> Float:
    return np.uint32(bits).view(np.float32)


@compiled
def bf16_bits(bits: Int) -> Int:
    """Return the bfloat16 nearest to a float32, both as bits; ties to even. What is too large becomes infinite."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@compiled
def fp16_bits(bits: Int) -> Int:
    """Return the nearest float16, ties to even, and NaN for NaN; without branches, so that it fits into vectors."""
    magnitude = np.uint32(bits & _MAGNITUDE)
    normal = np.uint32(magnitude + np.uint32(0x0FFF) + ((magnitude >> np.uint32(13)) & np.uint32(1)))
    code = np.uint32(np.uint32(normal - np.uint32(0x38000000)) >> np.uint32(13))
    # Below the smallest normal float16 its step is 2**-24, which is also the step of float32 at one half.
    small = np.uint32(
        np.float32(np.uint32(magnitude).view(np.float32) + _HALF_ONE).view(np.uint32) - np.uint32(0x3F000000)
    )
    code = small if magnitude < np.uint32(0x38800000) else code
    code = np.uint32(0x7C00) if magnitude >= np.uint32(0x47800000) else code
    code = np.uint32(0x7E00) if magnitude > _INFINITY else code
    return np.uint16(code | ((bits >> np.uint32(16)) & np.uint32(0x8000)))


@compiled
def fp16_value(half: Int) -> Float:
    """Return the value of a float16, finite or not."""
    shifted = np.uint32(np.uint32(half & np.uint32(0x7FFF)) << np.uint32(13))
    finite = np.float32(np.uint32(shifted).view(np.float32) * _TWO_TO_112).view(np.uint32)
    magnitude = np.uint32(shifted | _INFINITY) if shifted >= np.uint32(0x0F800000) else finite
    return np.uint32(magnitude | np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


@compiled
def saturated_bf16(magnitude_bits: Int) -> Int:
    """Return the nearest finite bfloat16 of a magnitude."""
    return min(bf16_bits(magnitude_bits), _LARGEST_BF16)


@compiled
def bf16_up(magnitude_bits: Int) -> Int:
    """Return the smallest bfloat16 that is not less than a magnitude, or the largest there is."""
    return min((magnitude_bits + 0xFFFF) >> 16, _LARGEST_BF16)


@compiled
def sum_magnitudes(taken: Floats, count: Int, lanes: Floats) -> Float:
    """Sum magnitudes: entry e into lane e % 32, then lanes in halves. Any device can do that in the same order."""
    for lane in range(_SUM_LANES):
        lanes[lane] = _ZERO
    for begin in range(0, count & ~(_SUM_LANES - 1), _SUM_LANES):
        for lane in range(_SUM_LANES):
            lanes[lane] += abs(taken[begin + lane])
    for entry in range(count & ~(_SUM_LANES - 1), count):
        lanes[entry & (_SUM_LANES - 1)] += abs(taken[entry])
    half = _SUM_LANES >> 1
    while half:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half >>= 1
    return lanes[0]


@compiled
def bf16_value(half: Int) -> Float:
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@compiled
def nearest_bf16(bits: Int) -> Int:
    """Return the nearest bfloat16 of 32 unsigned bits, ties to even, and NaN for NaN, so that it fits into vectors."""
    code = np.uint32(bits + np.uint32(np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.uint16(np.uint32(0x7FC0) if np.uint32(bits & _MAGNITUDE) > _INFINITY else code)
