"""Which coefficients are sent, as a mask ``[chunks, chunk_numel]``."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcomm.kernels.counting import BIN_SHIFT
from flexcomm.kernels.per_tensor import ThresholdCounts
from flexcomm.kernels.plan import SampleKey, Selection, TensorPlan
from flexcomm.kernels.reference.bits import GOLDEN, magnitude_bits, mix32


def select(coefficients: Tensor, plan: TensorPlan, sample_key: SampleKey, threshold: ThresholdCounts | None) -> Tensor:
    if not plan.sends_indices:
        return select_shared(plan, sample_key, coefficients.device)
    return _BY_MAGNITUDE[plan.selection](magnitude_bits(coefficients), plan, threshold)


def select_shared(plan: TensorPlan, sample_key: SampleKey, device: torch.device) -> Tensor:
    """Select what every rank derives alike from plan and key."""
    if plan.sends_everything:
        return torch.ones(plan.state_shape, dtype=torch.bool, device=device)
    entries = torch.arange(plan.k, device=device).expand(plan.chunks, plan.k)
    return _mask(plan, _SHARED[plan.selection](entries, plan, sample_key))


def _mask(plan: TensorPlan, indices: Tensor) -> Tensor:
    chosen = torch.zeros(plan.state_shape, dtype=torch.bool, device=indices.device)
    return chosen.scatter_(1, indices, True)


def _largest(magnitudes: Tensor, plan: TensorPlan, threshold: ThresholdCounts | None) -> Tensor:
    del threshold
    order = magnitudes.sort(dim=1, descending=True, stable=True).indices
    return _mask(plan, order[:, : plan.k])


def _above(magnitudes: Tensor, plan: TensorPlan, threshold: ThresholdCounts | None) -> Tensor:
    """Select what reaches the threshold; of its own bin, so many of lowest index that the counts are kept."""
    del plan
    assert threshold is not None, "a variable plan is encoded with its threshold"  # noqa: S101  (our own invariant)
    bin_end = ((threshold.tau_bits >> BIN_SHIFT) + 1) << BIN_SHIFT
    above = magnitudes >= bin_end
    ties = (magnitudes >= threshold.tau_bits) & ~above
    room = (threshold.counts - above.sum(dim=1)).unsqueeze(1)
    return above | (ties & (ties.cumsum(dim=1) <= room))


def _strided(entries: Tensor, plan: TensorPlan, sample_key: SampleKey) -> Tensor:
    return (entries * plan.chunk_numel // plan.k + sample_key.start) % plan.chunk_numel


def _shuffled(entries: Tensor, plan: TensorPlan, sample_key: SampleKey) -> Tensor:
    chunks = torch.arange(plan.chunks, device=entries.device).unsqueeze(1)
    places = (sample_key.start + entries) % plan.chunk_numel
    return _permute(places, plan.chunk_numel, mix32(sample_key.key + chunks * GOLDEN))


_BY_MAGNITUDE = {Selection.LARGEST: _largest, Selection.ABOVE: _above}
_SHARED = {Selection.SHUFFLED: _shuffled, Selection.STRIDED: _strided}
SELECTIONS = (Selection.EVERYTHING, *_BY_MAGNITUDE, *_SHARED)


def _permute(places: Tensor, length: int, keys: Tensor) -> Tensor:
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
