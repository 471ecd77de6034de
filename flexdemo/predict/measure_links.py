"""The seconds of every kind of exchange on this cluster, by bytes of a node: medians of what the slowest rank took.

All ranks call everything together, and decide by what all of them measured.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import torch

from flexdemo.runtime import LinkTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from flexcomm import World

__all__ = ["measure_links"]

SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
_REPEATS = 5
_PATIENCE_S = 2.0
"""Once a call takes that long, larger ones are left out: the line through the last two sizes says enough."""


def measure_links(world: World, sizes: Sequence[int] = SIZES, repeats: int = _REPEATS) -> tuple[LinkTable, ...]:
    """Return a table for each kind of exchange that there is; a node alone has none between nodes."""
    place = world.topology
    kinds: list[tuple[str, int, Callable[[World, int], Callable[[], object]]]] = []
    if place.nodes > 1:
        kinds = [("group", 2, _swap), ("all-reduce", place.nodes, _all_reduce), ("gather", place.nodes, _gather)]
    if place.nodes > 2:
        kinds.append(("edges", 1, _pass_on))
    if place.local_size > 1:
        kinds.append(("intra", place.local_size, _legs))
    return tuple(_measure(link, k, prepare, world, sizes, repeats) for link, k, prepare in kinds)


def _measure(
    link: str,
    k: int,
    prepare: Callable[[World, int], Callable[[], object]],
    world: World,
    sizes: Sequence[int],
    repeats: int,
) -> LinkTable:
    seconds: list[float] = []
    for size in sizes:
        seconds.append(_time(prepare(world, size), world, repeats))
        if seconds[-1] > _PATIENCE_S:
            break
    return LinkTable(link, k, tuple(sizes[: len(seconds)]), tuple(seconds))


def _time(call: Callable[[], object], world: World, repeats: int) -> float:
    """Return the median over calls of the slowest rank's time; the first call only warms up."""
    taken_s = torch.zeros(repeats + 1, dtype=torch.float64)
    for repeat in range(repeats + 1):
        world.control.barrier().wait()
        begin_s = time.perf_counter()
        call()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        taken_s[repeat] = time.perf_counter() - begin_s
    slowest_s: list[float] = world.control.all_gather(taken_s).wait().amax(dim=0).tolist()
    return median(slowest_s[1:])


def _share(world: World, nbytes: int) -> Tensor:
    """Return what a rank carries of a node's bytes; all ranks of a node send at once, as in training."""
    return torch.zeros(max(1, nbytes // 4 // world.topology.local_size), device=world.device)


def _swap(world: World, nbytes: int) -> Callable[[], object]:
    mine = _share(world, nbytes)
    theirs, partner = torch.empty_like(mine), world.inter.rank ^ 1
    # Of an odd number of nodes the last has no partner.
    pairs = [partner] if partner < world.inter.size else []
    return lambda: world.inter.send_recv([(peer, mine) for peer in pairs], [(peer, theirs) for peer in pairs]).wait()


def _pass_on(world: World, nbytes: int) -> Callable[[], object]:
    inter, mine = world.inter, _share(world, nbytes)
    theirs, after, before = torch.empty_like(mine), (inter.rank + 1) % inter.size, (inter.rank - 1) % inter.size
    return lambda: inter.send_recv([(after, mine)], [(before, theirs)]).wait()


def _all_reduce(world: World, nbytes: int) -> Callable[[], object]:
    mine = _share(world, nbytes)
    return lambda: world.inter.all_reduce(mine).wait()


def _gather(world: World, nbytes: int) -> Callable[[], object]:
    mine = _share(world, nbytes)
    out = mine.new_empty(world.inter.size, mine.numel())
    return lambda: world.inter.all_gather(mine, out).wait()


def _legs(world: World, nbytes: int) -> Callable[[], object]:
    part = _share(world, nbytes)
    whole = part.new_zeros(world.intra.size, part.numel())

    def both() -> None:
        world.intra.reduce_scatter(whole, part).wait()
        world.intra.all_gather(part, whole).wait()

    return both
