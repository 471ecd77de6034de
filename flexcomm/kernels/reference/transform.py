"""From elements to coefficients, and back."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexcomm.kernels.base import StateUpdate
from flexcomm.kernels.butterflies import ADD_SCALED, BUTTERFLY, ROTATE, Program, plan_dct, plan_inverse_dct, plan_levels
from flexcomm.kernels.plan import TensorPlan

PLAIN = StateUpdate()


def rounded(value: float) -> float:
    """Return the nearest float32, so that a product with it is one of float32 wherever it is computed."""
    return float(torch.tensor(value, dtype=torch.float32))


def accumulate(x: Tensor, plan: TensorPlan, state: Tensor | None = None, update: StateUpdate = PLAIN) -> Tensor:
    """Return ``decay * state + gain * coefficients`` of ``x``, as ``[chunks, chunk_numel]``."""
    coefficients = _transform(x, plan) * rounded(plan.scale(update.gain))
    return coefficients if state is None else rounded(update.decay) * state + coefficients


def restore(coefficients: Tensor, plan: TensorPlan) -> Tensor:
    """Return the matrix ``[rows, cols]`` whose coefficients these are."""
    height, width = plan.chunk_rows, plan.chunk_cols
    if plan.transformed:
        turned = apply(plan_inverse_dct(width), coefficients.view(plan.chunks, width, height))
        chunks = apply(plan_inverse_dct(height), turned.transpose(1, 2))
    else:
        chunks = coefficients.view(plan.chunks, height, width)
    chunks = chunks * rounded(plan.scale(1.0))
    blocks = chunks.reshape(plan.grid_rows, plan.grid_cols, height, width).transpose(1, 2)
    return blocks.reshape(plan.grid_rows * height, plan.grid_cols * width)[: plan.rows, : plan.cols]


def apply(program: Program, chunks: Tensor) -> Tensor:
    """Do the program's steps on the rows of every chunk ``[chunks, rows, lanes]``."""
    work = chunks.new_zeros(program.height, chunks.shape[0], chunks.shape[2])
    work[program.inputs.tolist()] = chunks.transpose(0, 1)
    for code, i, j, c0, c1 in _batches(program):
        a, b = work[i], work[j]
        if code == BUTTERFLY:
            work[i], work[j] = a + b, a - b
        elif code == ROTATE:
            a = add_product(a, c0, b)
            b = add_product(b, c1, a)
            work[i], work[j] = add_product(a, c0, b), b
        elif code == ADD_SCALED:
            work[i] = add_product(a, c0, b)
        else:
            work[i] = c0.to(torch.float32) * a
    return work[program.outputs.tolist()].transpose(0, 1)


def add_product(x: Tensor, factor: Tensor, y: Tensor) -> Tensor:
    """Return ``x + factor * y`` of float32, rounded once; ``factor`` is one of float32, held in float64.

    The product is exact in float64. Their sum is rounded to odd there: then rounding it again, to float32, gives what
    rounding the exact sum would (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008).
    """
    addend, product = x.double(), factor * y.double()
    total = addend + product
    kept = total - product
    lost = (addend - kept) + (product - (total - kept))
    bits = total.view(torch.int64)
    is_rounded_to_even = (lost.abs() > 0) & (bits & 1 == 0)
    away_from_zero = torch.where((lost > 0) == (total > 0), 1, -1)
    return torch.where(is_rounded_to_even, bits + away_from_zero, bits).view(torch.float64).to(torch.float32)


class _Batch(NamedTuple):
    """Steps of one kind that can be done at once: their rows, and their factors as columns of float64."""

    code: int
    i: list[int]
    j: list[int]
    c0: Tensor
    c1: Tensor


@lru_cache(maxsize=64)
def _batches(program: Program) -> list[_Batch]:
    order, bounds = plan_levels(program)
    batches = []
    for level in np.split(order, bounds[1:-1]):
        for code in np.unique(program.steps[level, 0]):
            own = level[program.steps[level, 0] == code]
            factors = torch.from_numpy(program.factors[own]).double()[:, :, None, None]
            rows = program.steps[own]
            batches.append(_Batch(int(code), rows[:, 1].tolist(), rows[:, 2].tolist(), factors[:, 0], factors[:, 1]))
    return batches


def _transform(x: Tensor, plan: TensorPlan) -> Tensor:
    """Return the elements in chunks ``[chunks, chunk_numel]``; of transformed ones, coefficients not yet scaled.

    A transformed chunk is kept turned: frequency along a row first, then down a column.
    """
    matrix = x.detach().reshape(plan.rows, plan.cols).to(torch.float32)
    height, width = plan.chunk_rows, plan.chunk_cols
    padding = (0, -plan.cols % width, 0, -plan.rows % height)
    blocks = torch.nn.functional.pad(matrix, padding).view(plan.grid_rows, height, plan.grid_cols, width)
    chunks = blocks.transpose(1, 2).reshape(plan.chunks, height, width)
    if plan.transformed:
        chunks = apply(plan_dct(height), chunks).transpose(1, 2)
        chunks = apply(plan_dct(width), chunks)
    return chunks.reshape(plan.state_shape)
