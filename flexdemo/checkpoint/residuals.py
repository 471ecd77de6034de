"""Residuals in checkpoints: saved with a node axis, and loaded by the same ranks per node or by others.

Residuals are coefficients of chunks, and chunks follow from how a tensor is cut. For other ranks per node, what the
ranks of a node saved is transformed back into elements, put together, cut anew, and transformed again: exact but for
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, Shard

from flexcomm import (
    Compressor,
    InvalidArgumentError,
    Residuals,
    TensorPlan,
    TensorShard,
    TensorSpec,
    plan_tensor,
    shard_tensor,
)
from flexcomm.kernels.reference.transform import accumulate, restore
from flexdemo.checkpoint.node_axis import NodeAxis, OtherNodes, Rows, longest_on_node
from flexdemo.gradients import Bucket, BucketExchange, CompressionSettings

States = dict["Residuals", dict[str, "Tensor"]]
"""States to load, by residuals and name."""


class StateEntry(NamedTuple):
    """The residual of one tensor on this rank; ``length`` is the longest on this node.

    Without a shard this rank has none. Without ``unsharded`` it cannot be cut anew.
    """

    residuals: Residuals
    shard: TensorShard | None
    length: int
    unsharded: UnshardedTensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return (0, 0) if self.shard is None else self.shard.plan.state_shape

    def saved(self, axis: NodeAxis, device: torch.device) -> Tensor:
        """Return the residual, zeros if it has not begun, with a node axis."""
        if self.shard is not None and self.shard.spec.name in self.residuals.names():
            return axis.stacked(self.residuals[self.shard.spec.name], self.length)
        return axis.stacked(torch.zeros(self.shape, device=device), self.length)

    def take(self, saved: Tensor, axis: NodeAxis, name: str, other_nodes: OtherNodes, states: States) -> None:
        """Add the saved residual, as this rank's part of it, to ``states``."""
        taken = self._taken(axis.rows_of(saved, name, other_nodes), axis, name)
        by_name = states.setdefault(self.residuals, {})
        if self.shard is not None:
            by_name[self.shard.spec.name] = taken

    def _taken(self, rows: Rows, axis: NodeAxis, name: str) -> Tensor:
        mine, numel = axis.row_of_this_rank(rows), math.prod(self.shape)
        if mine is not None and mine.numel() >= numel:
            return mine[:numel].reshape(self.shape)
        taken = None
        if self.unsharded is not None and not rows.is_own:
            taken = self.unsharded.reshard(rows.values, axis.topology.local_size, axis.topology.local_rank)
        if taken is None or tuple(taken.shape) != self.shape:
            raise InvalidArgumentError(
                f"the saved {name} has {len(rows.values)} rows of {rows.values.shape[1]} elements a node, but this "
                f"rank needs {numel}, and how to cut them anew cannot be told: parameters, compressor or ranks per "
                f"node changed. Load with the same, or without the optimizer's state."
            )
        return taken


def find_entries(
    bucket: Bucket, exchange: BucketExchange, tensors: Sequence[Tensor], settings: CompressionSettings
) -> list[StateEntry]:
    """Return the entries of a bucket's tensors; none without residuals. All ranks of a node call it together."""
    residuals = exchange.residuals_of(bucket)
    if residuals is None:
        return []
    shards = exchange.shards_of(bucket, list(tensors), settings)
    mine = [0 if shard is None else math.prod(shard.plan.state_shape) for shard in shards]
    lengths = longest_on_node(mine, exchange.world)
    tensors_unsharded = [
        _find_unsharded(param, name, like, settings.compressor)
        for param, name, like in zip(bucket.params, bucket.names, tensors, strict=True)
    ]
    return [StateEntry(residuals, *found) for found in zip(shards, lengths, tensors_unsharded, strict=True)]


def load_states(states: States) -> None:
    for residuals, by_name in states.items():
        residuals.load_state_dict(by_name)


# Resharding


class _Part(NamedTuple):
    """One rank's part of a tensor, and its plan: elements of the flat tensor, or rows of the dim that is cut."""

    plan: TensorPlan
    begin: int
    end: int


class UnshardedTensor(NamedTuple):
    """A tensor before it is cut among the ranks of a node: along ``dim`` by FSDP, or, if None, by flexcomm."""

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


def _find_unsharded(param: Tensor, name: str, like: Tensor, compressor: Compressor) -> UnshardedTensor | None:
    """Return a parameter as it is before it is cut; None if that cannot be known, as of a flat one."""
    spec = TensorSpec(name, tuple(param.shape), like.dtype)
    if isinstance(param, FlatParameter):
        return None
    if not isinstance(param, DTensor):
        return UnshardedTensor(spec, compressor, None)
    (placement, *others) = param.placements
    return UnshardedTensor(spec, compressor, placement.dim) if isinstance(placement, Shard) and not others else None
