"""Headers: the checksum of a buffer, and whether those of all senders are as expected."""

from __future__ import annotations

import numpy as np

from flexcomm.kernels.cpu.compiler import FullWords, Int, Longs, cached_kernel, compiled
from flexcomm.kernels.cpu.selection import mix32
from flexcomm.kernels.layout import CHECKSUM_WORD, HEADER_NBYTES, HEADER_NWORDS, NONFINITE

_FLAGS_WORD, _ENTRIES_WORD, _LENGTH_WORD = 1, 8, 10
_FLAGS_SHIFT = 16


@compiled
def checksum(words: FullWords) -> Int:
    """Return the sum of all words but the checksum, each hashed with its place: it adds up in any order."""
    total = np.uint32(0)
    for i in range(words.size):
        # A function of 32 bits that is given 64 does not fit into vectors.
        value = mix32(np.uint32(words[i] ^ np.uint32(np.uint32(i) * np.uint32(0x9E3779B9))))
        total = np.uint32(total + (np.uint32(0) if i == CHECKSUM_WORD else value))
    return total


@cached_kernel
def write_header(words: FullWords, header: FullWords) -> None:
    """Write a header, whose checksum is still to be filled in, in front of what is there."""
    for i in range(HEADER_NWORDS):
        words[i] = header[i]
    words[CHECKSUM_WORD] = checksum(words)


@cached_kernel
def check_headers(words: FullWords, regions: Longs, expected: FullWords, variable_count: Int) -> Int:
    """Return 2 * (1 + the first sender whose header is not as expected), or 1 + that for the first with a flag, or 0.

    ``regions`` holds where each sender's buffer begins and its length; the expected header's length is not filled in.
    """
    flagged = 0
    for sender in range(regions.shape[0]):
        own = words[regions[sender, 0] : regions[sender, 0] + regions[sender, 1]]
        flags, wrong = own[_FLAGS_WORD] >> np.uint32(_FLAGS_SHIFT), own[CHECKSUM_WORD] != checksum(own)
        for i in range(HEADER_NWORDS):
            word = expected[i]
            if i == _FLAGS_WORD and flags == NONFINITE:
                word |= np.uint32(NONFINITE << _FLAGS_SHIFT)
            elif i in (_ENTRIES_WORD, _ENTRIES_WORD + 1):
                word = np.uint32(0) if flags == NONFINITE else own[i] if variable_count else word
            elif i in (_LENGTH_WORD, _LENGTH_WORD + 1):
                word = np.uint32((4 * own.size - HEADER_NBYTES) >> (32 * (i - _LENGTH_WORD)))
            elif i == CHECKSUM_WORD:
                word = own[i]
            wrong |= own[i] != word
        if wrong:
            return 2 * (1 + sender)
        if flags == NONFINITE and not flagged:
            flagged = 2 * (1 + sender) + 1
    return flagged
