"""Floats as bits: what rounds and converts alike on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.kernels.cpu.compiler import compiled

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import Float, Floats, Int

__all__ = ["bf16_bits", "bf16_up", "fp16_bits", "fp16_value", "from_bits", "lane_sum", "saturated_bf16", "to_bits"]

_MAGNITUDE = 0x7FFFFFFF
_LARGEST_BF16 = 0x7F7F
_ZERO = np.float32(0.0)
_HALF_ONE = np.float32(0.5)
_TWO_TO_112 = np.float32(2.0**112)
_SUM_LANES = 32


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
    """Return the float16 nearest to a float32, both as bits; ties to even. What is too large becomes infinite."""
    sign, magnitude = (bits >> 16) & 0x8000, bits & _MAGNITUDE
    if magnitude >= 0x47800000:
        return sign | 0x7C00
    if magnitude >= 0x38800000:
        return sign | ((magnitude + 0x0FFF + ((magnitude >> 13) & 1) - 0x38000000) >> 13)
    # Below the smallest normal float16 its step is 2**-24, which is also the step of float32 at one half.
    return sign | (to_bits(from_bits(magnitude) + _HALF_ONE) - 0x3F000000)


@compiled
def fp16_value(half: Int) -> Float:
    """Return the value of a finite float16."""
    magnitude = from_bits((half & 0x7FFF) << 13) * _TWO_TO_112
    return -magnitude if half & 0x8000 else magnitude


@compiled
def saturated_bf16(magnitude_bits: Int) -> Int:
    """Return the nearest finite bfloat16 of a magnitude."""
    return min(bf16_bits(magnitude_bits), _LARGEST_BF16)


@compiled
def bf16_up(magnitude_bits: Int) -> Int:
    """Return the smallest bfloat16 that is not less than a magnitude, or the largest there is."""
    return min((magnitude_bits + 0xFFFF) >> 16, _LARGEST_BF16)


@compiled
def lane_sum(taken: Floats, lanes: Floats) -> Float:
    """Sum magnitudes: entry e into lane e % 32, then lanes in halves. Any device can do that in the same order."""
    lanes[:] = _ZERO
    count = taken.size
    whole = count & ~(_SUM_LANES - 1)
    for begin in range(0, whole, _SUM_LANES):
        for lane in range(_SUM_LANES):
            lanes[lane] += abs(taken[begin + lane])
    for lane in range(count - whole):
        lanes[lane] += abs(taken[whole + lane])
    half = _SUM_LANES >> 1
    while half:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half >>= 1
    return lanes[0]
