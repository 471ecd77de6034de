"""How work is shared out among blocks and threads: the shape of a launch, and transforms in steps done at once."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcomm.kernels.butterflies import ADD_SCALED, SCALE, Program, plan_dct, plan_inverse_dct
from flexcomm.kernels.layout import WORD_NBYTES
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


class LaunchConfig(NamedTuple):
    """How many blocks of how many threads, the memory they need, and the fields of a job that say where it is."""

    grid: int
    threads: int
    shared_nbytes: int
    workspace_words: int = 0
    fields: dict[str, int] = {}  # noqa: RUF012  (never changed)


def plan_item_launch(items: int, threads: int, shared_nbytes: int = WORD_NBYTES) -> LaunchConfig:
    """Share out items that have nothing to do with each other; by default, a block has one word to add up in."""
    return LaunchConfig(min(-(-items // (threads * _ELEMENTS_PER_THREAD)), _ITEM_BLOCKS), threads, shared_nbytes)


@lru_cache(maxsize=256)
def plan_chunk_launch(plan: TensorPlan, most_threads: int, most_shared_nbytes: int) -> LaunchConfig:
    # Of short chunks of one row, a block works on as many side by side as fit the usual memory: alone, such a chunk
    # would leave most threads of a block waiting for each other.
    group = 1 if plan.chunk_rows > 1 or plan.chunk_numel > _SHORT else min(_WIDEST_GROUP, most_threads)
    fields = _plan_areas(plan, group)
    while group > 1 and fields["block_words"] * WORD_NBYTES > _USUAL_SHARED_NBYTES * 3 // 4:
        group //= 2
        fields = _plan_areas(plan, group)
    # One thread may do a whole chunk, so there are at least as many threads as chunks side by side.
    wanted = max(32, group, -(-group * plan.chunk_numel // (32 * _ELEMENTS_PER_THREAD)) * 32)
    threads = min(most_threads, wanted)
    grid = min(-(-plan.chunks // group), _LARGEST_GRID)
    counters, words = 3 + 2 * threads, fields["block_words"]
    if (words + counters) * WORD_NBYTES <= most_shared_nbytes:
        return LaunchConfig(grid, threads, (words + counters) * WORD_NBYTES, 0, fields)
    grid = min(grid, _WORKSPACE_BLOCKS, max(1, _WORKSPACE_WORDS // words))
    return LaunchConfig(grid, threads, counters * WORD_NBYTES, grid * words, fields)


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


@cache
def load_program(length: int, device: torch.device, *, inverse: bool) -> tuple[Tensor, list[int]]:
    """Put a transform's lists into a device's memory; return that memory and the fields of a ``Transform``.

    They stay there for good: a kernel may be reading them on any stream.
    """
    program = plan_inverse_dct(length) if inverse else plan_dct(length)
    order, bounds = plan_levels(program)
    steps = np.zeros((len(order), 8), np.int32)
    steps[:, :3] = program.steps[order]
    steps[:, 4:] = program.factors[order].view(np.int32)
    lists = [program.inputs, program.outputs, bounds]
    # The steps come first: the kernel reads them aligned.
    memory = torch.from_numpy(np.concatenate([steps.reshape(-1), *lists])).to(device)
    begins = np.cumsum([steps.size, *(part.size for part in lists)]) * WORD_NBYTES + memory.data_ptr()
    return memory, [program.height, len(bounds) - 1, *begins[:-1].tolist(), memory.data_ptr()]


def plan_levels(program: Program) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the order of steps by level, and where in it each level begins and the last one ends.

    No step of a level writes what another of them reads or writes, so all can be done at once, with the same bits.
    A transform of 64 rows has 270 steps but 9 levels.
    """
    last_write, last_use = [0] * program.height, [0] * program.height
    levels = []
    for code, i, j in program.steps.tolist():
        written, read = rows_of_step(code, i, j)
        level = 1 + max([last_use[row] for row in written] + [last_write[row] for row in read])
        for row in written:
            last_write[row] = last_use[row] = level
        for row in read:
            last_use[row] = max(last_use[row], level)
        levels.append(level)
    order = np.argsort(levels, kind="stable").astype(np.int64)
    bounds = np.searchsorted(np.sort(levels), np.arange(1, max(levels, default=0) + 2))
    return order, bounds.astype(np.int32)


def rows_of_step(code: int, i: int, j: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which rows a step writes, and which it only reads."""
    if code == SCALE:
        return (i,), ()
    return ((i,), (j,)) if code == ADD_SCALED else ((i, j), ())
