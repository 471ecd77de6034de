"""Lanes of optimizers: ranks make optimizers in one order, but let them step in any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

if TYPE_CHECKING:
    from flexcomm import World

__all__ = ["take_lane"]

_owners: WeakKeyDictionary[World, list[ref[Any]]] = WeakKeyDictionary()


def take_lane(owner: object, world: World) -> str:
    """Return a lane for ``owner`` that no living optimizer of this world has, on any rank. All ranks call it together.

    Lanes have cables and a thread, so one whose owner is gone everywhere is taken again.
    """
    owners = _owners.setdefault(world, [])
    taken = torch.tensor([one() is not None for one in owners] + [False], dtype=torch.uint8)
    number = world.control.all_gather(taken).wait().amax(dim=0).tolist().index(0)
    if number == len(owners):
        owners.append(ref(owner))
    else:
        owners[number] = ref(owner)
    return f"optimizer {number}"
