"""The reference's verbs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexcomm.kernels.base import LARGEST_MAGNITUDE, Average, Problem
from flexcomm.kernels.counting import BIN_SHIFT, BINS, fill_up, raise_threshold, threshold_bits
from flexcomm.kernels.layout import CHECKSUM_WORD, IndexCode
from flexcomm.kernels.per_tensor import Payload, PerTensorKernels, TensorEncoding, TensorState, ThresholdCounts
from flexcomm.kernels.plan import SampleKey, TensorPlan, check_implemented
from flexcomm.kernels.reference.bits import (
    GOLDEN,
    LOW32,
    divided,
    get,
    magnitude_bits,
    mix32,
    put,
    rounded,
    to_bits,
    to_words,
)
from flexcomm.kernels.reference.indices import get_indices, put_indices
from flexcomm.kernels.reference.selection import SELECTIONS, select, select_shared
from flexcomm.kernels.reference.transform import accumulate, restore
from flexcomm.kernels.reference.values import CODES, dequantise, quantise

_SCALE_INFINITY = 0x7F80


class ReferenceKernels(PerTensorKernels):
    """Torch operations, for any device."""

    name = "reference"

    def is_finite(self, x: Tensor) -> bool:
        return bool((x.abs() < LARGEST_MAGNITUDE).all())

    def find_threshold(self, x: Tensor, plan: TensorPlan, state: TensorState) -> ThresholdCounts:
        magnitudes, tau_bits = magnitude_bits(accumulate(x, plan, state.state, state.update)), threshold_bits(plan.tau)
        counts = (magnitudes >= tau_bits).sum(dim=1)
        if int(counts.sum()) <= plan.k:
            return ThresholdCounts(counts, tau_bits)
        bins = torch.bincount(magnitudes.view(-1) >> BIN_SHIFT, minlength=BINS)
        raised = raise_threshold(bins, tau_bits, plan.k)
        low, high = ((magnitudes >= bound).sum(dim=1) for bound in raised)
        return ThresholdCounts(fill_up(low, high, plan.k), raised.low)

    def encode_tensor_(self, x: Tensor, words: Tensor, encoding: TensorEncoding, state: TensorState) -> bool:
        plan, layout, sample_key, threshold = encoding
        check_implemented("reference", plan, SELECTIONS, CODES)
        coefficients = accumulate(x, plan, state.state, state.update)
        chosen = select(coefficients, plan, sample_key, threshold)
        picked = coefficients[chosen]
        bits = torch.zeros(32 * words.numel(), dtype=torch.int64, device=x.device)
        if threshold is not None:
            put(bits, 0, threshold.counts, plan.chunk_numel.bit_length())
        put_indices(bits[32 * layout.indices :], chosen, layout)
        codes, scales = quantise(picked, chosen, plan.values)
        put(bits, 32 * layout.scales, scales.reshape(-1), 16)
        put(bits, 32 * layout.values, codes, plan.values.format.bits)
        words.copy_(to_words(bits))
        if state.state_out is not None:
            unsent = picked - dequantise(codes, scales, chosen, plan.values)
            coefficients[chosen] = _taken_out(picked, unsent, state.update.alpha)
            state.state_out.copy_(coefficients)
        return bool(picked.isfinite().all())

    def read_counts(self, words: Tensor, plan: TensorPlan, start: int) -> Tensor | None:
        width = plan.chunk_numel.bit_length()
        nwords = -(-plan.chunks * width // 32)
        counts = get(to_bits(words[start : start + nwords]), 0, plan.chunks, width)
        return None if bool((counts > plan.chunk_numel).any()) else counts

    def find_problem(self, words: Tensor, payload: Payload, plan: TensorPlan) -> Problem:
        layout, counts = payload.layout, _counts_of(payload, plan, words.device)
        bits = to_bits(words[payload.start : payload.start + layout.nwords])
        if layout.code is not IndexCode.NONE:
            found = get_indices(bits[32 * layout.indices :], counts, plan.chunk_numel, layout)
            if found is None:
                return Problem.INDEX
        scales = get(bits, 32 * layout.scales, plan.chunks * plan.values.format.scales, 16)
        if bool((scales >= _SCALE_INFINITY).any()):
            return Problem.SCALE
        codes = get(bits, 32 * layout.values, int(counts.sum()), plan.values.format.bits)
        infinite = plan.values.format.nonfinite_mask
        if infinite and bool(((codes & infinite) == infinite).any()):
            return Problem.VALUE
        return Problem.NONE

    def decode_tensor_(
        self,
        words: Tensor,
        payloads: Sequence[Payload],
        plan: TensorPlan,
        sample_key: SampleKey,
        average: Average,
        out: Tensor,
    ) -> None:
        check_implemented("reference", plan, SELECTIONS, CODES)
        total = torch.zeros(plan.state_shape, device=out.device)
        given = torch.zeros(plan.state_shape, device=out.device)
        for payload in payloads:
            chosen, sent = _decode(words, payload, plan, sample_key)
            total[chosen] += sent
            given[chosen] += 1.0
        mean = total / given.clamp(min=1.0) if average == "contributors" else divided(total, float(len(payloads)))
        out.copy_(restore(mean, plan).reshape(out.shape).to(out.dtype))

    def checksum(self, words: Tensor) -> int:
        places = torch.arange(words.numel(), device=words.device)
        hashed = mix32(words.to(torch.int64) ^ (places * GOLDEN))
        hashed[CHECKSUM_WORD] = 0
        return int(hashed.sum()) & LOW32

    def mix_(
        self, x: Tensor, self_weight: float, others: Sequence[Tensor], weights: Sequence[float], out: Tensor
    ) -> Tensor:
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        terms = zip((x, *others), (self_weight, *weights), strict=True)
        products = [term.detach().to(wide) * _factor(weight, wide) for term, weight in terms if weight != 0.0]
        mixed = products[0] if products else torch.zeros_like(x, dtype=wide)
        for product in products[1:]:
            # Not by add_(alpha=...), which may fuse multiplication and addition.
            mixed = mixed + product
        filled = mixed.to(x.dtype)
        distance = (filled.double() - x.detach().double()).square().sum()
        out.detach().copy_(filled)
        return distance


def _decode(words: Tensor, payload: Payload, plan: TensorPlan, sample_key: SampleKey) -> tuple[Tensor, Tensor]:
    """Return the mask of sent coefficients, and their values in order."""
    layout, counts = payload.layout, _counts_of(payload, plan, words.device)
    bits = to_bits(words[payload.start : payload.start + layout.nwords])
    if layout.code is IndexCode.NONE:
        chosen = select_shared(plan, sample_key, words.device)
    else:
        found = get_indices(bits[32 * layout.indices :], counts, plan.chunk_numel, layout)
        assert found is not None, "only sound payloads are decoded"  # noqa: S101  (our own invariant)
        chosen = found
    codes = get(bits, 32 * layout.values, int(counts.sum()), plan.values.format.bits)
    width = plan.values.format.scales
    scales = get(bits, 32 * layout.scales, plan.chunks * width, 16).view(plan.chunks, width)
    return chosen, dequantise(codes, scales, chosen, plan.values)


def _factor(weight: float, dtype: torch.dtype) -> float:
    return weight if dtype is torch.float64 else rounded(weight)


def _counts_of(payload: Payload, plan: TensorPlan, device: torch.device) -> Tensor:
    if payload.counts is not None:
        return payload.counts
    return torch.full((plan.chunks,), plan.k, device=device)


def _taken_out(picked: Tensor, unsent: Tensor, alpha: float) -> Tensor:
    """Return what stays of picked coefficients: what was not sent of them, and the share of the rest not taken out."""
    return unsent if alpha == 1.0 else unsent + rounded(1.0 - alpha) * (picked - unsent)
