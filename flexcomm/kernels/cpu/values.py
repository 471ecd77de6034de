"""Value codes. Each ``put_`` writes what was taken of a chunk, and leaves in its place what was not sent of it."""

from __future__ import annotations

import numpy as np

from flexcomm.kernels.base import Problem
from flexcomm.kernels.cpu import tables as t
from flexcomm.kernels.cpu.bits import (
    bf16_up,
    fp16_bits,
    fp16_value,
    from_bits,
    get_window,
    put_window,
    saturated_bf16,
    sum_magnitudes,
    to_bits,
)
from flexcomm.kernels.cpu.compiler import Bytes, Float, Floats, FullWords, Halves, Int, Longs, compiled, kept
from flexcomm.kernels.cpu.tables import (
    coefs_at,
    entries_before,
    float_of,
    floats_at,
    halves_at,
    picks_of,
    sent_of,
    start_of,
    words_of,
)
from flexcomm.kernels.plan import ValueCode

_FP32, _BF16, _FP16 = int(ValueCode.FP32), int(ValueCode.BF16), int(ValueCode.FP16)
_INT8, _SIGN, _SIGN2 = int(ValueCode.INT8), int(ValueCode.SIGN), int(ValueCode.SIGN2)
CODES = (ValueCode.FP32, ValueCode.BF16, ValueCode.FP16, ValueCode.INT8, ValueCode.SIGN, ValueCode.SIGN2)
"""Those that the functions below have a branch for, in the order of their numbers, which index the lists below.

Codes above FP16 have scales: ``put_scaled`` and ``get_scaled`` know them. Plans with others are refused before.
"""
_SCALES = tuple(code.format.scales for code in CODES)
_MASKS = tuple(code.format.nonfinite_mask for code in CODES)
_SIGN2_BITS = 3
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = np.int32(0x7F800000)
_LARGEST_FP16 = 0x7BFF
_SCALE_INFINITY = 0x7F80
_ZERO = np.float32(0.0)
_STATE, _SCALE, _VALUE = int(Problem.STATE), int(Problem.SCALE), int(Problem.VALUE)


@compiled
def rest_of(picked: Float, sent: Float, share: Float) -> Float:
    """Return what stays of a coefficient: what was not sent of it, and a share of what was."""
    unsent = picked - sent
    return unsent if share == _ZERO else unsent + share * (picked - unsent)


@compiled
def take(row: Longs, job: Longs, chunk: Int, coefs: Floats) -> Floats:
    """Return what is picked of a chunk, in scratch memory; all of it, where it is, if everything is sent."""
    if row[t.EVERYTHING]:
        return coefs
    picks = picks_of(row, job, 0, chunk)
    taken = floats_at(job[t.TILES], picks.size)
    for entry in range(picks.size):
        taken[entry] = coefs[picks[entry]]
    return taken


@compiled
def put_back(row: Longs, job: Longs, chunk: Int, coefs: Floats, taken: Floats) -> None:
    """Put what was not sent where it was picked."""
    if row[t.EVERYTHING]:
        return
    picks = picks_of(row, job, 0, chunk)
    for entry in range(picks.size):
        coefs[picks[entry]] = taken[entry]


@compiled
def is_nonfinite(taken: Floats) -> Int:
    bits, top = taken.view(np.int32), np.int32(0)
    for entry in range(bits.size):
        top = max(top, bits[entry] & np.int32(_MAGNITUDE))
    return top >= _INFINITY


@kept
def put_floats(row: Longs, job: Longs) -> Int:
    """Write what is picked of chunks as floats, unless it is not finite."""
    code, share, values = row[t.VALUE_CODE], float_of(job[t.SHARE]), job[t.WORDS] + 4 * row[t.VALUES]
    for at in range(job[t.FIRST], job[t.LAST]):
        coefs = floats_at(coefs_at(row, job, at), row[t.NUMEL])
        taken = take(row, job, at, coefs)
        if is_nonfinite(taken):
            job[t.FAILED] = at
            return _STATE
        entry = entries_before(row, job, 0, at)
        if code == _FP32:
            put_fp32(floats_at(values + 4 * entry, taken.size), taken, share)
        else:
            put_halves(halves_at(values + 2 * entry, taken.size), taken, share, code)
        put_back(row, job, at, coefs, taken)
    return 0


@compiled
def put_fp32(sent: Floats, taken: Floats, share: Float) -> None:
    for entry in range(taken.size):
        sent[entry] = taken[entry]
        taken[entry] = rest_of(taken[entry], taken[entry], share)


@compiled
def put_halves(halves: Halves, taken: Floats, share: Float, code: Int) -> None:
    for entry in range(taken.size):
        word = to_bits(taken[entry])
        sign, magnitude = (word >> 16) & 0x8000, word & _MAGNITUDE
        if code == _BF16:
            half = sign | saturated_bf16(magnitude)
            sent = from_bits(half << 16)
        else:
            half = sign | min(fp16_bits(magnitude), _LARGEST_FP16)
            sent = fp16_value(half)
        halves[entry] = half
        taken[entry] = rest_of(taken[entry], sent, share)


@kept
def put_scaled(row: Longs, job: Longs) -> Int:
    """Do what :func:`put_floats` does, by codes that have scales."""
    words, code, share = words_of(job), row[t.VALUE_CODE], float_of(job[t.SHARE])
    halves, octets = words.view(np.uint16), words.view(np.int8)
    for at in range(job[t.FIRST], job[t.LAST]):
        coefs = floats_at(coefs_at(row, job, at), row[t.NUMEL])
        taken = take(row, job, at, coefs)
        if is_nonfinite(taken):
            job[t.FAILED] = at
            return _STATE
        entry, scale = entries_before(row, job, 0, at), 2 * row[t.SCALES] + at
        if code == _INT8:
            put_int8(octets[4 * row[t.VALUES] + entry :], halves, scale, taken, share)
        elif code == _SIGN:
            put_sign(words, 32 * row[t.VALUES] + entry, halves, scale, taken, share)
        elif code == _SIGN2:
            put_sign2(words, 32 * row[t.VALUES] + _SIGN2_BITS * entry, halves, scale + at, taken, share)
        put_back(row, job, at, coefs, taken)
    return 0


@compiled
def put_scale(scales: Halves, place: Int, code: Int) -> Float:
    """Write a bfloat16 scale; return it as the receiver will read it."""
    scales[place] = code
    return from_bits(code << 16)


@compiled
def put_int8(levels: Bytes, scales: Halves, place: Int, taken: Floats, share: Float) -> None:
    largest = _ZERO
    for entry in range(taken.size):
        largest = max(largest, abs(taken[entry]))
    scale = put_scale(scales, place, bf16_up(to_bits(largest / np.float32(127.0))))
    for entry in range(taken.size):
        level = np.int8(np.rint(taken[entry] / scale)) if scale != _ZERO else np.int8(0)
        levels[entry] = level
        taken[entry] = rest_of(taken[entry], np.float32(level) * scale, share)


@compiled
def put_sign(words: FullWords, position: Int, scales: Halves, place: Int, taken: Floats, share: Float) -> None:
    bits, count = taken.view(np.uint32), taken.size
    scale = put_scale(scales, place, saturated_bf16(to_bits(sum_magnitudes(taken) / np.float32(max(count, 1)))))
    for begin in range(0, count, 32):
        width, signs = min(32, count - begin), np.uint32(0)
        for entry in range(width):
            signs |= (bits[begin + entry] >> np.uint32(31)) << np.uint32(entry)
        put_window(words, position + begin, np.uint64(signs), width)
    for entry in range(count):
        sent = -scale if bits[entry] >> np.uint32(31) else scale
        taken[entry] = rest_of(taken[entry], sent, share)


@compiled
def put_sign2(words: FullWords, position: Int, scales: Halves, place: Int, taken: Floats, share: Float) -> None:
    if taken.size == 0:
        return
    least, largest = np.int64(_MAGNITUDE), np.int64(0)
    for entry in range(taken.size):
        magnitude = to_bits(taken[entry]) & _MAGNITUDE
        least, largest = min(least, magnitude), max(largest, magnitude)
    base = put_scale(scales, place, least >> 16)
    step = put_scale(scales, place + 1, bf16_up(to_bits((from_bits(largest) - base) / np.float32(3.0))))
    at_once = 21
    for begin in range(0, taken.size, at_once):
        many, window = min(at_once, taken.size - begin), np.uint64(0)
        for entry in range(many):
            value = taken[begin + entry]
            negative = to_bits(value) >> 31
            level = np.rint((abs(value) - base) / step) if step > 0 else _ZERO
            window |= np.uint64(negative | (np.int64(level) << 1)) << np.uint64(_SIGN2_BITS * entry)
            sent = base + level * step
            taken[begin + entry] = rest_of(value, -sent if negative else sent, share)
        put_window(words, position + _SIGN2_BITS * begin, window, _SIGN2_BITS * many)


@compiled
def scale_at(halves: Halves, place: Int) -> Float:
    return from_bits(np.int64(halves[place]) << 16)


@kept
def get_values(row: Longs, job: Longs) -> Int:
    """Fill in the values that all senders sent of chunks."""
    for sender in range(job[t.SENDERS]):
        # Where lengths vary, payloads of each sender are at other places.
        own, start = sender * job[t.ROW_PITCH], start_of(job, sender)
        values, scales = start + row[own + t.VALUES], start + row[own + t.SCALES]
        for at in range(job[t.FIRST], job[t.LAST]):
            entry, sent = entries_before(row, job, sender, at), sent_of(row, job, sender, at)
            if row[t.VALUE_CODE] <= _FP16:
                get_floats(job[t.WORDS] + 4 * values, row[t.VALUE_CODE], entry, sent)
            else:
                get_scaled(words_of(job), row[t.VALUE_CODE], values, entry, scales, at, sent)
    return 0


@compiled
def get_floats(values: Int, code: Int, entry: Int, sent: Floats) -> None:
    if code == _FP32:
        full = floats_at(values + 4 * entry, sent.size)
        for i in range(sent.size):
            sent[i] = full[i]
        return
    half = halves_at(values + 2 * entry, sent.size)
    if code == _BF16:
        for i in range(sent.size):
            sent[i] = np.uint32(np.uint32(half[i]) << np.uint32(16)).view(np.float32)
    else:
        for i in range(sent.size):
            sent[i] = fp16_value(np.int64(half[i]))


@compiled
def get_scaled(words: FullWords, code: Int, values: Int, entry: Int, scales: Int, chunk: Int, sent: Floats) -> None:
    halves, scale = words.view(np.uint16), 2 * scales + chunk
    if code == _INT8:
        levels, factor = words.view(np.int8), scale_at(halves, scale)
        for i in range(sent.size):
            sent[i] = np.float32(levels[4 * values + entry + i]) * factor
    elif code == _SIGN:
        get_signs(words, 32 * values + entry, scale_at(halves, scale), sent)
    elif code == _SIGN2:
        base, step = scale_at(halves, scale + chunk), scale_at(halves, scale + chunk + 1)
        get_levels(words, 32 * values + _SIGN2_BITS * entry, base, step, sent)


@compiled
def get_signs(words: FullWords, position: Int, scale: Float, sent: Floats) -> None:
    for begin in range(0, sent.size, 32):
        width = min(32, sent.size - begin)
        signs = np.int64(get_window(words, position + begin, width))
        for entry in range(width):
            sent[begin + entry] = -scale if (signs >> entry) & 1 else scale


@compiled
def get_levels(words: FullWords, position: Int, base: Float, step: Float, sent: Floats) -> None:
    at_once = 21
    for begin in range(0, sent.size, at_once):
        many = min(at_once, sent.size - begin)
        window = np.int64(get_window(words, position + _SIGN2_BITS * begin, _SIGN2_BITS * many))
        for entry in range(many):
            code = (window >> (_SIGN2_BITS * entry)) & 7
            magnitude = base + np.float32(code >> 1) * step
            sent[begin + entry] = -magnitude if code & 1 else magnitude


@kept
def check_values(row: Longs, job: Longs) -> Int:
    """Check that the scales and values of all chunks of one sender's tensor are finite."""
    words, wrong = words_of(job), np.int32(0)
    halves, code, begin = words.view(np.uint16), row[t.VALUE_CODE], 2 * (start_of(job, 0) + row[t.SCALES])
    scales = _SCALES[code] * row[t.CHUNKS]
    for place in range(begin, begin + scales):
        wrong |= np.int32(halves[place] >= _SCALE_INFINITY)
    if wrong:
        return _SCALE
    values, entries = start_of(job, 0) + row[t.VALUES], entries_before(row, job, 0, row[t.CHUNKS])
    if code == _FP32:
        full, infinite = words[values : values + entries], np.uint32(_MASKS[code])
        for entry in range(full.size):
            wrong |= np.int32((full[entry] & infinite) == infinite)
    elif _MASKS[code]:
        half, infinite_half = halves[2 * values : 2 * values + entries], np.uint16(_MASKS[code])
        for entry in range(half.size):
            wrong |= np.int32((half[entry] & infinite_half) == infinite_half)
    return _VALUE if wrong else 0
