"""A transform's program, sorted into levels whose steps can be done at once, in a device's memory."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcomm.kernels.butterflies import ADD_SCALED, SCALE, Program, plan_dct, plan_inverse_dct
from flexcomm.kernels.gpu.records import WORD_NBYTES, Transform


class _Loaded(NamedTuple):
    """A program on a device: where its lists are, and the tensor that keeps them there."""

    addresses: Transform
    memory: Tensor


def load_program(length: int, device: torch.device, *, inverse: bool) -> Transform:
    """Return where a program's lists are in a device's memory; they stay there."""
    return _load(length, device, inverse).addresses


@cache
def _load(length: int, device: torch.device, inverse: bool) -> _Loaded:
    """Put a program's lists into a device's memory, for good: a kernel may be reading them on any stream."""
    program = plan_inverse_dct(length) if inverse else plan_dct(length)
    order, bounds = plan_levels(program)
    steps = np.zeros((len(order), 8), np.int32)
    steps[:, :3] = program.steps[order]
    steps[:, 4:] = program.factors[order].view(np.int32)
    lists = [steps.reshape(-1), program.inputs, program.outputs, bounds]
    memory = torch.from_numpy(np.concatenate(lists)).to(device)
    begins = np.cumsum([0, *(part.size for part in lists)]) * WORD_NBYTES + memory.data_ptr()
    at_steps, at_inputs, at_outputs, at_bounds = begins[:-1].tolist()
    return _Loaded(Transform(program.height, len(bounds) - 1, at_inputs, at_outputs, at_bounds, at_steps), memory)


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
