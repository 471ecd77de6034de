"""Kinds of mixes: what calls that ask for the same have in common, agreed by all ranks once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict
from weakref import WeakKeyDictionary

import torch

from flexcomm.codec import plan_buffer
from flexcomm.compress import TensorSpec
from flexcomm.device import is_supported, supported_names
from flexcomm.errors import InvalidArgumentError, InvalidTensorError
from flexcomm.gossip.carrier import carrier_of
from flexcomm.gossip.compressed import choose_gamma
from flexcomm.gossip.trip import Rooms
from flexcomm.kernels import Kernels, choose_kernels
from flexcomm.world import World, default_world

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from flexcomm.codec import BufferPlan
    from flexcomm.compress import Compressor
    from flexcomm.gossip.compressed import MixResiduals
    from flexcomm.gossip.push_sum import PushSum
    from flexcomm.gossip.schedule import ScheduleLike

__all__ = ["Kind", "MixOptions", "kind_for", "world_of"]

_MOST_KINDS = 256
_MOST_SPARE = 4
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class MixOptions(TypedDict, total=False):
    """What a mix can be told beside what, by which schedule and when: equal on all ranks, but for contents."""

    world: World | None
    """The ranks; those that ``flexcomm.connect()`` finds, if none are given."""
    sharded: bool
    """The tensors are shards, which the ranks of a node do not average, as FSDP's are."""
    gamma: float | None
    """Which share of the way to ``W x`` to go: above 0, at most 1. Without it all or, compressed, what converges."""
    push_sum: PushSum | None
    """This node's weight on graphs that are not doubly stochastic; one for each set of tensors."""
    compressor: Compressor | None
    """What is sent of the tensors' changes, on a graph that does not change; needs ``memory``."""
    memory: MixResiduals | None
    """What compressed mixing remembers of these tensors."""
    lane: str
    """Mixes of one lane start in the same order on all ranks; those of several need not agree on an order."""
    out: Tensor | Sequence[Tensor] | None
    """Where the mixed tensors go, instead of new ones; may be the tensors themselves."""


@dataclass(eq=False)
class Kind:
    """What calls that ask for the same have in common."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    inside: bool
    lane: str
    gamma: float
    digest: int
    kernels: Kernels
    plan: BufferPlan | None
    free: list[Rooms] = field(default_factory=list)

    def take_rooms(self) -> Rooms:
        return self.free.pop() if self.free else Rooms(self.device)

    def give_back(self, rooms: Rooms) -> None:
        if len(self.free) < _MOST_SPARE:
            self.free.append(rooms)


_kinds: WeakKeyDictionary[World, dict[Hashable, Kind]] = WeakKeyDictionary()


def world_of(options: MixOptions) -> World:
    strange = options.keys() - MixOptions.__annotations__.keys()
    if strange:
        raise InvalidArgumentError(
            f"got {', '.join(sorted(strange))}, but the options are {', '.join(MixOptions.__annotations__)}."
        )
    return options.get("world") or default_world()


def kind_for(world: World, tensors: list[Tensor], schedule: ScheduleLike, options: MixOptions) -> Kind:
    """Return what calls like this one have in common; the first of them makes it, once all ranks agree on it."""
    settings = (options.get("gamma"), options.get("compressor"), options.get("sharded", False), options.get("lane", ""))
    given = options.get("push_sum") is not None, options.get("memory") is not None
    key = (tuple([(x.shape, x.dtype, x.device) for x in tensors]), schedule.digest, settings, given)
    kinds = _kinds.setdefault(world, {})
    if key not in kinds:
        if len(kinds) >= _MOST_KINDS:
            del kinds[next(iter(kinds))]
        kinds[key] = _make_kind(world, tensors, schedule, options)
    return kinds[key]


def _make_kind(world: World, tensors: list[Tensor], schedule: ScheduleLike, options: MixOptions) -> Kind:
    _check_tensors(tensors)
    sharded, gamma, compressor = options.get("sharded", False), options.get("gamma"), options.get("compressor")
    _check_schedule(schedule, world, pushes=options.get("push_sum") is not None)
    if gamma is not None and not 0.0 < gamma <= 1.0:
        raise InvalidArgumentError(f"gamma is {gamma!r}, but must be above 0 and at most 1.")
    inside = world.intra.size > 1 and not sharded
    numel = sum(x.numel() for x in tensors)
    plan = _plan_for(tensors, -(-numel // world.intra.size) if inside else None, compressor)
    _check_memory(schedule, compressor, options.get("memory"))
    if compressor is not None:
        gamma = choose_gamma(compressor, {1} if inside else {x.dim() for x in tensors}, gamma)
    gamma, lane = 1.0 if gamma is None else gamma, options.get("lane", "")
    fields = {
        "tensors to be mixed": [(list(x.shape), str(x.dtype)) for x in tensors],
        "schedule": schedule.digest,
        "gamma": gamma,
        "compressor": compressor,
        "push-sum": options.get("push_sum") is not None,
        "sharded": sharded,
        "lane": lane,
    }
    # Ranks of a node may hold shards of unequal lengths.
    (world.agree_inter if sharded else world.agree)(fields)
    if world.topology.size > 1:
        carrier_of(world, lane)
    digest = int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=8).digest(), "little", signed=True)
    device = tensors[0].device if tensors else world.device
    dtype = tensors[0].dtype if tensors else torch.float32
    return Kind(numel, dtype, device, inside, lane, gamma, digest, choose_kernels(device), plan)


def _check_tensors(tensors: list[Tensor]) -> None:
    kinds = {(x.dtype, x.device) for x in tensors}
    if len(kinds) > 1:
        said = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise InvalidTensorError(f"the tensors of one mix are {said}: mix those of one dtype and device at a time.")
    for x in tensors:
        if x.dtype not in _DTYPES or x.layout is not torch.strided or not is_supported(x.device):
            raise InvalidTensorError(
                f"a tensor to be mixed is {x.dtype}, {x.layout}, on {x.device}: needed are dense tensors of "
                f"{', '.join(map(str, _DTYPES))} on {supported_names()}."
            )


def _check_schedule(schedule: ScheduleLike, world: World, *, pushes: bool) -> None:
    if schedule.nodes != world.topology.nodes:
        raise InvalidArgumentError(
            f"the schedule is for {schedule.nodes} nodes, but this world has {world.topology.nodes}: make it by "
            f"world.topology.nodes. To mix ranks instead of nodes, connect with ranks_per_node=1."
        )
    if not schedule.is_doubly_stochastic and not pushes:
        raise InvalidArgumentError(
            f"{schedule} is not doubly stochastic: nodes hear more or less than they send, and plain mixing would lead "
            f"to another mean. Pass push_sum=flexcomm.PushSum(), kept from step to step."
        )


def _check_memory(schedule: ScheduleLike, compressor: Compressor | None, memory: MixResiduals | None) -> None:
    if compressor is None and memory is None:
        return
    if compressor is None:
        raise InvalidArgumentError("memory is for compressed mixing: pass compressor=, too, or leave it out.")
    if memory is None:
        raise InvalidArgumentError(
            "compressed mixing without a memory diverges: pass memory=flexcomm.MixResiduals(), one for each set of "
            "tensors, and keep it from step to step."
        )
    if not schedule.is_fixed:
        raise InvalidArgumentError(
            f"{schedule} changes from step to step, but compressed mixing remembers sums by weights that must not: use "
            f"a fixed graph, such as gossip.fixed_ring(n), gossip.static_exponential(n) or gossip.complete(n)."
        )


def _plan_for(tensors: list[Tensor], part_numel: int | None, compressor: Compressor | None) -> BufferPlan | None:
    """Return how changes are compressed: tensor by tensor or, if ranks of a node share the work, a flat part."""
    if compressor is None:
        return None
    if part_numel is not None:
        return plan_buffer([TensorSpec("part", (part_numel,), torch.float32)], compressor)
    specs = [TensorSpec(str(number), tuple(x.shape), torch.float32) for number, x in enumerate(tensors)]
    return plan_buffer(specs, compressor)
