"""What is sent of a tensor, how tensors are cut into shards, and the layout of a bucket's buffer, all from shapes.

Tensors are cut between chunks, by their own plan and name and the number of ranks: bucketing changes nothing.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from flexcomm.compress import Compressor, TensorSpec, dense
from flexcomm.errors import CompressorError
from flexcomm.kernels import BufferPlan, Selection, TensorPlan, plan_layout
from flexcomm.kernels.layout import VERSION

_TINY_NUMEL = 64


def plan_tensor(spec: TensorSpec, compressor: Compressor) -> TensorPlan:
    """Return what is sent of a tensor: what the compressor plans, or all of it where that is shorter.

    Args:
        spec: the tensor.
        compressor: plans what is sent.

    """
    plan, whole = compressor.plan(spec), dense().plan(spec)
    if plan.rows * plan.cols != math.prod(spec.shape):
        planned = f"{plan.rows} x {plan.cols} elements for {spec.name} of {list(spec.shape)}"
        raise CompressorError(f"{compressor} plans {planned}, but must cover the tensor exactly.")
    if is_dense(plan):
        return plan
    # A variable length is known only afterwards; a tiny tensor's payload is judged by its greatest length.
    entries = 0 if plan.variable_length and plan.cols * plan.rows > _TINY_NUMEL else plan.entries
    return plan if plan_layout(plan, entries).nwords <= plan_layout(whole, whole.entries).nwords else whole


def is_dense(plan: TensorPlan) -> bool:
    """Return whether a plan sends every element as a float: in a dtype that was asked for, so none replaces it."""
    return plan.selection is Selection.EVERYTHING and not plan.transformed and not plan.values.format.scales


def plan_buffer(specs: Sequence[TensorSpec], compressor: Compressor) -> BufferPlan:
    """Return how these tensors share a buffer. A tensor that would be longer than if sent whole is sent whole."""
    return assemble_buffer(tuple(specs), tuple(plan_tensor(spec, compressor) for spec in specs))


def assemble_buffer(specs: tuple[TensorSpec, ...], plans: tuple[TensorPlan, ...]) -> BufferPlan:
    # The text of docs/wire.md that is hashed. It is a part of the format: names in it are not the classes'.
    tensors = [(spec.name, spec.shape, str(spec.dtype)) for spec in specs]
    described = ", ".join(map(_describe, plans)) + ("," if len(plans) == 1 else "")
    text = f"({VERSION}, {tensors!r}, ({described}))"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return BufferPlan.of(specs, plans, int.from_bytes(digest, "little"))


def _describe(plan: TensorPlan) -> str:
    return (
        f"TensorPlan(rows={plan.rows!r}, cols={plan.cols!r}, chunk_rows={plan.chunk_rows!r}, "
        f"chunk_cols={plan.chunk_cols!r}, transformed={plan.transformed!r}, "
        f"selection=<Selection.{plan.selection.rule.wire_name}: {int(plan.selection)}>, keep={plan.k!r}, "
        f"values=<ValueCode.{plan.values.name}: {int(plan.values)}>, tau={plan.tau!r}, seed={plan.seed!r}, "
        f"exact={plan.variable_length!r})"
    )


class TensorShard(NamedTuple):
    """Elements ``first`` to ``last`` of a flattened tensor, chunks from ``first_chunk`` on, and the plan for them."""

    spec: TensorSpec
    plan: TensorPlan
    first: int
    last: int
    first_chunk: int

    @property
    def numel(self) -> int:
        return self.last - self.first

    def of(self, tensor: Tensor) -> Tensor:
        """Return this shard of a tensor: a view, if the tensor is contiguous."""
        return tensor.reshape(-1)[self.first : self.last].view(self.spec.shape)

    def state_of(self, state: Tensor) -> Tensor:
        return state[self.first_chunk : self.first_chunk + self.plan.chunks]


def shard_tensor(spec: TensorSpec, plan: TensorPlan, ranks: int) -> list[TensorShard | None]:
    """Return the shard of each rank; None for ranks that get nothing of a tensor with too few chunks.

    The name decides which rank gets the first shard: otherwise rank 0 would get all the small tensors.

    Args:
        spec: the tensor.
        plan: what is sent of it, by :func:`plan_tensor`.
        ranks: the number of ranks of a node.

    """
    # By rows of chunks, or by chunks if there is one row. A last row of chunks that holds a single row of elements
    # stays with the one before: alone, it would be a plan for a tensor of one row, and chunked differently.
    is_flat = plan.rows <= 1
    units = plan.grid_cols if is_flat else plan.grid_rows - (plan.rows % plan.chunk_rows == 1 and plan.grid_rows > 1)
    bounds = [units * number // ranks for number in range(ranks + 1)]
    shards = [_make_shard(spec, plan, units, *bounds[number : number + 2]) for number in range(ranks)]
    offset = zlib.crc32(spec.name.encode()) % ranks
    return shards[-offset:] + shards[:-offset]


def _make_shard(spec: TensorSpec, plan: TensorPlan, units: int, begin: int, end: int) -> TensorShard | None:
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
    if plan.variable_count:
        # By chunks, not by units: the last one may hold two rows of chunks.
        part = replace(part, k=-(-plan.k * part.chunks // plan.chunks))
    return TensorShard(TensorSpec(f"{spec.name}[{first}:{last}]", shape, spec.dtype), part, first, last, first_chunk)
