"""Value codes: a loop writes what was picked of chunks and leaves what was not sent of it, another one reads it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flexcomm.kernels.base import Problem
from flexcomm.kernels.cpu import tables as t
from flexcomm.kernels.cpu.bits import (
    bf16_up,
    bf16_value,
    fp16_bits,
    fp16_value,
    from_bits,
    get_window,
    put_window,
    saturated_bf16,
    sum_magnitudes,
    to_bits,
)
from flexcomm.kernels.cpu.compiler import Float, Floats, Int, Longs, cached_kernel, compiled
from flexcomm.kernels.cpu.instructions import bytes_at, floats_at, halves_at, ints_at, words_at
from flexcomm.kernels.cpu.tables import coefs_at, entries_before, entries_in, float_of, picks_of, sent_of, start_of
from flexcomm.kernels.plan import ValueCode

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = np.int32(0x7F800000)
_LARGEST_BF16, _LARGEST_FP16 = 0x7F7F, 0x7BFF
_SCALE_INFINITY = 0x7F80
_ZERO = np.float32(0.0)
_STATE, _SCALE, _VALUE = int(Problem.STATE), int(Problem.SCALE), int(Problem.VALUE)
_SIGN2_BITS = 3
_SIGN2_AT_ONCE = 21


@compiled
def rest_of(picked: Float, sent: Float, stays: Float) -> Float:
    """Return what is left of a coefficient: what was not sent of it, and so much of what was."""
    unsent = picked - sent
    return unsent if stays == _ZERO else unsent + stays * (picked - unsent)


@compiled
def values_at(row: Longs, job: Longs, sender: Int, chunk: Int, width: Int) -> Int:
    """Return the bit of the buffers at which the values of a chunk begin, so many bits each."""
    # Where lengths vary, payloads of each sender are at other places.
    section = start_of(job, sender) + row[sender * job[t.ROW_PITCH] + t.VALUES]
    return 32 * section + width * entries_before(row, job, sender, chunk) + chunk * row[t.VALUE_PADDING]


@compiled
def scales_at(row: Longs, job: Longs, sender: Int, chunk: Int, count: Int) -> Int:
    """Return the address of the scales of a chunk, so many for each."""
    section = start_of(job, sender) + row[sender * job[t.ROW_PITCH] + t.SCALES]
    return job[t.WORDS] + 4 * section + 2 * count * chunk


@compiled
def take(row: Longs, job: Longs, chunk: Int, many: Int) -> Int:
    """Return the address of what is picked of some chunks: scratch memory, or where it is, if everything is sent."""
    if row[t.EVERYTHING]:
        return coefs_at(row, job, chunk)
    taken, begin = floats_at(job[t.TILES]), 0
    for at in range(chunk, chunk + many):
        coefs, picks, count = floats_at(coefs_at(row, job, at)), picks_of(row, job, 0, at), entries_in(row, job, 0, at)
        for entry in range(count):
            taken[begin + entry] = coefs[picks[entry]]
        begin += count
    return job[t.TILES]


@compiled
def put_back(row: Longs, job: Longs, chunk: Int, many: Int) -> None:
    """Put what was not sent where it was picked."""
    taken, begin = floats_at(job[t.TILES]), 0
    for at in range(chunk, chunk + many):
        coefs, picks, count = floats_at(coefs_at(row, job, at)), picks_of(row, job, 0, at), entries_in(row, job, 0, at)
        for entry in range(count):
            coefs[picks[entry]] = taken[begin + entry]
        begin += count


@compiled
def is_nonfinite(address: Int, count: Int) -> Int:
    bits, top = ints_at(address), np.int32(0)
    for entry in range(count):
        size = np.int32(bits[entry] & np.int32(_MAGNITUDE))
        top = size if size > top else top
    return top >= _INFINITY


@compiled
def together(row: Longs, job: Longs) -> Int:
    """Return how many chunks are written and read like one: all, if nothing is between their values."""
    return max(job[t.LAST] - job[t.FIRST], 1) if row[t.SCALES] == row[t.VALUES] and row[t.VALUE_PADDING] == 0 else 1


# --- floats -----------------------------------------------------------------------------------------------------------


@compiled
def put_fp32(row: Longs, job: Longs, chunk: Int, address: Int, count: Int) -> None:
    taken, stays = floats_at(address), float_of(job[t.STAYS])
    sent = floats_at(job[t.WORDS] + (values_at(row, job, 0, chunk, 32) >> 3))
    for entry in range(count):
        sent[entry] = taken[entry]
        taken[entry] = rest_of(taken[entry], taken[entry], stays)


@compiled
def put_bf16(row: Longs, job: Longs, chunk: Int, address: Int, count: Int) -> None:
    taken, bits, stays = floats_at(address), words_at(address), float_of(job[t.STAYS])
    halves = halves_at(job[t.WORDS] + (values_at(row, job, 0, chunk, 16) >> 3))
    # In 32 bits throughout, so that it fits into vectors; and in two loops, because halves might be elsewhere in them.
    for entry in range(count):
        magnitude = np.uint32(bits[entry] & np.uint32(_MAGNITUDE))
        code = np.uint32(np.uint32(magnitude + np.uint32(0x7FFF)) + ((magnitude >> np.uint32(16)) & np.uint32(1)))
        code = min(np.uint32(code >> np.uint32(16)), np.uint32(_LARGEST_BF16))
        halves[entry] = np.uint16(code | ((bits[entry] >> np.uint32(16)) & np.uint32(0x8000)))
    for entry in range(count):
        taken[entry] = rest_of(taken[entry], bf16_value(halves[entry]), stays)


@compiled
def put_fp16(row: Longs, job: Longs, chunk: Int, address: Int, count: Int) -> None:
    taken, stays = floats_at(address), float_of(job[t.STAYS])
    halves = halves_at(job[t.WORDS] + (values_at(row, job, 0, chunk, 16) >> 3))
    for entry in range(count):
        word = to_bits(taken[entry])
        half = ((word >> 16) & 0x8000) | min(np.int64(fp16_bits(np.uint32(word & _MAGNITUDE))), _LARGEST_FP16)
        halves[entry] = half
        taken[entry] = rest_of(taken[entry], fp16_value(half), stays)


@compiled
def get_fp32(row: Longs, job: Longs, sender: Int, chunk: Int, sent: Floats, count: Int) -> None:
    full = floats_at(job[t.WORDS] + (values_at(row, job, sender, chunk, 32) >> 3))
    for i in range(count):
        sent[i] = full[i]


@compiled
def get_bf16(row: Longs, job: Longs, sender: Int, chunk: Int, sent: Floats, count: Int) -> None:
    halves = halves_at(job[t.WORDS] + (values_at(row, job, sender, chunk, 16) >> 3))
    for i in range(count):
        sent[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16)).view(np.float32)


@compiled
def get_fp16(row: Longs, job: Longs, sender: Int, chunk: Int, sent: Floats, count: Int) -> None:
    halves = halves_at(job[t.WORDS] + (values_at(row, job, sender, chunk, 16) >> 3))
    for i in range(count):
        sent[i] = fp16_value(np.int64(halves[i]))


# --- codes with scales ------------------------------------------------------------------------------------------------


@compiled
def put_scale(address: Int, code: Int) -> Float:
    """Write a bfloat16 scale; return it as the receiver will read it."""
    halves_at(address)[0] = code
    return from_bits(code << 16)


@compiled
def scale_at(address: Int) -> Float:
    return from_bits(np.int64(halves_at(address)[0]) << 16)


@compiled
def put_int8(row: Longs, job: Longs, chunk: Int, address: Int, count: Int) -> None:
    taken, stays, largest = floats_at(address), float_of(job[t.STAYS]), _ZERO
    levels = bytes_at(job[t.WORDS] + (values_at(row, job, 0, chunk, 8) >> 3))
    for entry in range(count):
        largest = max(largest, abs(taken[entry]))
    scale = put_scale(scales_at(row, job, 0, chunk, 1), bf16_up(to_bits(largest / np.float32(127.0))))
    for entry in range(count):
        level = np.int8(np.rint(taken[entry] / scale)) if scale != _ZERO else np.int8(0)
        levels[entry] = level
        taken[entry] = rest_of(taken[entry], np.float32(level) * scale, stays)


@compiled
def put_sign(row: Longs, job: Longs, chunk: Int, address: Int, count: Int) -> None:
    words, position, stays = words_at(job[t.WORDS]), values_at(row, job, 0, chunk, 1), float_of(job[t.STAYS])
    taken, bits = floats_at(address), words_at(address)
    mean = sum_magnitudes(taken, count, floats_at(job[t.MEMORY])) / np.float32(max(count, 1))
    scale = put_scale(scales_at(row, job, 0, chunk, 1), saturated_bf16(to_bits(mean)))
    for begin in range(0, count, 32):
        width, signs = min(32, count - begin), np.uint32(0)
        for entry in range(width):
            signs |= (bits[begin + entry] >> np.uint32(31)) << np.uint32(entry)
        put_window(words, position + begin, np.uint64(signs), width)
    for entry in range(count):
        sent = -scale if bits[entry] >> np.uint32(31) else scale
        taken[entry] = rest_of(taken[entry], sent, stays)


@compiled
def put_sign2(row: Longs, job: Longs, chunk: Int, address: Int, count: Int) -> None:
    if count == 0:
        return
    words, position = words_at(job[t.WORDS]), values_at(row, job, 0, chunk, _SIGN2_BITS)
    taken, stays, scales = floats_at(address), float_of(job[t.STAYS]), scales_at(row, job, 0, chunk, 2)
    least, largest = np.int64(_MAGNITUDE), np.int64(0)
    for entry in range(count):
        magnitude = to_bits(taken[entry]) & _MAGNITUDE
        least, largest = min(least, magnitude), max(largest, magnitude)
    base = put_scale(scales, least >> 16)
    step = put_scale(scales + 2, bf16_up(to_bits((from_bits(largest) - base) / np.float32(3.0))))
    for begin in range(0, count, _SIGN2_AT_ONCE):
        many, window = min(_SIGN2_AT_ONCE, count - begin), np.uint64(0)
        for entry in range(many):
            value = taken[begin + entry]
            negative = to_bits(value) >> 31
            level = np.rint((abs(value) - base) / step) if step > 0 else _ZERO
            window |= np.uint64(negative | (np.int64(level) << 1)) << np.uint64(_SIGN2_BITS * entry)
            sent = base + level * step
            taken[begin + entry] = rest_of(value, -sent if negative else sent, stays)
        put_window(words, position + _SIGN2_BITS * begin, window, _SIGN2_BITS * many)


@compiled
def get_int8(row: Longs, job: Longs, sender: Int, chunk: Int, sent: Floats, count: Int) -> None:
    levels = bytes_at(job[t.WORDS] + (values_at(row, job, sender, chunk, 8) >> 3))
    scale = scale_at(scales_at(row, job, sender, chunk, 1))
    for i in range(count):
        sent[i] = np.float32(levels[i]) * scale


@compiled
def get_sign(row: Longs, job: Longs, sender: Int, chunk: Int, sent: Floats, count: Int) -> None:
    words, position = words_at(job[t.WORDS]), values_at(row, job, sender, chunk, 1)
    scale = scale_at(scales_at(row, job, sender, chunk, 1))
    for begin in range(0, count, 32):
        width = min(32, count - begin)
        signs = np.int64(get_window(words, position + begin, width))
        for entry in range(width):
            sent[begin + entry] = -scale if (signs >> entry) & 1 else scale


@compiled
def get_sign2(row: Longs, job: Longs, sender: Int, chunk: Int, sent: Floats, count: Int) -> None:
    words, position = words_at(job[t.WORDS]), values_at(row, job, sender, chunk, _SIGN2_BITS)
    scales = scales_at(row, job, sender, chunk, 2)
    base, step = scale_at(scales), scale_at(scales + 2)
    for begin in range(0, count, _SIGN2_AT_ONCE):
        many = min(_SIGN2_AT_ONCE, count - begin)
        window = np.int64(get_window(words, position + _SIGN2_BITS * begin, _SIGN2_BITS * many))
        for entry in range(many):
            code = (window >> (_SIGN2_BITS * entry)) & 7
            magnitude = base + np.float32(code >> 1) * step
            sent[begin + entry] = -magnitude if code & 1 else magnitude


# --- the loops --------------------------------------------------------------------------------------------------------


def _loops(put: Callable[..., None], get: Callable[..., None]) -> tuple[Callable[..., Int], Callable[..., Int]]:
    """Return the loops that write and read chunks by a code; each is compiled when it is used first.

    They call the code's functions by name: code that is handed on as an argument holds addresses of this process, and
    would be compiled again in every other.
    """

    def put_chunks(row: Longs, job: Longs) -> Int:
        many = together(row, job)
        for at in range(job[t.FIRST], job[t.LAST], many):
            count = entries_before(row, job, 0, at + many) - entries_before(row, job, 0, at)
            taken = take(row, job, at, many)
            if is_nonfinite(taken, count):
                job[t.FAILED] = at
                return _STATE
            put(row, job, at, taken, count)
            if not row[t.EVERYTHING]:
                put_back(row, job, at, many)
        return 0

    def get_chunks(row: Longs, job: Longs) -> Int:
        many = together(row, job)
        for sender in range(job[t.SENDERS]):
            for at in range(job[t.FIRST], job[t.LAST], many):
                count = entries_before(row, job, sender, at + many) - entries_before(row, job, sender, at)
                get(row, job, sender, at, sent_of(row, job, sender, at), count)
        return 0

    for loop, code in ((put_chunks, put), (get_chunks, get)):
        loop.__name__ = loop.__qualname__ = f"{code.__name__}_chunks"
    return cached_kernel(put_chunks), cached_kernel(get_chunks)


CODES = {
    ValueCode.FP32: _loops(put_fp32, get_fp32),
    ValueCode.BF16: _loops(put_bf16, get_bf16),
    ValueCode.FP16: _loops(put_fp16, get_fp16),
    ValueCode.INT8: _loops(put_int8, get_int8),
    ValueCode.SIGN: _loops(put_sign, get_sign),
    ValueCode.SIGN2: _loops(put_sign2, get_sign2),
}
"""The loops by code: what writes, and what reads. Plans with other codes are refused before."""
_SCALES = tuple(code.format.scales for code in CODES)
_MASKS = tuple(code.format.nonfinite_mask for code in CODES)


@cached_kernel
def check_values(row: Longs, job: Longs) -> Int:
    """Check that the scales and values of all chunks of one sender's tensor are finite."""
    code, wrong = row[t.VALUE_CODE], np.int32(0)
    scales, count = halves_at(scales_at(row, job, 0, 0, 1)), _SCALES[code] * row[t.CHUNKS]
    for place in range(count):
        wrong |= np.int32(scales[place] >= _SCALE_INFINITY)
    if wrong:
        return _SCALE
    section = job[t.WORDS] + 4 * (start_of(job, 0) + row[t.VALUES])
    entries, full = entries_before(row, job, 0, row[t.CHUNKS]), words_at(section)
    if code == 0:
        for entry in range(entries):
            wrong |= np.int32((full[entry] & np.uint32(_MASKS[0])) == np.uint32(_MASKS[0]))
    elif _MASKS[code]:
        mask, padding = np.uint16(_MASKS[code]), row[t.VALUE_PADDING] // 16
        # What is between chunks is nobody's.
        parts, length = (row[t.CHUNKS], row[t.K]) if padding else (1, entries)
        for part in range(parts):
            halves = halves_at(section + 2 * part * (length + padding))
            for entry in range(length):
                wrong |= np.int32((halves[entry] & mask) == mask)
    return _VALUE if wrong else 0
