"""Replicas: nodes that begin with the same bits, and train the same parameters."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from flexcomm import ConfigMismatchError
from flexdemo.parameters import is_sharded, local

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from flexcomm import World
    from flexdemo.lots import Lot

__all__ = ["check_same_lots", "equalise_"]


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


def check_same_lots(lots: Iterable[Lot], world: World) -> None:
    """Raise on all ranks unless all of them train the same parameters, in the same order.

    Also if they agreed before: one that has other lots now would wait in another collective than the rest.
    """
    names = repr([(lot.group, lot.averaged, lot.names) for lot in lots])
    digest = hashlib.blake2b(names.encode(), digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(digest, "little", signed=True)])
    everybodys = world.control.all_gather(mine).wait().view(-1).tolist()
    odd = [rank for rank, other in enumerate(everybodys) if other != everybodys[0]]
    if odd:
        raise ConfigMismatchError(
            f"ranks {odd} train other parameters than rank 0: freeze, unfreeze and add the same ones on all ranks. "
            f"This rank has {names}."
        )
