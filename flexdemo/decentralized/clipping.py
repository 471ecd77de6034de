"""Clipping by the norm of a replica's whole gradient, sharded or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexdemo.parameters import local

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from flexcomm import World
    from flexdemo.gradients import Bucket

__all__ = ["clip_", "squared_norm"]

_TINY = 1e-6


def squared_norm(buckets: Iterable[Bucket], world: World) -> Tensor:
    """Return the squared norm of the replica's gradient: this rank's, plus the shards of all ranks of its node.

    If a bucket is sharded, the ranks of a node call it together.
    """
    whole, shards = torch.zeros(2, dtype=torch.float64, device=world.device)
    has_shards = False
    for bucket in buckets:
        gradients = _gradients_of(bucket)
        has_shards |= bucket.averaged
        if gradients:
            norms = torch.stack([norm.to(world.device) for norm in torch._foreach_norm(gradients, 2.0, torch.float64)])
            squared = norms.square().sum()
            whole, shards = (whole, shards + squared) if bucket.averaged else (whole + squared, shards)
    if has_shards and world.intra.size > 1:
        shards = world.intra.all_reduce(shards.reshape(1)).wait().squeeze(0)
    total: Tensor = whole + shards
    return total


def clip_(buckets: Iterable[Bucket], world: World, max_norm: float) -> None:
    """Scale all gradients by one factor, so that the norm of all together is at most ``max_norm``."""
    buckets = list(buckets)
    scale = (max_norm / (squared_norm(buckets, world).sqrt() + _TINY)).clamp(max=1.0)
    for bucket in buckets:
        gradients = _gradients_of(bucket)
        if gradients:
            torch._foreach_mul_(gradients, scale.to(gradients[0].device))


def _gradients_of(bucket: Bucket) -> list[Tensor]:
    return [local(param.grad) for param in bucket.params if param.grad is not None]
