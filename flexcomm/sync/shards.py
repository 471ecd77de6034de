"""Shards: the part of each tensor that one rank of a node works on.

Tensors are cut between chunks, so every chunk is what it would be uncut. The cuts follow from the tensor's own plan and
name and from the number of ranks, never from the other tensors of its bucket: bucketing changes nothing.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from flexcomm.compress import TensorSpec
from flexcomm.kernels import TensorPlan


class TensorShard(NamedTuple):
    """Elements ``first`` to ``last`` of a flattened tensor, chunks from ``first_chunk`` on, and the plan for them."""

    spec: TensorSpec
    plan: TensorPlan
    first: int
    last: int
    first_chunk: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return this shard of a tensor: a view, if the tensor is contiguous."""
        return tensor.reshape(-1)[self.first : self.last].view(self.spec.shape)

    def state_of(self, state: Tensor) -> Tensor:
        """Return this shard's part of the state of the whole tensor."""
        return state[self.first_chunk : self.first_chunk + self.plan.chunks]


def shard_tensor(spec: TensorSpec, plan: TensorPlan, ranks: int) -> list[TensorShard | None]:
    """Return the shard of each rank; None for ranks that get nothing of a tensor with too few chunks.

    The name decides which rank gets the first shard: otherwise rank 0 would get all the small tensors.

    Args:
        spec: the tensor.
        plan: what is sent of it, by :func:`plan_tensor`.
        ranks: the number of ranks of a node.

    """
    units = count_units(plan)
    offset = zlib.crc32(spec.name.encode()) % ranks
    bounds = [units * number // ranks for number in range(ranks + 1)]
    shards = [make_shard(spec, plan, units, *bounds[number : number + 2]) for number in range(ranks)]
    return shards[-offset:] + shards[:-offset]


def count_units(plan: TensorPlan) -> int:
    """Return into how many shards a tensor can be cut: by rows of chunks, or by chunks if it has one row.

    A last row of chunks that holds a single row of elements stays with the one before: alone, it would be a plan for
    a tensor of one row, and chunked differently.
    """
    if plan.rows <= 1:
        return plan.grid_cols
    return plan.grid_rows - (plan.rows % plan.chunk_rows == 1 and plan.grid_rows > 1)


def make_shard(spec: TensorSpec, plan: TensorPlan, units: int, begin: int, end: int) -> TensorShard | None:
    """Return units ``begin`` to ``end`` of a tensor that can be cut into ``units``."""
    if begin == end:
        return None
    if begin == 0 and end == units:
        return TensorShard(spec, plan, 0, plan.rows * plan.cols, 0)
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
        part = replace(part, k=-(-plan.k * part.chunks // plan.chunks))
    return TensorShard(TensorSpec(f"{spec.name}[{first}:{last}]", shape, spec.dtype), part, first, last, first_chunk)
