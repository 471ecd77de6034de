"""Inputs whose average is known beforehand, for any compressor, and the count of wrong elements in a result.

[Note: exact inputs] Every node's average holds, in the compressor's own coordinates and in each chunk, exactly as many
nonzero coefficients as are sent, all of one magnitude, a power of two. Then nothing is left out, every value code is
exact (one magnitude is its own mean and its own maximum), and sums over nodes are small whole numbers. Positions and
magnitudes differ from node to node; the ranks of a node differ by whole numbers that cancel.
"""

import math

import torch
from torch import Tensor

from flexcomm import Topology
from flexcomm.kernels import TensorPlan, ValueCode

_MAGNITUDES = 3


def make_input(plan: TensorPlan, shape: tuple[int, ...], dtype: torch.dtype, topology: Topology) -> Tensor:
    """Return the tensor that this rank passes in."""
    flat = _elements(plan, _coefficients(plan, topology.node)).view(-1)
    across = 2 * topology.local_rank - (topology.local_size - 1)
    flat += across * _at_least(plan.tau) * (torch.arange(flat.numel()) % 5 - 2)
    return flat.view(shape).to(dtype)


def expect_average(plan: TensorPlan, shape: tuple[int, ...], topology: Topology) -> Tensor:
    """Return, in float64, the average over all ranks of what they pass in."""
    total = torch.zeros(plan.chunks, plan.chunk_numel, dtype=torch.float64)
    for node in range(topology.nodes):
        total += _coefficients(plan, node)
    return _elements(plan, total / topology.nodes).view(shape)


def count_wrong(out: Tensor, expected: Tensor, plan: TensorPlan, topology: Topology) -> int:
    """Return how many elements are wrong; they must be exact where arithmetic allows it.

    Of a selection that all ranks share, each element must be the average or zero, and as many as promised the former.
    """
    error = (out.double() - expected).abs()
    # Not `error > tolerance`: NaN is wrong, and compares false with everything.
    good = error <= tolerance(out.dtype, expected, plan, topology)
    if plan.selection.rule.sample_key is None:
        return int((~good).sum())
    sent = int((out != 0).sum())
    return int((~good & (out != 0)).sum()) + abs(sent - plan.chunks * plan.k)


def tolerance(dtype: torch.dtype, expected: Tensor, plan: TensorPlan, topology: Topology) -> float:
    """Return the rounding error an element may have: none for whole numbers over powers of two, untransformed.

    A transform rounds in every step, a scale of 16 bits once, and a third has no end in binary.
    """
    halves = all(count & (count - 1) == 0 for count in (topology.nodes, topology.local_size))
    if halves and not plan.transformed and _can_count(plan.values, topology):
        return 0.0
    coarsest = max(torch.finfo(one).eps for one in (dtype, plan.values.format.sum_dtype or dtype))
    scale = torch.finfo(torch.bfloat16).eps if plan.values.format.scales else 0.0
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return (32 * coarsest + scale) * max(largest, topology.local_size * _at_least(plan.tau))


def _can_count(code: ValueCode, topology: Topology) -> bool:
    """Return whether a value code holds every sum that can come up, on any rank and in any order, without rounding."""
    dtype = code.format.sum_dtype
    if dtype is None:
        return False
    largest: int = 2 ** (_MAGNITUDES - 1) * topology.size + topology.local_size**2
    return largest <= 2 / torch.finfo(dtype).eps


def _coefficients(plan: TensorPlan, node: int) -> Tensor:
    """Return a node's average in the compressor's coordinates, ``[chunks, chunk]``; see [Note: exact inputs]."""
    chunk = torch.arange(plan.chunks).view(-1, 1)
    position = torch.arange(plan.chunk_numel).view(1, -1)
    numel, keep = _density(plan)
    # Evenly spaced: of any `numel` places in a row, `keep` are taken.
    offset = position + chunk * (plan.chunk_numel if plan.variable_count else 7) + 13 * node
    is_sent = offset * keep % numel < keep
    is_negative = (position * 40503 + chunk * 9973 >> 4) & 1
    magnitude = 2.0 ** (node % _MAGNITUDES) * _at_least(plan.tau)
    return torch.where(is_sent & _is_whole(plan).view(-1, 1), magnitude * (1.0 - 2.0 * is_negative), 0.0)


def _is_whole(plan: TensorPlan) -> Tensor:
    """Return which chunks lie inside the tensor. Others hold zeros only: cut off, a few coefficients become many."""
    if plan.selection.rule.sample_key is not None:
        return torch.ones(plan.chunks, dtype=torch.bool)
    rows = (torch.arange(-(-plan.rows // plan.chunk_rows)) + 1) * plan.chunk_rows <= plan.rows
    cols = (torch.arange(-(-plan.cols // plan.chunk_cols)) + 1) * plan.chunk_cols <= plan.cols
    return (rows.view(-1, 1) & cols).view(-1)


def _density(plan: TensorPlan) -> tuple[int, int]:
    """Return how many coefficients are nonzero out of how many. Where all ranks send the same ones: all of them."""
    if plan.selection.rule.sample_key is not None:
        return 1, 1
    if plan.variable_count:
        # Half of the capacity: the ranks of a node share it out, and rounding may take some of it from one of them.
        return plan.chunks * plan.chunk_numel, plan.k if plan.variable_length else max(1, plan.k // 2)
    return plan.chunk_numel, plan.k


def _at_least(tau: float) -> float:
    return 2.0 ** math.ceil(math.log2(tau)) if tau > 0 else 1.0


def _elements(plan: TensorPlan, coefficients: Tensor) -> Tensor:
    """Return the ``[rows, cols]`` elements, in float64, whose coefficients these are: ``B.T @ c @ B``."""
    rows, cols = (-(-plan.rows // plan.chunk_rows), -(-plan.cols // plan.chunk_cols))
    chunks = coefficients.double().view(rows, cols, plan.chunk_rows, plan.chunk_cols)
    if plan.transformed:
        chunks = _dct(plan.chunk_rows).T @ chunks @ _dct(plan.chunk_cols)
    whole = chunks.permute(0, 2, 1, 3).reshape(rows * plan.chunk_rows, cols * plan.chunk_cols)
    return whole[: plan.rows, : plan.cols].contiguous()


def _dct(n: int) -> Tensor:
    """Return the orthonormal DCT-II as a matrix; its rows are the basis."""
    frequency, position = torch.arange(n, dtype=torch.float64).view(-1, 1), torch.arange(n, dtype=torch.float64)
    basis = torch.cos(math.pi / n * (position + 0.5) * frequency) * math.sqrt(2 / n)
    basis[0] /= math.sqrt(2)
    return basis
