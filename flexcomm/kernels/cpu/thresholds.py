"""Thresholds: how many coefficients a variable selection finds, before anything is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flexcomm.kernels.counting import BIN_SHIFT
from flexcomm.kernels.cpu.coefficients import MAGNITUDE, load_rows, make_tiles
from flexcomm.kernels.cpu.compiler import kept
from flexcomm.kernels.cpu.transform import lanes_of

if TYPE_CHECKING:
    from flexcomm.kernels.cpu.compiler import Int, Longs
    from flexcomm.kernels.cpu.records import Job, Source

__all__ = ["count_reaching_in_chunks", "histogram_of_chunks"]


@kept
def count_reaching_in_chunks(first: Int, last: Int, source: Source, job: Job, bound: Int, counts: Longs) -> None:
    """Count the magnitudes of each chunk that reach a bound."""
    tiles, lanes, limit = make_tiles(source, job), lanes_of(job), np.int32(bound)
    for begin in range(first, last, lanes):
        many = min(lanes, last - begin)
        load_rows(begin, many, source, job, tiles)
        for i in range(many):
            bits, count = tiles.coefs[i].view(np.int32), np.int32(0)
            for j in range(bits.size):
                count += np.int32((bits[j] & np.int32(MAGNITUDE)) >= limit)
            counts[begin + i] = count


@kept
def histogram_of_chunks(first: Int, last: Int, source: Source, job: Job, bins: Longs) -> None:
    """Count magnitudes by the upper half of their bits."""
    tiles, lanes = make_tiles(source, job), lanes_of(job)
    for begin in range(first, last, lanes):
        many = min(lanes, last - begin)
        load_rows(begin, many, source, job, tiles)
        bits = tiles.coefs.reshape(-1)[: many * job.chunk_numel].view(np.int32)
        for i in range(bits.size):
            bins[(bits[i] & MAGNITUDE) >> BIN_SHIFT] += 1
