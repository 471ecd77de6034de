"""Bit strings, one int64 a bit: position ``p`` is bit ``p % 32`` of word ``p // 32``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["get", "put", "to_bits", "to_words"]


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
