"""From elements to coefficients, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcomm.kernels.base import StateUpdate
from flexcomm.kernels.butterflies import ADD_SCALED, BUTTERFLY, MIX, Program, plan_dct, plan_inverse_dct
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
    for (code, i, j), factors in zip(program.steps.tolist(), program.factors.tolist(), strict=True):
        a, b = work[i].clone(), work[j].clone()
        c0, c1, c2, c3 = factors
        if code == BUTTERFLY:
            work[i], work[j] = a + b, a - b
        elif code == MIX:
            work[i], work[j] = c0 * a + c1 * b, c2 * a + c3 * b
        elif code == ADD_SCALED:
            work[i] = a + c0 * b
        else:
            work[i] = c0 * a
    return work[program.outputs.tolist()].transpose(0, 1)


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
