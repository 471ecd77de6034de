"""Bit strings, one int64 a bit: position ``p`` is bit ``p % 32`` of word ``p // 32``; and floats and hashes as bits.

What rounds, converts, divides and hashes alike on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW32 = (1 << 32) - 1
GOLDEN = 0x9E3779B9
"""2**32 over the golden ratio: multiples of it differ in their upper bits, whatever is hashed with them."""
_MAGNITUDE = (1 << 31) - 1
_LARGEST_BF16 = 0x7F7F


def to_words(bits: Tensor) -> Tensor:
    """Return int32 words of bits, lowest first."""
    return (bits.view(-1, 32) << torch.arange(32, device=bits.device)).sum(dim=1).to(torch.int32)


def to_bits(words: Tensor) -> Tensor:
    return ((words.to(torch.int64).unsqueeze(1) >> torch.arange(32, device=words.device)) & 1).reshape(-1)


def put(bits: Tensor, position: int, codes: Tensor, width: int) -> None:
    """Write codes one behind the other."""
    spread = (codes.unsqueeze(1) >> torch.arange(width, device=bits.device)) & 1
    bits[position : position + spread.numel()] = spread.reshape(-1)


def get(bits: Tensor, position: int, count: int, width: int) -> Tensor:
    spread = bits[position : position + count * width].view(count, width)
    return (spread << torch.arange(width, device=bits.device)).sum(dim=1)


def float_bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).to(torch.int64) & LOW32


def magnitude_bits(values: Tensor) -> Tensor:
    """Return the bits without the sign, which order magnitudes as their values do, with NaN above infinity."""
    return float_bits(values) & _MAGNITUDE


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def bf16_values(bits: Tensor) -> Tensor:
    return from_bits(bits << 16)


def saturated_bf16(magnitudes: Tensor) -> Tensor:
    bits = float_bits(magnitudes)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).clamp(max=_LARGEST_BF16)


def bf16_up(magnitudes: Tensor) -> Tensor:
    return ((float_bits(magnitudes) + 0xFFFF) >> 16).clamp(max=_LARGEST_BF16)


def rounded(value: float) -> float:
    """Return the nearest float32, so that a product with it is one of float32 wherever it is computed."""
    return float(torch.tensor(value, dtype=torch.float32))


def divided(values: Tensor, divisor: float) -> Tensor:
    """Divide by a tensor: by a Python number, torch multiplies with the reciprocal on CUDA, and bits differ."""
    return values / torch.full_like(values, divisor)


def mix32(value: Tensor) -> Tensor:
    """Hash the lowest 32 bits: MurmurHash3's finaliser."""
    value = value & LOW32
    value = value ^ (value >> 16)
    value = (value * 0x85EBCA6B) & LOW32
    value = value ^ (value >> 13)
    value = (value * 0xC2B2AE35) & LOW32
    return value ^ (value >> 16)
