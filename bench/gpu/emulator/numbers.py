"""Arithmetic that machine code has and numpy has not: fused products, directed rounding, funnel shifts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = NDArray[Any]
_LEAST_NORMAL = np.float32(2.0**-126)


def fused(a: Row, b: Row, c: Row, rounding: str = "") -> Row:
    """Return ``a * b + c`` of float32, rounded once."""
    # The product is exact in float64. The sum is rounded to an odd last bit if it is not: then it is never half way
    # between two float32 that the exact sum does not lie half way between.
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = np.asarray(product + c)
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = np.atleast_1d(total).view(np.int64)
    is_inexact = np.isfinite(total) & (error != 0)
    bits = np.where(is_inexact, (bits - ((error > 0) != (total > 0))) | 1, bits)
    return round_f64(bits.view(np.float64), rounding)


def round_f64(x: Row, rounding: str = "") -> Row:
    """Return float64 as float32: the nearest, or rounded to zero (``"RZ"``), down (``"RM"``) or up (``"RP"``)."""
    near = x.astype(np.float32)
    wide = near.astype(np.float64)
    if rounding in ("RM", "RZ"):
        near = np.where((wide > x) & ((rounding == "RM") | (x > 0)), np.nextafter(near, np.float32(-np.inf)), near)
    if rounding in ("RP", "RZ"):
        near = np.where((wide < x) & ((rounding == "RP") | (x < 0)), np.nextafter(near, np.float32(np.inf)), near)
    return near


def flushed(x: Row) -> Row:
    """Return zeros in place of denormals, as ``.FTZ`` has it."""
    flushed: Row = np.where(np.abs(x) < _LEAST_NORMAL, np.copysign(np.float32(0), x), x)
    return flushed


def divides_slowly(a: Row, b: Row) -> Row:
    """Return where a quotient of float32 takes the long way: operands or results may be tiny, huge or not finite."""
    of_a, of_b = ((x.view(np.uint32) >> 23 & 0xFF).astype(np.int32) for x in (a, b))
    slow: Row = (of_a < 24) | (of_a > 253) | (of_b < 2) | (of_b > 252) | (of_a - of_b > 125) | (of_a - of_b < -125)
    return slow


def to_integer(x: Row, kind: type[np.integer[Any]], *, truncates: bool) -> Row:
    """Return floats as integers, the nearest if none is beyond; not a number becomes 0."""
    limits = np.iinfo(kind)
    whole = np.nan_to_num(np.trunc(x) if truncates else np.rint(x), nan=0.0).astype(np.float64)
    inside = np.clip(whole, float(limits.min), float(limits.max))
    # The largest integers are no floats: what was clipped there would be one too large.
    return np.where(
        inside >= float(limits.max), limits.max, np.where(inside >= float(limits.max), 0, inside).astype(kind)
    )


def shift_left(x: Row, by: Row, width: int) -> Row:
    """Return bits moved up; by the width or more, nothing is left."""
    wide = x.astype(np.uint64)
    return np.where(by < width, wide << (by & (width - 1)).astype(np.uint64), np.uint64(0))


def shift_right(x: Row, by: Row, width: int) -> Row:
    """Return bits moved down; by the width or more, the sign is left, of unsigned ones nothing."""
    far = np.minimum(by, width - 1).astype(x.dtype)
    moved: Row = x >> far
    return moved if np.issubdtype(x.dtype, np.signedinteger) else np.where(by < width, moved, x.dtype.type(0))


def highest_bit(x: Row) -> Row:
    """Return the place of the highest bit that is set, all ones if none is."""
    place = np.frexp(x.astype(np.float64))[1] - 1
    return np.where(x == 0, np.uint32(0xFFFFFFFF), place.astype(np.uint32))


def reversed_bits(x: Row) -> Row:
    """Return 32 bits in the opposite order."""
    octets = x.astype(">u4").view(np.uint8).reshape(-1, 4)
    return np.packbits(np.unpackbits(octets, axis=1)[:, ::-1], axis=1).view(">u4").astype(np.uint32).reshape(x.shape)


def count_bits(x: Row) -> Row:
    """Return how many bits are set."""
    return np.bitwise_count(x).astype(np.uint32)


def fp16_codes(x: Row) -> Row:
    """Return the nearest float16 to each float32, as bits."""
    return np.where(np.isnan(x), np.uint32(0x7FFF), x.astype(np.float16).view(np.uint16).astype(np.uint32))


def bf16_codes(x: Row) -> Row:
    """Return the nearest bfloat16 to each float32, as bits."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded.astype(np.uint32))


def fp16_values(codes: Row) -> Row:
    """Return the float32 of each float16."""
    return (codes & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32)
