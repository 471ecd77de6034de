"""Which coefficients are sent, as a mask ``[chunks, chunk_numel]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexcomm.kernels.counting import BIN_SHIFT
from flexcomm.kernels.plan import Selection
from flexcomm.kernels.reference.floats import magnitude_bits
from flexcomm.kernels.reference.hashing import GOLDEN, mix32

if TYPE_CHECKING:
    from torch import Tensor

    from flexcomm.kernels.base import Survey
    from flexcomm.kernels.plan import Draw, TensorPlan

__all__ = ["select", "select_shared"]


def select(coefficients: Tensor, plan: TensorPlan, draw: Draw, survey: Survey | None) -> Tensor:
    if survey is not None:
        return _select_reaching(magnitude_bits(coefficients), survey)
    if plan.selection is Selection.LARGEST:
        order = magnitude_bits(coefficients).sort(dim=1, descending=True, stable=True).indices
        return _mask(plan, order[:, : plan.keep])
    return select_shared(plan, draw, coefficients.device)


def select_shared(plan: TensorPlan, draw: Draw, device: torch.device) -> Tensor:
    """Select what every rank derives alike from the draw."""
    return _mask(plan, _shared_indices(plan, draw, device))


def _select_reaching(magnitudes: Tensor, survey: Survey) -> Tensor:
    """Select what reaches the threshold; of its own bin, so many of lowest index that the counts are kept."""
    bin_end = ((survey.tau_bits >> BIN_SHIFT) + 1) << BIN_SHIFT
    above = magnitudes >= bin_end
    ties = (magnitudes >= survey.tau_bits) & ~above
    room = (survey.counts - above.sum(dim=1)).unsqueeze(1)
    return above | (ties & (ties.cumsum(dim=1) <= room))


def _mask(plan: TensorPlan, indices: Tensor) -> Tensor:
    chosen = torch.zeros(plan.state_shape, dtype=torch.bool, device=indices.device)
    return chosen.scatter_(1, indices, True)


def _shared_indices(plan: TensorPlan, draw: Draw, device: torch.device) -> Tensor:
    """Return the indices ``[chunks, keep]`` that every rank derives alike."""
    length = plan.chunk_numel
    entries = torch.arange(plan.keep, device=device).expand(plan.chunks, plan.keep)
    if plan.selection is Selection.EVERYTHING:
        return entries
    if plan.selection is Selection.STRIDED:
        return (entries * length // plan.keep + draw.start) % length
    chunks = torch.arange(plan.chunks, device=device).unsqueeze(1)
    return _shuffled((draw.start + entries) % length, length, mix32(draw.key + chunks * GOLDEN))


def _shuffled(places: Tensor, length: int, keys: Tensor) -> Tensor:
    """Return where places go in an order of ``range(length)`` that the key determines.

    Each round permutes the numbers of so many bits; one that leaves the range is sent through again.
    """
    width = max(1, (length - 1).bit_length())
    mask, half = (1 << width) - 1, (width + 1) >> 1
    moved = places
    outside = torch.ones_like(places, dtype=torch.bool)
    while bool(outside.any()):
        again = moved
        for turn in range(4):
            again = (again + mix32(keys + turn)) & mask
            again = (again * 0x2C9277B5) & mask
            again = again ^ (again >> half)
        moved = torch.where(outside, again, moved)
        outside = moved >= length
    return moved
