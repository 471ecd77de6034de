"""Resharding: residuals saved by one number of ranks per node, for another.

Residuals are coefficients of chunks, and chunks follow from how a tensor is cut. So what the ranks of a node saved is
transformed back into elements, put together, cut anew, and transformed again: exact but for rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, Shard

from flexcomm import InvalidArgumentError, TensorSpec, plan_tensor, shard_tensor
from flexcomm.kernels.reference.transform import accumulate, restore

if TYPE_CHECKING:
    from torch import Tensor

    from flexcomm import Compressor, TensorPlan

__all__ = ["UnshardedTensor", "find_unsharded"]


class _Part(NamedTuple):
    """What one rank has: elements of the flattened whole, or rows of it along the dim that is cut, and their plan."""

    plan: TensorPlan
    begin: int
    end: int


class UnshardedTensor(NamedTuple):
    """A tensor as it is before the ranks of a node share it; ``dim`` is the one FSDP cuts, None if flexcomm does."""

    spec: TensorSpec
    compressor: Compressor
    dim: int | None

    def reshard(self, rows: Tensor, ranks: int, rank: int) -> Tensor:
        """Return the state of rank ``rank`` of ``ranks`` out of the states, one a row, that a node's ranks saved."""
        whole = torch.zeros(self.spec.shape, device=rows.device)
        for row, part in zip(rows, self._parts(len(rows)), strict=True):
            if part is not None:
                elements = self._elements(whole, part)
                elements.copy_(self._restored(row, part).reshape(elements.shape))
        mine = self._parts(ranks)[rank]
        if mine is None:
            return rows.new_zeros(0, 0)
        return accumulate(self._elements(whole, mine), mine.plan)

    def _restored(self, row: Tensor, part: _Part) -> Tensor:
        chunks, numel = part.plan.state_shape
        if row.numel() < chunks * numel:
            raise InvalidArgumentError(
                f"the residual saved of {self.spec.name} has {row.numel()} coefficients where {chunks * numel} are "
                f"needed: it is of another model, or of another compressor."
            )
        return restore(row[: chunks * numel].view(chunks, numel), part.plan)

    def _elements(self, whole: Tensor, part: _Part) -> Tensor:
        if self.dim is None:
            return whole.view(-1)[part.begin : part.end]
        return whole.narrow(self.dim, part.begin, part.end - part.begin)

    def _parts(self, ranks: int) -> list[_Part | None]:
        if self.dim is None:
            shards = shard_tensor(self.spec, plan_tensor(self.spec, self.compressor), ranks)
            return [None if shard is None else _Part(shard.plan, shard.first, shard.last) for shard in shards]
        return [self._shard(ranks, rank) for rank in range(ranks)]

    def _shard(self, ranks: int, rank: int) -> _Part:
        """Return a shard as FSDP cuts it: all of one size, the last ones what is left."""
        dim = self.dim or 0
        rows = self.spec.shape[dim]
        size = -(-rows // ranks)
        begin, end = min(rank * size, rows), min((rank + 1) * size, rows)
        shape = (*self.spec.shape[:dim], end - begin, *self.spec.shape[dim + 1 :])
        return _Part(plan_tensor(self.spec._replace(shape=shape), self.compressor), begin, end)


def find_unsharded(param: Tensor, name: str, like: Tensor, compressor: Compressor) -> UnshardedTensor | None:
    """Return what a parameter is before it is shared; None if that cannot be told, as of a flat one."""
    spec = TensorSpec(name, tuple(param.shape), like.dtype)
    if isinstance(param, FlatParameter):
        return None
    if not isinstance(param, DTensor):
        return UnshardedTensor(spec, compressor, None)
    (placement, *others) = param.placements
    return UnshardedTensor(spec, compressor, placement.dim) if isinstance(placement, Shard) and not others else None
