"""How work is shared out among blocks and threads, and where a block keeps what it works on."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from flexcomm.kernels.butterflies import plan_dct
from flexcomm.kernels.gpu.records import WORD_NBYTES
from flexcomm.kernels.plan import TensorPlan

_SHORT = 128
"""Elements of a one-row chunk up to which a single thread does its selection, and a block does many side by side."""
_WIDEST_GROUP = 64
_ELEMENTS_PER_THREAD = 8
_ITEM_BLOCKS = 1024
_SUM_LANES = 32
_USUAL_SHARED_NBYTES = 48 << 10
"""What a block may have without asking for more; small groups fit several blocks on a multiprocessor."""
_LARGEST_GRID = (1 << 31) - 1
_WORKSPACE_BLOCKS = 256
_WORKSPACE_WORDS = 1 << 26
"""Chunks too large for shared memory are worked on in global memory, so many at a time."""


class Share(NamedTuple):
    """How many blocks of how many threads, the memory they need, and the fields of a job that say where it is."""

    grid: int
    threads: int
    shared_nbytes: int
    workspace_words: int
    fields: dict[str, int]


def plan_item_share(items: int, threads: int) -> Share:
    """Share out items that have nothing to do with each other; a block has one word to add up in."""
    grid = min(-(-items // (threads * _ELEMENTS_PER_THREAD)), _ITEM_BLOCKS)
    return Share(grid, threads, WORD_NBYTES, 0, {})


def plan_sum_share(items: int, threads: int) -> Share:
    """Share out items of which each thread of a block has a float64 to add up."""
    return plan_item_share(items, threads)._replace(shared_nbytes=2 * WORD_NBYTES * threads)


@lru_cache(maxsize=256)
def plan_chunk_share(plan: TensorPlan, most_threads: int, most_shared_nbytes: int) -> Share:
    group = _plan_group(plan, most_threads)
    fields = _plan_areas(plan, group)
    # One thread may do a whole chunk, so there are at least as many threads as chunks side by side.
    wanted = max(32, group, -(-group * plan.chunk_numel // (32 * _ELEMENTS_PER_THREAD)) * 32)
    threads = min(most_threads, wanted)
    grid = min(-(-plan.chunks // group), _LARGEST_GRID)
    counters, words = 3 + 2 * threads, fields["block_words"]
    if (words + counters) * WORD_NBYTES <= most_shared_nbytes:
        return Share(grid, threads, (words + counters) * WORD_NBYTES, 0, fields)
    grid = min(grid, _WORKSPACE_BLOCKS, max(1, _WORKSPACE_WORDS // words))
    return Share(grid, threads, counters * WORD_NBYTES, grid * words, fields)


def _plan_group(plan: TensorPlan, most_threads: int) -> int:
    """Return how many chunks a block works on side by side: of short ones of one row, as many as fit the usual memory.

    Alone, such a chunk would leave most threads of a block waiting for each other.
    """
    group = min(_WIDEST_GROUP, most_threads)
    if plan.chunk_rows > 1 or plan.chunk_numel > _SHORT:
        return 1
    while group > 1 and _plan_areas(plan, group)["block_words"] * WORD_NBYTES > _USUAL_SHARED_NBYTES * 3 // 4:
        group //= 2
    return group


def _plan_areas(plan: TensorPlan, group: int) -> dict[str, int]:
    """Return the fields of a job that say where a block keeps what it works on.

    Rows are an odd number of words apart: then neighbouring threads, whether they go along a row or down a column, ask
    different banks of shared memory.
    """
    numel, pitch = plan.chunk_numel, group | 1
    pitch_down, pitch_along = plan.chunk_cols | 1, pitch if plan.chunk_rows == 1 else plan.chunk_rows | 1
    row, turned = numel * pitch, max(numel, _SUM_LANES) * pitch
    if plan.transformed:
        row = max(row, plan_dct(plan.chunk_rows).height * pitch_down if plan.chunk_rows > 1 else 0)
        turned = max(turned, plan_dct(plan.chunk_cols).height * pitch_along)
    # The upper bits of Elias and Fano's code are fewer than two for each element of a chunk.
    marks = -(-2 * numel // 32) * group
    return {
        "group": group,
        "solo": int(group > 1),
        "pitch": pitch,
        "pitch_down": pitch_down,
        "pitch_along": pitch_along,
        "turned_at": row,
        "marks_at": row + turned,
        "ranks_at": row + turned + marks,
        "block_words": row + turned + 2 * marks,
    }
