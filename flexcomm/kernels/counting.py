"""What every kernel set computes alike from counts: where a raised threshold lies, what precedes a chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BIN_SHIFT = 16
"""Magnitudes are binned by the upper half of their bits."""
BINS = 1 << 15


class Raised(NamedTuple):
    """Bits between which a raised threshold lies: what reaches ``high`` is sent, and some of what reaches ``low``."""

    low: int
    high: int


def threshold_bits(tau: float) -> int:
    """Return a threshold as the bits of a float32 without sign; one beyond all float32 is infinite."""
    return int(torch.tensor(tau, dtype=torch.float32).abs().view(torch.int32))


def raise_threshold(bins: Tensor, tau_bits: int, k: int) -> Raised:
    """Return the lowest edge of a bin, above the threshold, that at most ``k`` magnitudes reach, and the bin below.

    ``bins[b]`` counts the magnitudes of bin ``b``; bins up to the threshold's own need not be right.
    """
    first = (tau_bits >> BIN_SHIFT) + 1
    reaching = bins[first:].flip(0).cumsum(0).flip(0)
    edge = first + int((reaching > k).sum())
    return Raised(max(tau_bits, (edge - 1) << BIN_SHIFT), edge << BIN_SHIFT)


def fill_up(low: Tensor, high: Tensor, k: int) -> Tensor:
    """Return how many entries each chunk sends: those that reach the upper bound, and others until there are ``k``.

    ``low`` and ``high`` count, for each chunk, what reaches either bound; chunks are filled in order.
    """
    between = low - high
    room = k - int(high.sum())
    return high + torch.minimum((room - entries_before(between)[:-1]).clamp(min=0), between)


def entries_before(counts: Tensor) -> Tensor:
    """Return how many entries precede each chunk, and at the end, how many there are in all."""
    return torch.cat((counts.new_zeros(1), counts.cumsum(0)))
