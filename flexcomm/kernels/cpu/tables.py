"""What the loops are given: one row of numbers for each tensor of a group, addresses included.

A group is the tensors of a bucket that are encoded alike; its chunks are counted through. Plain numbers instead of
records of arrays: numba compiles several times as long for the latter, and unpacks them at every call.
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from flexcomm.kernels.cpu.codelets import pointer_to
from flexcomm.kernels.cpu.compiler import Float, Floats, FullWords, Int, Ints, Longs, compiled

TENSOR = (
    "X", "STATE", "STATE_OUT", "FACTOR", "KEY", "START",
    "FIRST_CHUNK", "CHUNKS", "ROWS", "COLS", "CHUNK_ROWS", "CHUNK_COLS", "GRID_COLS", "NUMEL",
    "FIRST_ENTRY", "K", "INDICES", "SCALES", "VALUES", "LOW_BITS", "ENTRY_BITS", "CHUNK_BITS", "TAU_BITS",
)  # fmt: skip
"""The columns of a table.

The first six change from call to call: addresses of tensor and states, the factor of coefficients as the bits of a
float32, and the sample key. FIRST_CHUNK and FIRST_ENTRY count through the group; INDICES, SCALES and VALUES are the
words of a buffer at which sections begin.
"""
(
    X, STATE, STATE_OUT, FACTOR, KEY, START,
    FIRST_CHUNK, CHUNKS, ROWS, COLS, CHUNK_ROWS, CHUNK_COLS, GRID_COLS, NUMEL,
    FIRST_ENTRY, K, INDICES, SCALES, VALUES, LOW_BITS, ENTRY_BITS, CHUNK_BITS, TAU_BITS,
) = range(len(TENSOR))  # fmt: skip

JOB = (
    "FIRST", "LAST", "LIMIT", "DECAY", "STAYS", "CODE", "VALUE_CODE", "BINS", "FILLS_BINS",
    "SENDERS", "EVERYTHING", "COUNTED", "WORDS", "NWORDS", "BUFFER",
    "COEFS", "TILES", "TOPS", "MEMORY", "PICKS", "PICK_PITCH", "ORIGINS", "PICK_ORIGINS", "SENT", "SENT_PITCH",
    "BEFORE", "BEFORE_PITCH", "DOWN", "DOWN_STEPS", "DOWN_FACTORS", "DOWN_COUNT",
    "ALONG", "ALONG_STEPS", "ALONG_FACTORS", "ALONG_COUNT",
)  # fmt: skip
"""What a loop is told beside a table.

Chunks FIRST to LAST of the group; bits of the float32 DECAY, of STAYS, the share of what is sent that is not taken out,
and of LIMIT, which elements must not reach; codes of indices and values; whether EVERYTHING was sent, and contributors
are COUNTED; the buffers (WORDS, and where the sender's own begins in them, BUFFER). The rest are addresses of memory,
pitches and lengths: COEFS of a block whose tensors have no states, scratch (TILES, TOPS, MEMORY), picks and sent
values, by sender, with the entry they begin with (ORIGINS), how many entries are BEFORE each chunk, and lists.
"""
(
    FIRST, LAST, LIMIT, DECAY, STAYS, CODE, VALUE_CODE, BINS, FILLS_BINS,
    SENDERS, EVERYTHING, COUNTED, WORDS, NWORDS, BUFFER,
    COEFS, TILES, TOPS, MEMORY, PICKS, PICK_PITCH, ORIGINS, PICK_ORIGINS, SENT, SENT_PITCH,
    BEFORE, BEFORE_PITCH, DOWN, DOWN_STEPS, DOWN_FACTORS, DOWN_COUNT,
    ALONG, ALONG_STEPS, ALONG_FACTORS, ALONG_COUNT,
) = range(len(JOB))  # fmt: skip


@compiled
def floats_at(address: Int, numel: Int) -> Floats:
    return carray(pointer_to(address), numel, np.float32)


@compiled
def ints_at(address: Int, numel: Int) -> Ints:
    return carray(pointer_to(address), numel, np.int32)


@compiled
def longs_at(address: Int, numel: Int) -> Longs:
    return carray(pointer_to(address), numel, np.int64)


@compiled
def words_of(job: Longs) -> FullWords:
    return carray(pointer_to(job[WORDS]), job[NWORDS], np.uint32)


@compiled
def float_of(bits: Int) -> Float:
    return np.uint32(bits).view(np.float32)


@compiled
def tensor_of(table: Longs, chunk: Int) -> Int:
    """Return the tensor that a chunk of the group belongs to."""
    number = 0
    while number + 1 < table.shape[0] and chunk >= table[number, FIRST_CHUNK] + table[number, CHUNKS]:
        number += 1
    return number


@compiled
def chunk_span(row: Longs, chunk: Int, last: Int) -> tuple[Int, Int]:
    """Return which chunks of a tensor are meant by those of the group from ``chunk`` on, up to ``last``."""
    return chunk - row[FIRST_CHUNK], min(last - row[FIRST_CHUNK], row[CHUNKS])


@compiled
def coefs_at(row: Longs, job: Longs, chunk: Int) -> Int:
    """Return the address of a chunk's coefficients: in its state or, if it has none, in the memory of a block."""
    if row[STATE_OUT]:
        return row[STATE_OUT] + 4 * chunk * row[NUMEL]
    return job[COEFS] + 4 * (row[FIRST_CHUNK] + chunk - job[FIRST]) * row[NUMEL]


@compiled
def entries_before(row: Longs, job: Longs, sender: Int, chunk: Int) -> Int:
    """Return how many entries of a tensor precede a chunk: BEFORE says, if their number depends on the data."""
    if job[BEFORE]:
        return longs_at(job[BEFORE], (sender + 1) * job[BEFORE_PITCH])[sender * job[BEFORE_PITCH] + chunk]
    return row[FIRST_ENTRY] + chunk * row[K]


@compiled
def picks_of(row: Longs, job: Longs, sender: Int, chunk: Int) -> Ints:
    """Return the picks of a chunk; a pitch of 0 says that they are the same for all senders."""
    origin = longs_at(job[PICK_ORIGINS], sender + 1)[sender]
    begin, end = entries_before(row, job, sender, chunk), entries_before(row, job, sender, chunk + 1)
    return ints_at(job[PICKS] + 4 * (sender * job[PICK_PITCH] + begin - origin), end - begin)


@compiled
def sent_of(row: Longs, job: Longs, sender: Int, chunk: Int) -> Floats:
    """Return the memory of the values that a sender sent of a chunk."""
    origin = longs_at(job[ORIGINS], sender + 1)[sender]
    begin, end = entries_before(row, job, sender, chunk), entries_before(row, job, sender, chunk + 1)
    return floats_at(job[SENT] + 4 * (sender * job[SENT_PITCH] + begin - origin), end - begin)
