"""32 bits scattered, in int64: for the checksum, and for orders that all ranks shuffle alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GOLDEN", "LOW32", "mix32"]

LOW32 = (1 << 32) - 1
GOLDEN = 0x9E3779B9
"""2**32 over the golden ratio: multiples of it differ in their upper bits, whatever is scattered with them."""


def mix32(value: Tensor) -> Tensor:
    """Scatter the lowest 32 bits: MurmurHash3's finaliser."""
    value = value & LOW32
    value = value ^ (value >> 16)
    value = (value * 0x85EBCA6B) & LOW32
    value = value ^ (value >> 13)
    value = (value * 0xC2B2AE35) & LOW32
    return value ^ (value >> 16)
