"""The reference: what every kernel set must compute, to the bit, in torch operations on whole tensors, on any device.

It is meant to be read, and to be compared with. Other sets keep a chunk in cache; this one makes dense temporaries.
Bits are compared as bits: magnitudes are ordered by their float32 bits, as integers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from flexcomm.kernels.butterflies import ADD_SCALED, BUTTERFLY, MIX, Program, plan_dct, plan_inverse_dct
from flexcomm.kernels.plan import IndexCode, Selection, ValueCode
from flexcomm.kernels.protocol import LARGEST_MAGNITUDE, Average, Fault, Momentum, Payload, Survey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flexcomm.kernels.plan import Draw, Layout, TensorPlan

__all__ = ["ReferenceKernels"]

_LOW32 = (1 << 32) - 1
_LARGEST_BF16 = 0x7F7F
_LARGEST_FP16 = 65504.0
_SUM_LANES = 32


class ReferenceKernels:
    """Torch operations, for any device."""

    name = "reference"

    def is_fit(self, x: Tensor) -> bool:
        return bool((x.abs() < LARGEST_MAGNITUDE).all())

    def survey(self, x: Tensor, plan: TensorPlan, momentum: Momentum) -> Survey:
        magnitudes = _bits(_accumulate(x, plan, momentum).abs())
        tau_bits = _threshold_bits(plan)
        if int((magnitudes >= tau_bits).sum()) > plan.keep:
            reaching = torch.bincount(magnitudes.view(-1) >> 16, minlength=1 << 15).flip(0).cumsum(0).flip(0)
            first = (tau_bits >> 16) + 1
            tau_bits = (first + int((reaching[first:] <= plan.keep).nonzero()[0])) << 16
        return Survey((magnitudes >= tau_bits).sum(dim=1), tau_bits)

    def encode_(
        self,
        x: Tensor,
        words: Tensor,
        plan: TensorPlan,
        layout: Layout,
        draw: Draw,
        momentum: Momentum,
        survey: Survey | None = None,
    ) -> bool:
        coefficients = _accumulate(x, plan, momentum)
        chosen = _select(coefficients, plan, draw, survey)
        picked = coefficients[chosen]
        before = _before(chosen.sum(dim=1))
        bits = torch.zeros(32 * words.numel(), dtype=torch.int64, device=x.device)
        if survey is not None:
            _put(bits, 32 * layout.counts, chosen.sum(dim=1), plan.chunk_numel.bit_length())
        _put_indices(bits[32 * layout.indices :], chosen, before, layout)
        codes, scales = _quantise(picked, chosen, plan.values)
        _put(bits, 32 * layout.scales, scales.reshape(-1), 16)
        _put(bits, 32 * layout.values, codes, plan.values.bits)
        words.copy_(_to_words(bits))
        if momentum.next_state is not None:
            coefficients[chosen] = picked - _dequantise(codes, scales, chosen, plan.values)
            momentum.next_state.copy_(coefficients)
        return bool(picked.isfinite().all())

    def read_counts(self, words: Tensor, plan: TensorPlan, start: int) -> Tensor | None:
        counts = _get(_to_bits(words[start:]), 0, plan.chunks, plan.chunk_numel.bit_length())
        return None if bool((counts > plan.chunk_numel).any()) else counts

    def find_fault(self, words: Tensor, payload: Payload, plan: TensorPlan) -> Fault:
        layout, counts = payload.layout, _counts_of(payload, plan, words.device)
        bits = _to_bits(words[payload.start : payload.start + layout.nwords])
        if layout.code is not IndexCode.NONE:
            found = _get_indices(bits[32 * layout.indices :], counts, plan.chunk_numel, layout)
            if found is None:
                return Fault.INDEX
        scales = _get(bits, 32 * layout.scales, plan.chunks * plan.values.scales, 16)
        if bool((scales >= 0x7F80).any()):
            return Fault.SCALE
        codes = _get(bits, 32 * layout.values, int(counts.sum()), plan.values.bits)
        infinite = {ValueCode.FP32: 0x7F800000, ValueCode.BF16: 0x7F80, ValueCode.FP16: 0x7C00}.get(plan.values)
        if infinite is not None and bool(((codes & infinite) == infinite).any()):
            return Fault.VALUE
        return Fault.NONE

    def decode_(
        self,
        words: Tensor,
        payloads: Sequence[Payload],
        plan: TensorPlan,
        draw: Draw,
        average: Average,
        out: Tensor,
    ) -> None:
        total = torch.zeros(plan.state_shape, device=out.device)
        given = torch.zeros(plan.state_shape, device=out.device)
        for payload in payloads:
            chosen, sent = _decode(words, payload, plan, draw)
            total[chosen] += sent
            given[chosen] += 1.0
        mean = total / given.clamp(min=1.0) if average == "contributors" else _divided(total, float(len(payloads)))
        out.copy_(_restore(mean, plan).reshape(out.shape).to(out.dtype))

    def checksum(self, words: Tensor, first: int) -> int:
        places = torch.arange(first, first + words.numel(), device=words.device)
        scattered = _mix32((words.to(torch.int64) & _LOW32) ^ ((places * 0x9E3779B9) & _LOW32))
        return int(scattered.sum()) & _LOW32


# --- coefficients -----------------------------------------------------------------------------------------------------


def _accumulate(x: Tensor, plan: TensorPlan, momentum: Momentum) -> Tensor:
    coefficients = _transform(x, plan) * _float32(_factor(plan, momentum.gain))
    if momentum.state is None:
        return coefficients
    return _float32(momentum.decay) * momentum.state + coefficients


def _transform(x: Tensor, plan: TensorPlan) -> Tensor:
    """Return the elements in chunks ``[chunks, chunk_numel]``; of transformed ones, coefficients not yet scaled.

    A transformed chunk is kept turned: frequency along a row first, then down a column.
    """
    matrix = x.detach().reshape(plan.rows, plan.cols).to(torch.float32)
    height, width = plan.chunk_rows, plan.chunk_cols
    padding = (0, -plan.cols % width, 0, -plan.rows % height)
    blocks = torch.nn.functional.pad(matrix, padding).view(plan.grid_rows, height, plan.grid_cols, width)
    chunks = blocks.transpose(1, 2).reshape(plan.chunks, height, width)
    if plan.transformed:
        chunks = _apply(plan_dct(height), chunks).transpose(1, 2)
        chunks = _apply(plan_dct(width), chunks)
    return chunks.reshape(plan.state_shape)


def _restore(coefficients: Tensor, plan: TensorPlan) -> Tensor:
    """Return the matrix ``[rows, cols]`` whose coefficients these are."""
    height, width = plan.chunk_rows, plan.chunk_cols
    if plan.transformed:
        turned = _apply(plan_inverse_dct(width), coefficients.view(plan.chunks, width, height))
        chunks = _apply(plan_inverse_dct(height), turned.transpose(1, 2))
    else:
        chunks = coefficients.view(plan.chunks, height, width)
    chunks = chunks * _float32(_factor(plan, 1.0))
    blocks = chunks.reshape(plan.grid_rows, plan.grid_cols, height, width).transpose(1, 2)
    return blocks.reshape(plan.grid_rows * height, plan.grid_cols * width)[: plan.rows, : plan.cols]


def _apply(program: Program, chunks: Tensor) -> Tensor:
    """Do the program's steps on the rows of every chunk ``[chunks, rows, lanes]``."""
    work = chunks.new_zeros(program.height, chunks.shape[0], chunks.shape[2])
    work[program.inputs.tolist()] = chunks.transpose(0, 1)
    for (code, i, j), factors in zip(program.steps.tolist(), program.factors.tolist(), strict=True):
        a, b = work[i].clone(), work[j].clone()
        c0, c1, c2, c3 = factors
        if code == BUTTERFLY:
            work[i], work[j] = a + b, a - b
        elif code == MIX:
            work[i], work[j] = c0 * a + c1 * b, c2 * a + c3 * b
        elif code == ADD_SCALED:
            work[i] = a + c0 * b
        else:
            work[i] = c0 * a
    return work[program.outputs.tolist()].transpose(0, 1)


def _factor(plan: TensorPlan, gain: float) -> float:
    return gain / math.sqrt(plan.chunk_numel) if plan.transformed else gain


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


# --- selection --------------------------------------------------------------------------------------------------------


def _select(coefficients: Tensor, plan: TensorPlan, draw: Draw, survey: Survey | None) -> Tensor:
    """Return which coefficients are sent, as a mask."""
    chosen = torch.zeros(plan.state_shape, dtype=torch.bool, device=coefficients.device)
    if survey is not None:
        return _bits(coefficients.abs()) >= survey.tau_bits
    if plan.selection is Selection.LARGEST:
        order = _bits(coefficients.abs()).sort(dim=1, descending=True, stable=True).indices
        return chosen.scatter_(1, order[:, : plan.keep], True)
    return chosen.scatter_(1, _shared_indices(plan, draw, coefficients.device), True)


def _shared_indices(plan: TensorPlan, draw: Draw, device: torch.device) -> Tensor:
    """Return the indices ``[chunks, keep]`` that every rank derives alike."""
    length = plan.chunk_numel
    entries = torch.arange(plan.keep, device=device).expand(plan.chunks, plan.keep)
    if plan.selection is Selection.EVERYTHING:
        return entries
    if plan.selection is Selection.STRIDED:
        return (entries * length // plan.keep + draw.start) % length
    chunks = torch.arange(plan.chunks, device=device).unsqueeze(1)
    keys = _mix32((draw.key + chunks * 0x9E3779B9) & _LOW32)
    return _shuffled((draw.start + entries) % length, length, keys)


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
            again = (again + _mix32((keys + turn) & _LOW32)) & mask
            again = (again * 0x2C9277B5) & mask
            again = again ^ (again >> half)
        moved = torch.where(outside, again, moved)
        outside = moved >= length
    return moved


def _mix32(value: Tensor) -> Tensor:
    """Scatter 32 bits held in int64: MurmurHash3's finaliser."""
    value = value ^ (value >> 16)
    value = (value * 0x85EBCA6B) & _LOW32
    value = value ^ (value >> 13)
    value = (value * 0xC2B2AE35) & _LOW32
    return value ^ (value >> 16)


# --- values -----------------------------------------------------------------------------------------------------------


def _quantise(picked: Tensor, chosen: Tensor, values: ValueCode) -> tuple[Tensor, Tensor]:
    """Return the codes of the sent coefficients and the bits of the scales ``[chunks, scales]``."""
    none = picked.new_zeros(chosen.shape[0], 0, dtype=torch.int64)
    if values is ValueCode.FP32:
        return _bits(picked), none
    if values is ValueCode.BF16:
        return _signed(_saturated_bf16(picked.abs()), picked, 15), none
    if values is ValueCode.FP16:
        half = picked.clamp(-_LARGEST_FP16, _LARGEST_FP16).to(torch.float16)
        return half.view(torch.int16).to(torch.int64) & 0xFFFF, none
    rows = _by_chunk(picked.abs(), chosen, 0.0)
    if values is ValueCode.INT8:
        scales = _bf16_up(_divided(rows.amax(dim=1), 127.0)).unsqueeze(1)
        scale = _bf16_values(scales)[_chunk_of_entries(chosen), 0]
        levels = torch.where(scale > 0, picked / scale, 0.0).round()
        return levels.to(torch.int64) & 0xFF, scales
    if values is ValueCode.SIGN:
        mean = _lane_sum(rows) / chosen.sum(dim=1).clamp(min=1).to(torch.float32)
        return _signed(torch.zeros_like(picked, dtype=torch.int64), picked, 0), _saturated_bf16(mean).unsqueeze(1)
    return _quantise_sign2(picked, chosen, rows.amax(dim=1))


def _quantise_sign2(picked: Tensor, chosen: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    least = _by_chunk(picked.abs(), chosen, math.inf).amin(dim=1)
    bases = torch.where(least.isinf(), 0, _bits(least) >> 16)
    steps = _bf16_up(_divided(largest - _bf16_values(bases), 3.0))
    chunk = _chunk_of_entries(chosen)
    base, step = _bf16_values(bases)[chunk], _bf16_values(steps)[chunk]
    levels = torch.where(step > 0, (picked.abs() - base) / step, 0.0).round().to(torch.int64)
    return _signed(levels << 1, picked, 0), torch.stack((bases, steps), dim=1)


def _dequantise(codes: Tensor, scales: Tensor, chosen: Tensor, values: ValueCode) -> Tensor:
    if values is ValueCode.FP32:
        return _from_bits(codes)
    if values is ValueCode.BF16:
        return _bf16_values(codes)
    if values is ValueCode.FP16:
        return codes.to(torch.int16).view(torch.float16).to(torch.float32)
    scale = _bf16_values(scales)[_chunk_of_entries(chosen)]
    if values is ValueCode.INT8:
        return ((codes ^ 0x80) - 0x80).to(torch.float32) * scale[:, 0]
    magnitudes = scale[:, 0]
    if values is ValueCode.SIGN2:
        magnitudes = magnitudes + (codes >> 1).to(torch.float32) * scale[:, 1]
    return torch.where((codes & 1) == 1, -magnitudes, magnitudes)


def _divided(values: Tensor, divisor: float) -> Tensor:
    """Divide by a tensor: by a Python number, torch multiplies with the reciprocal on CUDA, and bits differ."""
    return values / torch.full_like(values, divisor)


def _signed(codes: Tensor, picked: Tensor, place: int) -> Tensor:
    return codes | (picked.signbit().to(torch.int64) << place)


def _by_chunk(picked: Tensor, chosen: Tensor, filler: float) -> Tensor:
    """Return the entries of each chunk as a row ``[chunks, most entries of a chunk]``, in order, then fillers."""
    counts = chosen.sum(dim=1)
    width = max(1, int(counts.max()) if counts.numel() else 1)
    rows = picked.new_full((chosen.shape[0], width), filler)
    places = torch.arange(width, device=picked.device).expand_as(rows) < counts.unsqueeze(1)
    rows[places] = picked
    return rows


def _lane_sum(rows: Tensor) -> Tensor:
    """Sum rows: entry e into lane e % 32, then lanes in halves. Any device can do that in the same order."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % _SUM_LANES))
    lanes = torch.zeros_like(padded[:, :_SUM_LANES])
    for begin in range(0, padded.shape[1], _SUM_LANES):
        lanes = lanes + padded[:, begin : begin + _SUM_LANES]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).to(torch.int64) & _LOW32


def _from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _bf16_values(bits: Tensor) -> Tensor:
    return _from_bits(bits << 16)


def _saturated_bf16(magnitudes: Tensor) -> Tensor:
    bits = _bits(magnitudes)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).clamp(max=_LARGEST_BF16)


def _bf16_up(magnitudes: Tensor) -> Tensor:
    return ((_bits(magnitudes) + 0xFFFF) >> 16).clamp(max=_LARGEST_BF16)


def _threshold_bits(plan: TensorPlan) -> int:
    return int(_bits(torch.tensor(plan.tau, dtype=torch.float32)))


# --- bits -------------------------------------------------------------------------------------------------------------


def _to_words(bits: Tensor) -> Tensor:
    """Return int32 words of bits, lowest first."""
    return (bits.view(-1, 32) << torch.arange(32, device=bits.device)).sum(dim=1).to(torch.int32)


def _to_bits(words: Tensor) -> Tensor:
    return ((words.to(torch.int64).unsqueeze(1) >> torch.arange(32, device=words.device)) & 1).reshape(-1)


def _put(bits: Tensor, position: int, codes: Tensor, width: int) -> None:
    """Write codes one behind the other."""
    spread = (codes.unsqueeze(1) >> torch.arange(width, device=bits.device)) & 1
    bits[position : position + spread.numel()] = spread.reshape(-1)


def _get(bits: Tensor, position: int, count: int, width: int) -> Tensor:
    spread = bits[position : position + count * width].view(count, width)
    return (spread << torch.arange(width, device=bits.device)).sum(dim=1)


def _before(counts: Tensor) -> Tensor:
    """Return how many entries precede each chunk."""
    return counts.cumsum(0) - counts


def _chunk_of_entries(chosen: Tensor) -> Tensor:
    return chosen.nonzero()[:, 0]


def _put_indices(bits: Tensor, chosen: Tensor, before: Tensor, layout: Layout) -> None:
    if layout.code is IndexCode.NONE:
        return
    if layout.code is IndexCode.BITMAP:
        bits[: chosen.numel()] = chosen.reshape(-1).to(torch.int64)
        return
    chunks, indices = chosen.nonzero().unbind(dim=1)
    starts = before[chunks] * layout.entry_bits + chunks * layout.chunk_bits
    places = torch.arange(indices.numel(), device=bits.device) - before[chunks]
    low = layout.entry_bits if layout.code is IndexCode.PACKED else layout.low_bits
    lanes = torch.arange(low, device=bits.device)
    bits[(starts + places * low).unsqueeze(1) + lanes] = (indices.unsqueeze(1) >> lanes) & 1
    if layout.code is IndexCode.ELIAS_FANO:
        highs = starts + chosen.sum(dim=1)[chunks] * low
        bits[highs + (indices >> low) + places] = 1


def _get_indices(bits: Tensor, counts: Tensor, length: int, layout: Layout) -> Tensor | None:
    """Return the mask of sent coefficients ``[chunks, length]``; None if the bits are not those of any."""
    before = _before(counts)
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
        return _get(bits, position, count, layout.entry_bits)
    low = layout.low_bits
    highs = position + count * low
    ones = bits[highs : highs + count + ((length - 1) >> low)].nonzero()[:, 0]
    if ones.numel() != count:
        return ones
    return ((ones - torch.arange(count, device=bits.device)) << low) | _get(bits, position, count, low)


def _counts_of(payload: Payload, plan: TensorPlan, device: torch.device) -> Tensor:
    if payload.counts is not None:
        return payload.counts
    return torch.full((plan.chunks,), plan.keep, device=device)


def _decode(words: Tensor, payload: Payload, plan: TensorPlan, draw: Draw) -> tuple[Tensor, Tensor]:
    """Return the mask of sent coefficients, and their values in order."""
    layout, counts = payload.layout, _counts_of(payload, plan, words.device)
    bits = _to_bits(words[payload.start : payload.start + layout.nwords])
    if layout.code is IndexCode.NONE:
        chosen = torch.zeros(plan.state_shape, dtype=torch.bool, device=words.device)
        chosen.scatter_(1, _shared_indices(plan, draw, words.device), True)
    else:
        found = _get_indices(bits[32 * layout.indices :], counts, plan.chunk_numel, layout)
        assert found is not None, "decode_ takes payloads without a fault"  # noqa: S101  (our own invariant)
        chosen = found
    codes = _get(bits, 32 * layout.values, int(counts.sum()), plan.values.bits)
    scales = _get(bits, 32 * layout.scales, plan.chunks * plan.values.scales, 16).view(plan.chunks, plan.values.scales)
    return chosen, _dequantise(codes, scales, chosen, plan.values)
