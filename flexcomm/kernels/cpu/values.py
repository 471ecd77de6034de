"""Value codes. Each ``put_`` writes entries and leaves in ``taken`` what was not sent of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.kernels.cpu.bits import get, get_run, put, put_run
from flexcomm.kernels.cpu.compiler import compiled
from flexcomm.kernels.cpu.floats import bf16_up, fp16_bits, fp16_value, from_bits, lane_sum, saturated_bf16, to_bits
from flexcomm.kernels.plan import ValueCode

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import Bytes, Float, Floats, FullWords, Halves, Int, Ints
    from flexcomm.kernels.cpu.records import Job, Scratch, Target, Words

__all__ = ["CODES", "get_values", "put_values"]

_FP32 = int(ValueCode.FP32)
_BF16 = int(ValueCode.BF16)
_FP16 = int(ValueCode.FP16)
_INT8 = int(ValueCode.INT8)
_SIGN = int(ValueCode.SIGN)
_SIGN2 = int(ValueCode.SIGN2)
CODES = (ValueCode.FP32, ValueCode.BF16, ValueCode.FP16, ValueCode.INT8, ValueCode.SIGN, ValueCode.SIGN2)
"""Those that the functions below have a branch for; plans with others are refused before."""
_MAGNITUDE = 0x7FFFFFFF
_LARGEST_FP16 = 0x7BFF
_ZERO = np.float32(0.0)


@compiled
def put_values(target: Target, position: Int, first: Int, many: Int, job: Job, count: Int, scratch: Scratch) -> None:
    """Write all that was taken; scaled codes chunk by chunk, the others in one run."""
    if job.values == _FP32:
        put_fp32(target.values.full[position >> 5 :], scratch.taken, count)
    elif job.values == _BF16:
        put_bf16(target.values.halves[position >> 4 :], scratch.taken, count)
    elif job.values == _FP16:
        put_fp16(target.values.halves[position >> 4 :], scratch.taken, count)
    elif job.scales:
        done = 0
        for i in range(many):
            taken = scratch.taken[done : done + scratch.counts[i]]
            put_scaled(target, position + done * job.value_bits, first + i, job, taken, scratch)
            done += taken.size


@compiled
def put_scaled(target: Target, position: Int, chunk: Int, job: Job, taken: Floats, scratch: Scratch) -> None:
    if job.values == _INT8:
        put_int8(target.values.bytes[position >> 3 :], target.scales, chunk, taken)
    elif job.values == _SIGN:
        put_sign(target.values.full, position, target.scales, chunk, taken, scratch.sums)
    elif job.values == _SIGN2:
        put_sign2(target.values.full, position, target.scales, chunk, taken, scratch.few)


@compiled
def put_fp32(words: FullWords, taken: Floats, count: Int) -> None:
    for entry in range(count):
        words[entry] = to_bits(taken[entry])
        taken[entry] = _ZERO


@compiled
def put_bf16(halves: Halves, taken: Floats, count: Int) -> None:
    for entry in range(count):
        word = to_bits(taken[entry])
        code = ((word >> 16) & 0x8000) | saturated_bf16(word & _MAGNITUDE)
        halves[entry] = code
        taken[entry] -= from_bits(code << 16)


@compiled
def put_fp16(halves: Halves, taken: Floats, count: Int) -> None:
    for entry in range(count):
        word = to_bits(taken[entry])
        code = ((word >> 16) & 0x8000) | min(fp16_bits(word & _MAGNITUDE), _LARGEST_FP16)
        halves[entry] = code
        taken[entry] -= fp16_value(code)


@compiled
def put_int8(levels: Bytes, scales: Halves, chunk: Int, taken: Floats) -> None:
    count = taken.size
    largest = _ZERO
    for entry in range(count):
        largest = max(largest, abs(taken[entry]))
    scale = put_scale(scales, chunk, bf16_up(to_bits(largest / np.float32(127.0))))
    if scale == 0:
        return
    for entry in range(count):
        level = np.int8(np.rint(taken[entry] / scale))
        levels[entry] = level
        taken[entry] -= np.float32(level) * scale


@compiled
def put_sign(words: FullWords, position: Int, scales: Halves, chunk: Int, taken: Floats, sums: Floats) -> None:
    count = taken.size
    mean = lane_sum(taken, sums) / np.float32(max(count, 1))
    scale = put_scale(scales, chunk, saturated_bf16(to_bits(mean)))
    for begin in range(0, count, 32):
        width, signs = min(32, count - begin), np.int64(0)
        for entry in range(width):
            signs |= (to_bits(taken[begin + entry]) >> 31) << entry
        put(words, position + begin, signs, width)
    for entry in range(count):
        taken[entry] = taken[entry] + scale if to_bits(taken[entry]) >> 31 else taken[entry] - scale


@compiled
def put_sign2(words: FullWords, position: Int, scales: Halves, chunk: Int, taken: Floats, codes: Ints) -> None:
    count = taken.size
    if count == 0:
        return
    least, largest = np.int64(_MAGNITUDE), np.int64(0)
    for entry in range(count):
        magnitude = to_bits(taken[entry]) & _MAGNITUDE
        least, largest = min(least, magnitude), max(largest, magnitude)
    base = put_scale(scales, 2 * chunk, least >> 16)
    step = put_scale(scales, 2 * chunk + 1, bf16_up(to_bits((from_bits(largest) - base) / np.float32(3.0))))
    for entry in range(count):
        negative = to_bits(taken[entry]) >> 31
        level = np.rint((abs(taken[entry]) - base) / step) if step > 0 else _ZERO
        codes[entry] = negative | (np.int64(level) << 1)
        sent = base + level * step
        taken[entry] = taken[entry] + sent if negative else taken[entry] - sent
    put_run(words, position, 3, codes, count)


@compiled
def put_scale(scales: Halves, place: Int, code: Int) -> Float:
    """Write a bfloat16 scale; return it as the receiver will read it."""
    scales[place] = code
    return from_bits(code << 16)


@compiled
def get_scale(halves: Halves, section: Int, place: Int) -> Float:
    return from_bits(np.int64(halves[2 * section + place]) << 16)


@compiled
def get_values(
    words: Words, position: Int, scales: Int, first: Int, many: Int, job: Job, count: Int, scratch: Scratch
) -> None:
    """Read the entries of chunks into ``scratch.taken``. ``scales`` is the word at which the scales begin."""
    sent = scratch.taken
    if job.values == _FP32:
        full = words.full[position >> 5 :]
        for entry in range(count):
            sent[entry] = from_bits(full[entry])
    elif job.values == _BF16:
        halves = words.halves[position >> 4 :]
        for entry in range(count):
            sent[entry] = from_bits(np.int64(halves[entry]) << 16)
    elif job.values == _FP16:
        halves = words.halves[position >> 4 :]
        for entry in range(count):
            sent[entry] = fp16_value(np.int64(halves[entry]))
    elif job.scales:
        done = 0
        for i in range(many):
            here = sent[done : done + scratch.counts[i]]
            get_scaled(words, position + done * job.value_bits, scales, first + i, job.values, here, scratch.few)
            done += here.size


@compiled
def get_scaled(words: Words, position: Int, scales: Int, chunk: Int, values: Int, sent: Floats, codes: Ints) -> None:
    if values == _INT8:
        get_levels(words.bytes[position >> 3 :], get_scale(words.halves, scales, chunk), sent)
    elif values == _SIGN:
        get_signs(words.full, position, get_scale(words.halves, scales, chunk), sent)
    elif values == _SIGN2:
        base, step = get_scale(words.halves, scales, 2 * chunk), get_scale(words.halves, scales, 2 * chunk + 1)
        get_run(words.full, position, 3, codes, sent.size)
        for entry in range(sent.size):
            magnitude = base + np.float32(codes[entry] >> 1) * step
            sent[entry] = -magnitude if codes[entry] & 1 else magnitude


@compiled
def get_levels(levels: Bytes, scale: Float, sent: Floats) -> None:
    for entry in range(sent.size):
        sent[entry] = np.float32(levels[entry]) * scale


@compiled
def get_signs(words: FullWords, position: Int, scale: Float, sent: Floats) -> None:
    plus = to_bits(scale)
    for begin in range(0, sent.size, 32):
        width = min(32, sent.size - begin)
        signs = get(words, position + begin, width)
        for entry in range(width):
            sent[begin + entry] = from_bits(plus | (((signs >> entry) & 1) << 31))
