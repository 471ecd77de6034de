"""State entries: the residual of one tensor on this rank, into a tensor with a node axis and back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from flexcomm import InvalidArgumentError
from flexdemo.checkpoint.resharding import find_unsharded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from flexcomm import Residuals, TensorShard, World
    from flexdemo.checkpoint.node_axis import NodeAxis, OtherNodes, Rows
    from flexdemo.checkpoint.resharding import UnshardedTensor
    from flexdemo.gradients import Bucket, BucketExchange, CompressionSettings

__all__ = ["StateEntry", "States", "find_entries", "load_states", "longest_on_node"]

States = dict["Residuals", dict[str, "Tensor"]]
"""What is to be loaded into which residuals, by name."""


class StateEntry(NamedTuple):
    """Where a residual is kept, and the length of the longest on this node; without a shard, this rank has none."""

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
        """Add what was saved to what is to be loaded."""
        taken = self._taken(axis.rows_of(saved, name, other_nodes), axis, name)
        by_name = states.setdefault(self.residuals, {})
        if self.shard is not None:
            by_name[self.shard.spec.name] = taken

    def _taken(self, rows: Rows, axis: NodeAxis, name: str) -> Tensor:
        mine, numel = axis.row_of_this_rank(rows), math.prod(self.shape)
        if mine is not None and mine.numel() >= numel:
            return mine[:numel].reshape(self.shape)
        taken = None if self.unsharded is None or rows.is_own else axis.reshard(self.unsharded, rows)
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
    """Return the entries of a bucket's tensors; none if nothing is remembered. All ranks of a node ask together."""
    residuals = exchange.residuals_of(bucket)
    if residuals is None:
        return []
    shards = exchange.shards_of(bucket, list(tensors), settings)
    mine = [0 if shard is None else math.prod(shard.plan.state_shape) for shard in shards]
    lengths = longest_on_node(mine, exchange.world)
    tensors_unsharded = [
        find_unsharded(param, name, like, settings.compressor)
        for param, name, like in zip(bucket.params, bucket.names, tensors, strict=True)
    ]
    return [StateEntry(residuals, *found) for found in zip(shards, lengths, tensors_unsharded, strict=True)]


def longest_on_node(lengths: Iterable[int], world: World) -> list[int]:
    """Return, number by number, the largest that any rank of this node has."""
    mine = torch.tensor(list(lengths), dtype=torch.int64, device=world.device)
    longest: list[int] = world.intra.all_gather(mine).wait().amax(dim=0).tolist()
    return longest


def load_states(states: States) -> None:
    for residuals, by_name in states.items():
        residuals.load_state_dict(by_name)
