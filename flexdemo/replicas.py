"""Replicas: nodes that begin with the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexdemo.parameters import is_sharded, local

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from flexcomm import World

__all__ = ["equalise_"]


def equalise_(tensors: Iterable[Tensor], world: World, *, are_shards: bool | None = None) -> None:
    """Make every tensor what node 0 holds: each shard its counterpart there, anything else what the first rank has.

    ``are_shards`` says which of both they are, where they do not say it themselves.
    """
    for tensor in tensors:
        here, is_shard = local(tensor), is_sharded(tensor) if are_shards is None else are_shards
        if world.inter.size > 1:
            world.inter.broadcast(here).wait()
        if world.intra.size > 1 and not is_shard:
            world.intra.broadcast(here).wait()
