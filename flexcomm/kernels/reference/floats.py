"""Floats as bits, held in int64: what rounds, converts and divides alike on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "bf16_up",
    "bf16_values",
    "divided",
    "float_bits",
    "from_bits",
    "magnitude_bits",
    "rounded",
    "saturated_bf16",
]

_LOW32 = (1 << 32) - 1
_MAGNITUDE = (1 << 31) - 1
_LARGEST_BF16 = 0x7F7F


def float_bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).to(torch.int64) & _LOW32


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
