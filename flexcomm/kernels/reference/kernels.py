"""The reference's verbs, and its selections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexcomm.kernels.base import Problem
from flexcomm.kernels.layout import BufferPlan, IndexCode, Layout, Region
from flexcomm.kernels.plan import (
    BIN_SHIFT,
    BINS,
    SampleKey,
    Selection,
    TensorPlan,
    ThresholdCounts,
    check_implemented,
    choose_threshold,
)
from flexcomm.kernels.reference.buckets import Payload, TensorLoopDecoder, TensorLoopEncoder, TensorState
from flexcomm.kernels.reference.codes import (
    CODES,
    GOLDEN,
    dequantise,
    divided,
    entry_positions,
    get,
    get_indices,
    magnitude_bits,
    mix32,
    put,
    put_indices,
    quantise,
    to_bits,
    to_words,
)
from flexcomm.kernels.reference.transform import accumulate, restore, rounded

_SCALE_INFINITY = 0x7F80


class ReferenceKernels:
    """Torch operations, for any device, on one tensor after the other."""

    name = "reference"

    def encoder(self, plan: BufferPlan, words: Tensor) -> TensorLoopEncoder:
        return TensorLoopEncoder(self, plan, words)

    def decoder(
        self,
        plan: BufferPlan,
        words: Tensor,
        regions: Sequence[Region],
        decoded_as: BufferPlan | None = None,
        summed: int = 1,
    ) -> TensorLoopDecoder:
        return TensorLoopDecoder(self, plan, words, regions, decoded_as or plan, summed)

    def find_threshold(self, x: Tensor, plan: TensorPlan, state: TensorState) -> ThresholdCounts:
        """Return what ``plan``, a variable one, will send of ``x``."""
        magnitudes = magnitude_bits(accumulate(x, plan, state.state, state.update))
        return choose_threshold(
            plan,
            count=lambda bound: (magnitudes >= bound).sum(dim=1),
            count_bins=lambda: torch.bincount(magnitudes.view(-1) >> BIN_SHIFT, minlength=BINS),
        )

    def encode_tensor_(
        self, x: Tensor, words: Tensor, payload: Payload, plan: TensorPlan, sample_key: SampleKey, state: TensorState
    ) -> bool:
        """Fill ``words`` with a payload and move what it holds out of the state; False if that is not finite."""
        check_implemented("reference", plan, SELECTIONS, CODES)
        coefficients = accumulate(x, plan, state.state, state.update)
        if plan.sends_indices:
            chosen = _BY_MAGNITUDE[plan.selection](magnitude_bits(coefficients), plan, payload)
        else:
            chosen = _select_shared(plan, sample_key, x.device)
        picked, layout = coefficients[chosen], payload.layout
        bits = torch.zeros(32 * words.numel(), dtype=torch.int64, device=x.device)
        if payload.counts is not None:
            width = plan.chunk_numel.bit_length()
            put(bits, width * torch.arange(plan.chunks, device=x.device), payload.counts, width)
        put_indices(bits[32 * layout.indices :], chosen, layout)
        codes, scales = quantise(picked, chosen, plan.values)
        scale_at, value_at = _value_positions(plan, layout, chosen.sum(dim=1))
        put(bits, scale_at, scales.reshape(-1), 16)
        put(bits, value_at, codes, plan.values.format.bits)
        words.copy_(to_words(bits))
        if state.state_out is not None:
            unsent, alpha = picked - dequantise(codes, scales, chosen, plan.values), state.update.alpha
            # Of what was sent, the share that is not taken out stays, too.
            coefficients[chosen] = unsent if alpha == 1.0 else unsent + rounded(1.0 - alpha) * (picked - unsent)
            state.state_out.copy_(coefficients)
        return bool(picked.isfinite().all())

    def read_counts(self, words: Tensor, plan: TensorPlan, start: int) -> Tensor | None:
        """Return the counts (int64) at the start of a variable payload; None if one exceeds a chunk."""
        width = plan.chunk_numel.bit_length()
        nwords = -(-plan.chunks * width // 32)
        positions = width * torch.arange(plan.chunks, device=words.device)
        counts = get(to_bits(words[start : start + nwords]), positions, width)
        return None if bool((counts > plan.chunk_numel).any()) else counts

    def find_problem(self, words: Tensor, payload: Payload, plan: TensorPlan) -> Problem:
        """Return what is wrong with a payload; of several problems, the first of the enumeration."""
        chosen, codes, scales = _unpack(words, payload, plan)
        if chosen is None and payload.layout.code is not IndexCode.NONE:
            return Problem.INDEX
        if bool((scales >= _SCALE_INFINITY).any()):
            return Problem.SCALE
        infinite = plan.values.format.nonfinite_mask
        if infinite and bool(((codes & infinite) == infinite).any()):
            return Problem.VALUE
        return Problem.NONE

    def decode_tensor_(
        self, words: Tensor, payloads: list[Payload], plan: TensorPlan, key: SampleKey, divisor: int, out: Tensor
    ) -> None:
        """Fill ``out`` with the average of sound payloads, added in the order given and transformed back once.

        The sum is divided by ``divisor``; if that is 0, by the number of payloads that hold the coefficient.
        """
        check_implemented("reference", plan, SELECTIONS, CODES)
        total = torch.zeros(plan.state_shape, device=out.device)
        given = torch.zeros(plan.state_shape, device=out.device)
        for payload in payloads:
            chosen, codes, scales = _unpack(words, payload, plan)
            if chosen is None:  # not sent: only sound payloads are decoded
                chosen = _select_shared(plan, key, words.device)
            total[chosen] += dequantise(codes, scales, chosen, plan.values)
            given[chosen] += 1.0
        mean = divided(total, float(divisor)) if divisor else total / given.clamp(min=1.0)
        out.copy_(restore(mean, plan).reshape(out.shape).to(out.dtype))

    def mix_(
        self, x: Tensor, self_weight: float, others: Sequence[Tensor], weights: Sequence[float], out: Tensor
    ) -> Tensor:
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        terms = zip((x, *others), (self_weight, *weights), strict=True)
        products = [
            term.detach().to(wide) * (weight if wide is torch.float64 else rounded(weight))
            for term, weight in terms
            if weight != 0.0
        ]
        mixed = products[0] if products else torch.zeros_like(x, dtype=wide)
        for product in products[1:]:
            # Not by add_(alpha=...), which may fuse multiplication and addition.
            mixed = mixed + product
        filled = mixed.to(x.dtype)
        distance = (filled.double() - x.detach().double()).square().sum()
        out.detach().copy_(filled)
        return distance


def _unpack(words: Tensor, payload: Payload, plan: TensorPlan) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the mask of sent coefficients, None if it was not sent or is not sound; the codes, and the scales."""
    layout, counts, chosen = payload.layout, payload.counts, None
    if counts is None:
        counts = torch.full((plan.chunks,), plan.k, device=words.device)
    bits = to_bits(words[payload.start : payload.start + layout.nwords])
    if layout.code is not IndexCode.NONE:
        chosen = get_indices(bits[32 * layout.indices :], counts, plan.chunk_numel, layout)
    scale_at, value_at = _value_positions(plan, layout, counts)
    scales = get(bits, scale_at, 16).view(plan.chunks, plan.values.format.scales)
    return chosen, get(bits, value_at, plan.values.format.bits), scales


def _value_positions(plan: TensorPlan, layout: Layout, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return at which bits of a payload its scales are, and its values."""
    form = plan.values.format
    scales = 32 * layout.scales + 16 * torch.arange(plan.chunks * form.scales, device=counts.device)
    return scales, 32 * layout.values + entry_positions(counts, form.bits, layout.value_padding, form.bits)


def _select_shared(plan: TensorPlan, sample_key: SampleKey, device: torch.device) -> Tensor:
    """Select what every rank derives alike from plan and key."""
    if plan.sends_everything:
        return torch.ones(plan.state_shape, dtype=torch.bool, device=device)
    entries = torch.arange(plan.k, device=device).expand(plan.chunks, plan.k)
    return _mask(plan, _SHARED[plan.selection](entries, plan, sample_key))


def _mask(plan: TensorPlan, indices: Tensor) -> Tensor:
    chosen = torch.zeros(plan.state_shape, dtype=torch.bool, device=indices.device)
    return chosen.scatter_(1, indices, True)


def _top_k(magnitudes: Tensor, plan: TensorPlan, _: Payload) -> Tensor:
    order = magnitudes.sort(dim=1, descending=True, stable=True).indices
    return _mask(plan, order[:, : plan.k])


def _threshold(magnitudes: Tensor, _: TensorPlan, payload: Payload) -> Tensor:
    """Select what reaches the threshold; of its own bin, so many of lowest index that the counts are kept."""
    assert payload.counts is not None, "a variable plan is encoded with its counts"  # noqa: S101  (our own invariant)
    bin_end = ((payload.tau_bits >> BIN_SHIFT) + 1) << BIN_SHIFT
    above = magnitudes >= bin_end
    ties = (magnitudes >= payload.tau_bits) & ~above
    room = (payload.counts - above.sum(dim=1)).unsqueeze(1)
    return above | (ties & (ties.cumsum(dim=1) <= room))


def _striding(entries: Tensor, plan: TensorPlan, sample_key: SampleKey) -> Tensor:
    return (entries * plan.chunk_numel // plan.k + sample_key.start) % plan.chunk_numel


def _random_k(entries: Tensor, plan: TensorPlan, sample_key: SampleKey) -> Tensor:
    """Select what the next entries are in an order of each chunk that the key determines.

    Each round permutes the numbers of so many bits; one that leaves the chunk is sent through again.
    """
    keys = mix32(sample_key.key + torch.arange(plan.chunks, device=entries.device).unsqueeze(1) * GOLDEN)
    width = max(1, (plan.chunk_numel - 1).bit_length())
    mask, half = (1 << width) - 1, (width + 1) >> 1
    moved = (sample_key.start + entries) % plan.chunk_numel
    outside = torch.ones_like(moved, dtype=torch.bool)
    while bool(outside.any()):
        again = moved
        for turn in range(4):
            again = (again + mix32(keys + turn)) & mask
            again = (again * 0x2C9277B5) & mask
            again = again ^ (again >> half)
        moved = torch.where(outside, again, moved)
        outside = moved >= plan.chunk_numel
    return moved


_BY_MAGNITUDE = {Selection.TOP_K: _top_k, Selection.THRESHOLD: _threshold}
_SHARED = {Selection.RANDOM_K: _random_k, Selection.STRIDING: _striding}
SELECTIONS = (Selection.EVERYTHING, *_BY_MAGNITUDE, *_SHARED)
