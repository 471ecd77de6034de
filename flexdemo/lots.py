"""Lots: parameters whose gradients travel together, in the order in which a backward pass makes them ready."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flexdemo.parameters import is_sharded, local, names_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.nn import Parameter

    from flexdemo.parameters import Group

__all__ = ["Lot", "plan_lots"]


@dataclass(frozen=True, eq=False)
class Lot:
    """Parameters of group number ``group``, on one device, and what they are called.

    ``averaged`` says whether their gradients are averaged inside the node before the optimizer sees them.
    """

    group: int
    averaged: bool
    params: tuple[Parameter, ...]
    names: tuple[str, ...]


@dataclass
class _Collected:
    params: list[Parameter] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    nbytes: int = 0


def plan_lots(groups: list[Group], bucket_bytes: int, wanted: Callable[[Parameter], bool]) -> list[Lot]:
    """Put all wanted parameters into lots of up to so many bytes, last ones first.

    How lots are cut follows from the parameters alone, not from whether they are sent early: a lot decides as a whole
    which way it takes between nodes, and results must not depend on when it does.
    """
    lots: list[Lot] = []
    collected: dict[tuple[int, bool, torch.device], _Collected] = {}
    for number, (group, names) in reversed(list(enumerate(zip(groups, names_of(groups), strict=True)))):
        for param, name in zip(reversed(group["params"]), reversed(names), strict=True):
            if not wanted(param):
                continue
            key = number, _is_averaged(param, group), param.device
            here = collected.setdefault(key, _Collected())
            here.params.append(param)
            here.names.append(name)
            here.nbytes += local(param).nbytes
            if here.nbytes >= bucket_bytes:
                lots.append(_closed(key, collected.pop(key)))
    return lots + [_closed(key, here) for key, here in collected.items()]


def _is_averaged(param: Parameter, group: Group) -> bool:
    told: bool | None = group.get("node_averaged")
    return is_sharded(param) if told is None else told


def _closed(key: tuple[int, bool, torch.device], collected: _Collected) -> Lot:
    number, averaged, _ = key
    return Lot(number, averaged, tuple(collected.params), tuple(collected.names))
