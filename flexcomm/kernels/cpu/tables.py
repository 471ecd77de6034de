"""What the loops are given: the numbers of a tensor, and those of a job, addresses included.

A loop is a loop over chunks FIRST to LAST of one tensor. Its arguments are two pointers to plain numbers, so that all
loops have one signature, and :func:`run_loops` goes through the blocks of a bucket without Python. Memory is reached by
address: numba compiles a pointer in a fraction of the time that it takes for an array.
"""

from __future__ import annotations

import numpy as np
import torch

from flexcomm.kernels.cpu.compiler import Float, Floats, Int, Ints, Longs, cached_kernel, compiled
from flexcomm.kernels.cpu.instructions import call_loop, floats_at, ints_at, longs_at

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Those that loops read and write; others are converted before and after."""

TENSOR_COLUMNS = 37
(
    X, DTYPE, STATE, STATE_OUT, FACTOR, KEY, START,
    CHUNKS, ROWS, COLS, CHUNK_ROWS, CHUNK_COLS, GRID_COLS, NUMEL, K, FIRST_ENTRY, TAU_BITS,
    CODE, LOW_BITS, ENTRY_BITS, CHUNK_BITS, VALUE_PADDING, INDICES, SCALES, VALUES,
    VALUE_CODE, EVERYTHING, BINS, FILLS_BINS,
    DOWN, DOWN_STEPS, DOWN_FACTORS, DOWN_COUNT, ALONG, ALONG_STEPS, ALONG_FACTORS, ALONG_COUNT,
) = range(TENSOR_COLUMNS)  # fmt: skip
CHANGING = slice(X, START + 1)
"""The columns of a table of tensors, and those of them that change from call to call.

These are addresses of tensor and states, the number of its dtype in DTYPES, the factor of coefficients as the bits of
a float32, and the sample key. FIRST_ENTRY counts through the table; INDICES, SCALES and VALUES are the words of a
buffer at which sections begin, VALUE_PADDING the bits behind the values of each chunk. Whether EVERYTHING is sent,
whether the selection FILLS_BINS itself; the rest are the lists of the transform, for columns (DOWN) and rows (ALONG).
"""

JOB_NUMBERS = 39
(
    FIRST, LAST, FAILED, LIMIT, DECAY, STAYS, WORDS, NWORDS,
    SENDERS, STARTS, ROW_PITCH, COUNTED, DIVISOR, EPILOGUE, LR, KEEP,
    COEFS, TILES, TOPS, MEMORY, PICKS, PICK_PITCH, IS_BLOCK, SENT, SENT_PITCH,
    BEFORE, BEFORE_PITCH, BOUND, COUNTS,
    SOURCE, TARGET, TURNED, PITCH, STATE_AT, AHEAD, STATE_AHEAD, MAXIMA, TURNED_ROWS, GROUPS,
) = range(JOB_NUMBERS)  # fmt: skip
"""What a loop is told beside a tensor.

Chunks FIRST to LAST, and where a loop that found a problem stopped (FAILED); bits of the float32 DECAY, of what STAYS
of what is sent, and of LIMIT, which elements must not reach; the buffers (WORDS), and of each of the SENDERS where its
own begins (STARTS) and its row of the table (ROW_PITCH, 0 if all have the same); whether contributors are COUNTED, else
the DIVISOR of sums; the epilogue, and the bits of its LR and KEEP. The rest are addresses, pitches and lengths: COEFS
of a block whose tensor has no state, scratch (TILES, TOPS, MEMORY), PICKS and SENT values by sender, of the block alone
if IS_BLOCK, how many entries are BEFORE each chunk, COUNTS of what reaches a BOUND; from SOURCE on, the arguments of a
codelet: AHEAD and STATE_AHEAD are what it fetches for the next chunk, TURNED_ROWS lists addresses of rows of TURNED.
"""


@cached_kernel
def run_loops(table: Longs, blocks: Longs, job: Longs, loops: Longs) -> Int:
    """Run all loops on each block, ``[tensor, first chunk, last chunk]``; stop at the first problem.

    Returns 0, or ``256 * number of the block + problem``, which the loop found in chunk FAILED.
    """
    pitch = 8 * table.shape[1]
    for number in range(blocks.shape[0]):
        job[FIRST], job[LAST] = blocks[number, 1], blocks[number, 2]
        for loop in range(loops.size):
            problem = call_loop(
                loops[loop], longs_at(table.ctypes.data + pitch * blocks[number, 0]), longs_at(job.ctypes.data)
            )
            if problem:
                return 256 * number + problem
    return 0


@compiled
def float_of(bits: Int) -> Float:
    return np.uint32(bits).view(np.float32)


@compiled
def start_of(job: Longs, sender: Int) -> Int:
    """Return the word at which the buffer of a sender begins."""
    return longs_at(job[STARTS])[sender] if job[STARTS] else 0


@compiled
def coefs_at(row: Longs, job: Longs, chunk: Int) -> Int:
    """Return the address of a chunk's coefficients: in its state or, if it has none, in the memory of a block."""
    if row[STATE_OUT]:
        return row[STATE_OUT] + 4 * chunk * row[NUMEL]
    return job[COEFS] + 4 * (chunk - job[FIRST]) * row[NUMEL]


@compiled
def entries_before(row: Longs, job: Longs, sender: Int, chunk: Int) -> Int:
    """Return how many entries of a tensor precede a chunk: BEFORE says, if their number depends on the data."""
    if job[BEFORE]:
        return longs_at(job[BEFORE])[sender * job[BEFORE_PITCH] + chunk]
    return chunk * row[K]


@compiled
def entries_in(row: Longs, job: Longs, sender: Int, chunk: Int) -> Int:
    """Return how many entries of a chunk a sender sends."""
    return entries_before(row, job, sender, chunk + 1) - entries_before(row, job, sender, chunk)


@compiled
def picks_of(row: Longs, job: Longs, sender: Int, chunk: Int) -> Ints:
    """Return the picks of a chunk; a pitch of 0 says that they are the same for all senders."""
    origin = entries_before(row, job, sender, job[FIRST]) if job[IS_BLOCK] else -row[FIRST_ENTRY]
    return ints_at(job[PICKS] + 4 * (sender * job[PICK_PITCH] + entries_before(row, job, sender, chunk) - origin))


@compiled
def sent_of(row: Longs, job: Longs, sender: Int, chunk: Int) -> Floats:
    """Return the memory of the values that a sender sent of a chunk of this block."""
    entry = entries_before(row, job, sender, chunk) - entries_before(row, job, sender, job[FIRST])
    return floats_at(job[SENT] + 4 * (sender * job[SENT_PITCH] + entry))
