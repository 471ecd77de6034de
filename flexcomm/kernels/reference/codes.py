"""A payload as bits: strings of them, one int64 a bit, the codes of indices and values, and hashes.

Position ``p`` is bit ``p % 32`` of word ``p // 32``. All of this rounds, converts and divides alike on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flexcomm.kernels.layout import IndexCode, Layout
from flexcomm.kernels.plan import ValueCode, entries_before

LOW32 = (1 << 32) - 1
GOLDEN = 0x9E3779B9
"""2**32 over the golden ratio: multiples of it differ in their upper bits, whatever is hashed with them."""
_MAGNITUDE = (1 << 31) - 1
_LARGEST_BF16 = 0x7F7F
_LARGEST_FP16 = 65504.0
_SUM_LANES = 32


def to_words(bits: Tensor) -> Tensor:
    """Return int32 words of bits, lowest first."""
    return (bits.view(-1, 32) << torch.arange(32, device=bits.device)).sum(dim=1).to(torch.int32)


def to_bits(words: Tensor) -> Tensor:
    return ((words.to(torch.int64).unsqueeze(1) >> torch.arange(32, device=words.device)) & 1).reshape(-1)


def put(bits: Tensor, positions: Tensor, codes: Tensor, width: int) -> None:
    """Write a code of so many bits at each position."""
    lanes = torch.arange(width, device=bits.device)
    bits[positions.unsqueeze(1) + lanes] = (codes.unsqueeze(1) >> lanes) & 1


def get(bits: Tensor, positions: Tensor, width: int) -> Tensor:
    lanes = torch.arange(width, device=bits.device)
    return (bits[positions.unsqueeze(1) + lanes] << lanes).sum(dim=1)


def chunk_starts(counts: Tensor, entry_bits: int, chunk_bits: int) -> Tensor:
    """Return where each chunk begins that has so many entries of so many bits, and so many bits beside them."""
    chunks = torch.arange(counts.numel(), device=counts.device)
    return entries_before(counts)[:-1] * entry_bits + chunks * chunk_bits


def entry_positions(counts: Tensor, entry_bits: int, chunk_bits: int, width: int) -> Tensor:
    """Return where the codes of all entries are that begin such chunks, one behind the other."""
    chunks, places = entry_places(counts)
    return chunk_starts(counts, entry_bits, chunk_bits)[chunks] + places * width


def entry_places(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chunk of each entry, and its place among the entries of that chunk."""
    chunks = torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts)
    return chunks, torch.arange(chunks.numel(), device=counts.device) - entries_before(counts)[chunks]


def mix32(value: Tensor) -> Tensor:
    """Hash the lowest 32 bits: MurmurHash3's finaliser."""
    value = value & LOW32
    value = value ^ (value >> 16)
    value = (value * 0x85EBCA6B) & LOW32
    value = value ^ (value >> 13)
    value = (value * 0xC2B2AE35) & LOW32
    return value ^ (value >> 16)


# Indices: a mask of what is sent, as the bits of a payload's section of indices, and back.


def put_indices(bits: Tensor, chosen: Tensor, layout: Layout) -> None:
    if layout.code is IndexCode.NONE:
        return
    counts, (chunks, indices) = chosen.sum(dim=1), chosen.nonzero().unbind(dim=1)
    starts = chunk_starts(counts, layout.entry_bits, layout.chunk_bits)
    if layout.code is IndexCode.BITMAP:
        bits[starts[chunks] + indices] = 1
        return
    low = layout.entry_bits if layout.code is IndexCode.PACKED else layout.low_bits
    put(bits, entry_positions(counts, layout.entry_bits, layout.chunk_bits, low), indices, low)
    if layout.code is IndexCode.ELIAS_FANO:
        bits[(starts + counts * low)[chunks] + (indices >> low) + entry_places(counts)[1]] = 1


def get_indices(bits: Tensor, counts: Tensor, length: int, layout: Layout) -> Tensor | None:
    """Return the mask of sent coefficients ``[chunks, length]``; None if the bits are not those of any."""
    coding, (chunks, places) = (layout.entry_bits, layout.chunk_bits), entry_places(counts)
    if layout.code is IndexCode.PACKED:
        indices = get(bits, entry_positions(counts, *coding, layout.entry_bits), layout.entry_bits)
    else:
        low, is_bitmap = layout.low_bits, layout.code is IndexCode.BITMAP
        ends = torch.full_like(counts, length) if is_bitmap else counts + ((length - 1) >> low)
        lanes = torch.arange(int(ends.max()) if ends.numel() else 0, device=bits.device)
        upper = (chunk_starts(counts, *coding) + counts * low).unsqueeze(1) + lanes
        ones = (lanes < ends.unsqueeze(1)) & (bits[upper.clamp(max=bits.numel() - 1)] == 1)
        if not torch.equal(ones.sum(dim=1), counts):
            return None
        indices = ones.nonzero()[:, 1]
        if not is_bitmap:
            indices = ((indices - places) << low) | get(bits, entry_positions(counts, *coding, low), low)
    increasing = (indices[1:] > indices[:-1]) | (places[1:] == 0)
    if not bool(increasing.all()) or bool((indices >= length).any()):
        return None
    chosen = torch.zeros(counts.numel(), length, dtype=torch.bool, device=bits.device)
    chosen[chunks, indices] = True
    return chosen


# Values: sent coefficients as codes of a few bits and scales of their chunks, and back.


def quantise(picked: Tensor, chosen: Tensor, values: ValueCode) -> tuple[Tensor, Tensor]:
    """Return the codes of the sent coefficients and the bits of the scales ``[chunks, scales]``."""
    scales = _CODECS[values].find_scales(picked.abs(), chosen)
    return _CODECS[values].encode(picked, _by_entry(scales, chosen)), scales


def dequantise(codes: Tensor, scales: Tensor, chosen: Tensor, values: ValueCode) -> Tensor:
    """Return the coefficients that codes and the bits of the scales stand for."""
    return _CODECS[values].decode(codes, _by_entry(scales, chosen))


def float_bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).to(torch.int64) & LOW32


def magnitude_bits(values: Tensor) -> Tensor:
    """Return the bits without the sign, which order magnitudes as their values do, with NaN above infinity."""
    return float_bits(values) & _MAGNITUDE


def divided(values: Tensor, divisor: float) -> Tensor:
    """Divide by a tensor: by a Python number, torch multiplies with the reciprocal on CUDA, and bits differ."""
    return values / torch.full_like(values, divisor)


def _from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _bf16_values(bits: Tensor) -> Tensor:
    return _from_bits(bits << 16)


def _saturated_bf16(magnitudes: Tensor) -> Tensor:
    bits = float_bits(magnitudes)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).clamp(max=_LARGEST_BF16)


def _bf16_up(magnitudes: Tensor) -> Tensor:
    return ((float_bits(magnitudes) + 0xFFFF) >> 16).clamp(max=_LARGEST_BF16)


def _by_entry(scales: Tensor, chosen: Tensor) -> Tensor:
    """Return the scales of each entry's chunk as floats ``[scales, entries]``."""
    return _bf16_values(scales)[chosen.nonzero()[:, 0]].T


def _signs(x: Tensor) -> Tensor:
    return x.signbit().to(torch.int64)


def _encode_bf16(x: Tensor, _: Tensor) -> Tensor:
    return _saturated_bf16(x.abs()) | (_signs(x) << 15)


def _encode_fp16(x: Tensor, _: Tensor) -> Tensor:
    half = x.clamp(-_LARGEST_FP16, _LARGEST_FP16).to(torch.float16)
    return half.view(torch.int16).to(torch.int64) & 0xFFFF


def _scale_int8(magnitudes: Tensor, chosen: Tensor) -> Tensor:
    largest = _by_chunk(magnitudes, chosen, 0.0).amax(dim=1)
    return _bf16_up(divided(largest, 127.0)).unsqueeze(1)


def _encode_int8(x: Tensor, scales: Tensor) -> Tensor:
    return torch.where(scales[0] > 0, x / scales[0], 0.0).round().to(torch.int64) & 0xFF


def _scale_sign(magnitudes: Tensor, chosen: Tensor) -> Tensor:
    mean = _lane_sum(_by_chunk(magnitudes, chosen, 0.0)) / chosen.sum(dim=1).clamp(min=1).to(torch.float32)
    return _saturated_bf16(mean).unsqueeze(1)


def _scale_sign2(magnitudes: Tensor, chosen: Tensor) -> Tensor:
    """Return the least magnitude, rounded down, and a third of the way from there to the largest."""
    largest = _by_chunk(magnitudes, chosen, 0.0).amax(dim=1)
    least = _by_chunk(magnitudes, chosen, math.inf).amin(dim=1)
    bases = torch.where(least.isinf(), 0, float_bits(least) >> 16)
    return torch.stack((bases, _bf16_up(divided(largest - _bf16_values(bases), 3.0))), dim=1)


def _encode_sign2(x: Tensor, scales: Tensor) -> Tensor:
    base, step = scales
    levels = torch.where(step > 0, (x.abs() - base) / step, 0.0).round().to(torch.int64)
    return levels << 1 | _signs(x)


def _with_sign(magnitudes: Tensor, codes: Tensor) -> Tensor:
    return torch.where((codes & 1) == 1, -magnitudes, magnitudes)


def _no_scales(_: Tensor, chosen: Tensor) -> Tensor:
    return torch.zeros(chosen.shape[0], 0, dtype=torch.int64, device=chosen.device)


class _Codec(NamedTuple):
    """``find_scales`` takes magnitudes and the mask; the others what they code, and the scales of each entry."""

    find_scales: Callable[[Tensor, Tensor], Tensor]
    encode: Callable[[Tensor, Tensor], Tensor]
    decode: Callable[[Tensor, Tensor], Tensor]


_CODECS = {
    ValueCode.FP32: _Codec(_no_scales, lambda x, _: float_bits(x), lambda codes, _: _from_bits(codes)),
    ValueCode.BF16: _Codec(_no_scales, _encode_bf16, lambda codes, _: _bf16_values(codes)),
    ValueCode.FP16: _Codec(
        _no_scales, _encode_fp16, lambda codes, _: codes.to(torch.int16).view(torch.float16).to(torch.float32)
    ),
    ValueCode.INT8: _Codec(
        _scale_int8, _encode_int8, lambda codes, scales: ((codes ^ 0x80) - 0x80).to(torch.float32) * scales[0]
    ),
    ValueCode.SIGN: _Codec(_scale_sign, lambda x, _: _signs(x), lambda codes, scales: _with_sign(scales[0], codes)),
    ValueCode.SIGN2: _Codec(
        _scale_sign2,
        _encode_sign2,
        lambda codes, scales: _with_sign(scales[0] + (codes >> 1).to(torch.float32) * scales[1], codes),
    ),
}
CODES = tuple(_CODECS)


def _by_chunk(picked: Tensor, chosen: Tensor, filler: float) -> Tensor:
    """Return the entries of each chunk as a row ``[chunks, most entries of a chunk]``, in order, then fillers."""
    counts = chosen.sum(dim=1)
    width = max(1, int(counts.max()) if counts.numel() else 1)
    rows = picked.new_full((chosen.shape[0], width), filler)
    rows[entry_places(counts)] = picked
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
