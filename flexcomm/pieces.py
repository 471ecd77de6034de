"""Pieces: which part of a tensor each rank of a node works on.

Tensors are cut between chunks, so every chunk is what it would be uncut. Where they are cut follows from the tensor's
own plan and name and from the number of ranks, never from its neighbours: how tensors are put into buckets changes
nothing.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from flexcomm.compress import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexcomm.kernels import TensorPlan

__all__ = ["Piece", "cut"]


class Piece(NamedTuple):
    """Elements ``first`` to ``last`` of a flattened tensor, chunks from ``first_chunk`` on, and the plan for them."""

    spec: TensorSpec
    plan: TensorPlan
    first: int
    last: int
    first_chunk: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return this piece of a tensor: a view, if the tensor is contiguous."""
        return tensor.reshape(-1)[self.first : self.last].view(self.spec.shape)

    def state_of(self, state: Tensor) -> Tensor:
        """Return this piece's part of what is kept for the whole."""
        return state[self.first_chunk : self.first_chunk + self.plan.chunks]


def cut(spec: TensorSpec, plan: TensorPlan, ranks: int) -> list[Piece | None]:
    """Return the piece of each rank; None for those that get nothing of a tensor with too few chunks.

    Which rank comes first depends on the name: else the first one would get all the small tensors.
    """
    units = count_units(plan)
    turn = zlib.crc32(spec.name.encode()) % ranks
    bounds = [units * share // ranks for share in range(ranks + 1)]
    pieces = [make_piece(spec, plan, units, *bounds[share : share + 2]) for share in range(ranks)]
    return pieces[-turn:] + pieces[:-turn]


def count_units(plan: TensorPlan) -> int:
    """Return into how many parts a tensor can be cut: a row of chunks, or a chunk of a tensor of one row.

    A last row of chunks that holds a single row of elements stays with the one before: alone, it would be a plan for
    a tensor of one row, and chunked differently.
    """
    if plan.rows <= 1:
        return plan.grid_cols
    return plan.grid_rows - (plan.rows % plan.chunk_rows == 1 and plan.grid_rows > 1)


def make_piece(spec: TensorSpec, plan: TensorPlan, units: int, begin: int, end: int) -> Piece | None:
    if begin == end:
        return None
    if begin == 0 and end == units:
        return Piece(spec, plan, 0, plan.rows * plan.cols, 0)
    shape: tuple[int, ...]
    if plan.rows <= 1:
        first, last = begin * plan.chunk_cols, plan.cols if end == units else end * plan.chunk_cols
        shape, part, first_chunk = (last - first,), replace(plan, cols=last - first), begin
    else:
        top, bottom = begin * plan.chunk_rows, plan.rows if end == units else end * plan.chunk_rows
        first, last = top * plan.cols, bottom * plan.cols
        shape, part = (bottom - top, plan.cols), replace(plan, rows=bottom - top)
        first_chunk = begin * plan.grid_cols
    if plan.is_variable:
        # By chunks, not by units: the last one may hold two rows of chunks.
        part = replace(part, keep=-(-plan.keep * part.chunks // plan.chunks))
    return Piece(TensorSpec(f"{spec.name}[{first}:{last}]", shape, spec.dtype), part, first, last, first_chunk)
