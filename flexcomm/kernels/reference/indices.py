"""Index codes: a mask of what is sent, as the bits of a payload's section of indices, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcomm.kernels.counting import entries_before
from flexcomm.kernels.layout import IndexCode, Layout
from flexcomm.kernels.reference.bits import get


def put_indices(bits: Tensor, chosen: Tensor, layout: Layout) -> None:
    if layout.code is IndexCode.NONE:
        return
    if layout.code is IndexCode.BITMAP:
        bits[: chosen.numel()] = chosen.reshape(-1).to(torch.int64)
        return
    counts = chosen.sum(dim=1)
    chunks, indices = chosen.nonzero().unbind(dim=1)
    before = entries_before(counts)[chunks]
    starts = before * layout.entry_bits + chunks * layout.chunk_bits
    places = torch.arange(indices.numel(), device=bits.device) - before
    low = layout.entry_bits if layout.code is IndexCode.PACKED else layout.low_bits
    lanes = torch.arange(low, device=bits.device)
    bits[(starts + places * low).unsqueeze(1) + lanes] = (indices.unsqueeze(1) >> lanes) & 1
    if layout.code is IndexCode.ELIAS_FANO:
        bits[starts + counts[chunks] * low + (indices >> low) + places] = 1


def get_indices(bits: Tensor, counts: Tensor, length: int, layout: Layout) -> Tensor | None:
    """Return the mask of sent coefficients ``[chunks, length]``; None if the bits are not those of any."""
    before = entries_before(counts)[:-1]
    chosen = torch.zeros(counts.numel(), length, dtype=torch.bool, device=bits.device)
    for chunk, (count, start) in enumerate(zip(counts.tolist(), before.tolist(), strict=True)):
        position = start * layout.entry_bits + chunk * layout.chunk_bits
        indices = _get_chunk(bits, position, count, length, layout)
        increasing = bool((indices[1:] > indices[:-1]).all())
        if indices.numel() != count or not increasing or bool((indices >= length).any()):
            return None
        chosen[chunk, indices] = True
    return chosen


def _get_chunk(bits: Tensor, position: int, count: int, length: int, layout: Layout) -> Tensor:
    if layout.code is IndexCode.BITMAP:
        return bits[position : position + length].nonzero()[:, 0]
    if layout.code is IndexCode.PACKED:
        return get(bits, position, count, layout.entry_bits)
    low = layout.low_bits
    highs = position + count * low
    ones = bits[highs : highs + count + ((length - 1) >> low)].nonzero()[:, 0]
    if ones.numel() != count:
        return ones
    return ((ones - torch.arange(count, device=bits.device)) << low) | get(bits, position, count, low)
