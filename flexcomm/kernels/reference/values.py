"""Value codes: sent coefficients as codes of a few bits and scales of their chunks, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flexcomm.kernels.plan import ValueCode
from flexcomm.kernels.reference.bits import (
    bf16_up,
    bf16_values,
    divided,
    float_bits,
    from_bits,
    saturated_bf16,
)

_LARGEST_FP16 = 65504.0
_SUM_LANES = 32


def quantise(picked: Tensor, chosen: Tensor, values: ValueCode) -> tuple[Tensor, Tensor]:
    """Return the codes of the sent coefficients and the bits of the scales ``[chunks, scales]``."""
    return _CODECS[values].quantise(picked, chosen)


def dequantise(codes: Tensor, scales: Tensor, chosen: Tensor, values: ValueCode) -> Tensor:
    """Return the coefficients that codes and the bits of the scales stand for."""
    return _CODECS[values].dequantise(codes, bf16_values(scales)[_chunk_of_entries(chosen)])


def _quantise_fp32(picked: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    return float_bits(picked), _no_scales(chosen)


def _quantise_bf16(picked: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    return _signed(saturated_bf16(picked.abs()), picked, 15), _no_scales(chosen)


def _quantise_fp16(picked: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    half = picked.clamp(-_LARGEST_FP16, _LARGEST_FP16).to(torch.float16)
    return half.view(torch.int16).to(torch.int64) & 0xFFFF, _no_scales(chosen)


def _quantise_int8(picked: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    largest = _by_chunk(picked.abs(), chosen, 0.0).amax(dim=1)
    scales = bf16_up(divided(largest, 127.0)).unsqueeze(1)
    scale = bf16_values(scales)[_chunk_of_entries(chosen), 0]
    levels = torch.where(scale > 0, picked / scale, 0.0).round()
    return levels.to(torch.int64) & 0xFF, scales


def _quantise_sign(picked: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    mean = _lane_sum(_by_chunk(picked.abs(), chosen, 0.0)) / chosen.sum(dim=1).clamp(min=1).to(torch.float32)
    return _signed(torch.zeros_like(picked, dtype=torch.int64), picked, 0), saturated_bf16(mean).unsqueeze(1)


def _quantise_sign2(picked: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    largest = _by_chunk(picked.abs(), chosen, 0.0).amax(dim=1)
    least = _by_chunk(picked.abs(), chosen, math.inf).amin(dim=1)
    bases = torch.where(least.isinf(), 0, float_bits(least) >> 16)
    steps = bf16_up(divided(largest - bf16_values(bases), 3.0))
    chunk = _chunk_of_entries(chosen)
    base, step = bf16_values(bases)[chunk], bf16_values(steps)[chunk]
    levels = torch.where(step > 0, (picked.abs() - base) / step, 0.0).round().to(torch.int64)
    return _signed(levels << 1, picked, 0), torch.stack((bases, steps), dim=1)


def _dequantise_fp32(codes: Tensor, scale: Tensor) -> Tensor:
    del scale
    return from_bits(codes)


def _dequantise_bf16(codes: Tensor, scale: Tensor) -> Tensor:
    del scale
    return bf16_values(codes)


def _dequantise_fp16(codes: Tensor, scale: Tensor) -> Tensor:
    del scale
    return codes.to(torch.int16).view(torch.float16).to(torch.float32)


def _dequantise_int8(codes: Tensor, scale: Tensor) -> Tensor:
    return ((codes ^ 0x80) - 0x80).to(torch.float32) * scale[:, 0]


def _dequantise_sign(codes: Tensor, scale: Tensor) -> Tensor:
    return torch.where((codes & 1) == 1, -scale[:, 0], scale[:, 0])


def _dequantise_sign2(codes: Tensor, scale: Tensor) -> Tensor:
    magnitudes = scale[:, 0] + (codes >> 1).to(torch.float32) * scale[:, 1]
    return torch.where((codes & 1) == 1, -magnitudes, magnitudes)


class _Codec(NamedTuple):
    """How a code is written and read. ``dequantise`` is given the scales ``[entries, scales]`` as floats."""

    quantise: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    dequantise: Callable[[Tensor, Tensor], Tensor]


_CODECS = {
    ValueCode.FP32: _Codec(_quantise_fp32, _dequantise_fp32),
    ValueCode.BF16: _Codec(_quantise_bf16, _dequantise_bf16),
    ValueCode.FP16: _Codec(_quantise_fp16, _dequantise_fp16),
    ValueCode.INT8: _Codec(_quantise_int8, _dequantise_int8),
    ValueCode.SIGN: _Codec(_quantise_sign, _dequantise_sign),
    ValueCode.SIGN2: _Codec(_quantise_sign2, _dequantise_sign2),
}
CODES = tuple(_CODECS)


def _no_scales(chosen: Tensor) -> Tensor:
    return torch.zeros(chosen.shape[0], 0, dtype=torch.int64, device=chosen.device)


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


def _chunk_of_entries(chosen: Tensor) -> Tensor:
    return chosen.nonzero()[:, 0]


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
