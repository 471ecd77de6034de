"""Plans: everything about a mix that follows from shapes, schedule and settings, agreed by all ranks once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flexcomm.codec import plan_buffer
from flexcomm.compress import Compressor, TensorSpec
from flexcomm.device import is_supported, supported_names
from flexcomm.errors import InvalidArgumentError, InvalidTensorError
from flexcomm.gossip.phase import Phase
from flexcomm.gossip.schedule import ScheduleLike
from flexcomm.gossip.state import choose_gamma
from flexcomm.kernels import BufferPlan, Kernels, choose_kernels
from flexcomm.sync.algorithms import Leg
from flexcomm.sync.engine import CommThreads, engine_of
from flexcomm.sync.plan import BufferPool
from flexcomm.transport import Transport
from flexcomm.world import World

_PAIR = 2
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Round:
    """The sends and receives of one node in a phase, and its weights.

    Afterwards the node holds ``self_weight * x + sum of weights[j] * (x of receives_from[j])``. If ``group`` is not
    empty, it holds more than two nodes, this one included, that all-reduce instead: then the node holds
    ``self_weight * x + weights[0] * (sum over the group)``.
    """

    sends_to: tuple[int, ...] = ()
    receives_from: tuple[int, ...] = ()
    self_weight: float = 1.0
    weights: tuple[float, ...] = ()
    group: tuple[int, ...] = ()

    @property
    def weight_sum(self) -> float:
        """The sum of all weights: 1, unless a directed graph gives the node more or less than it sends."""
        return self.self_weight + (len(self.group) or 1) * sum(self.weights)

    @property
    def is_idle(self) -> bool:
        """Whether the node has no peer."""
        return not (self.sends_to or self.receives_from or self.group)


@lru_cache(maxsize=4096)
def round_of(phase: Phase, node: int, *, reduces: bool = True) -> Round:
    """Return the round of ``node`` in ``phase``; unless it ``reduces``, it has a message for each node of a group."""
    group = phase.group_of(node)
    if group is not None:
        if len(group.members) > _PAIR and reduces:
            self_weight = group.own_weight - group.peer_weight
            return Round(self_weight=self_weight, weights=(group.peer_weight,), group=group.members)
        others = tuple(member for member in group.members if member != node)
        return Round(others, others, group.own_weight, (group.peer_weight,) * len(others))
    incoming = phase.in_edges(node)
    return Round(
        tuple(edge.target for edge in phase.out_edges(node)),
        tuple(edge.source for edge in incoming),
        phase.self_weight(node),
        tuple(edge.weight for edge in incoming),
    )


@dataclass(eq=False)
class MixPlan:
    """The common part of all calls with equal shapes, schedule and settings, with the buffers they use again.

    ``ranks`` is the number of ranks of this node that average their tensors and share the work between nodes: 1 if
    tensors are shards. ``buffer_plan`` is the layout of a compressed payload, if payloads are compressed. ``threads``
    drive the mixes; a world of one rank has none.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device
    ranks: int
    gamma: float
    digest: int
    kernels: Kernels
    buffer_plan: BufferPlan | None
    pool: BufferPool
    threads: CommThreads | None


class MixSettings(NamedTuple):
    """The arguments of a call, beside its tensors and schedule."""

    sharded: bool
    gamma: float | None
    compressor: Compressor | None
    communicator: str
    has_push_sum: bool
    has_residuals: bool


def plan_for(world: World, tensors: list[Tensor], schedule: ScheduleLike, settings: MixSettings) -> MixPlan:
    """Return the plan of a call. The first call that needs it makes it, once all ranks agree on it."""
    key = ("mix", tuple([(x.shape, x.dtype, x.device) for x in tensors]), schedule.digest, settings)
    plans = engine_of(world).plans
    plan: MixPlan | None = plans.get(key)
    if plan is None:
        plan = plans[key] = _make_plan(world, tensors, schedule, settings)
    return plan


def _make_plan(world: World, tensors: list[Tensor], schedule: ScheduleLike, settings: MixSettings) -> MixPlan:
    _check_tensors(tensors)
    _check_schedule(schedule, world, settings)
    _check_compression(schedule, settings)
    gamma, compressor = settings.gamma, settings.compressor
    ranks = 1 if settings.sharded else world.intra.size
    numel = sum(x.numel() for x in tensors)
    buffer_plan = None
    if compressor is not None:
        # Tensor by tensor or, if the ranks of a node share the work, one flat shard.
        shapes = [tuple(x.shape) for x in tensors] if ranks == 1 else [(-(-numel // ranks),)]
        specs = [TensorSpec(str(number), shape, torch.float32) for number, shape in enumerate(shapes)]
        buffer_plan = plan_buffer(specs, compressor)
        gamma = choose_gamma(compressor, set(map(len, shapes)), gamma)
    gamma = 1.0 if gamma is None else gamma
    fields = {
        "tensors to be mixed": [(list(x.shape), str(x.dtype)) for x in tensors],
        "schedule": schedule.digest,
        "gamma": gamma,
        "compressor": compressor,
        "push-sum": settings.has_push_sum,
        "sharded": settings.sharded,
        "communicator": settings.communicator,
    }
    # Ranks of a node may hold shards of unequal lengths.
    (world.agree_inter if settings.sharded else world.agree)(fields)
    digest = int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=8).digest(), "little", signed=True)
    device = tensors[0].device if tensors else world.device
    dtype = tensors[0].dtype if tensors else torch.float32
    return MixPlan(
        numel,
        dtype,
        device,
        ranks,
        gamma,
        digest,
        choose_kernels(device),
        buffer_plan,
        BufferPool(device),
        _threads_of(world, settings.communicator),
    )


def _threads_of(world: World, communicator: str) -> CommThreads | None:
    """Return the thread that drives the mixes of a communicator, made on first use, with cloned groups.

    Ranks start the mixes of one communicator in the same order. Those of different ones need no common order.
    """
    if world.topology.size == 1:
        return None
    communicators = engine_of(world).communicators
    if communicator not in communicators:
        groups = world.clone_groups()
        transports: dict[Leg, Transport] = {
            "reduce_inside": groups.intra,
            "exchange": groups.inter,
            "gather_inside": groups.intra,
        }
        legs = {"mixing": tuple(transports)}
        communicators[communicator] = CommThreads(world, transports, legs, world.device)
    return communicators[communicator]


def _check_tensors(tensors: list[Tensor]) -> None:
    found = {(x.dtype, x.device) for x in tensors}
    if len(found) > 1:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in found))
        raise InvalidTensorError(f"the tensors of one mix are {listed}: mix those of one dtype and device at a time.")
    for x in tensors:
        if x.dtype not in _DTYPES or x.layout is not torch.strided or not is_supported(x.device):
            raise InvalidTensorError(
                f"a tensor to be mixed is {x.dtype}, {x.layout}, on {x.device}: needed are dense tensors of "
                f"{', '.join(map(str, _DTYPES))} on {supported_names()}."
            )


def _check_schedule(schedule: ScheduleLike, world: World, settings: MixSettings) -> None:
    if schedule.nodes != world.topology.nodes:
        raise InvalidArgumentError(
            f"the schedule is for {schedule.nodes} nodes, but this world has {world.topology.nodes}: make it by "
            f"world.topology.nodes. To mix ranks instead of nodes, connect with ranks_per_node=1."
        )
    if not schedule.is_doubly_stochastic and not settings.has_push_sum:
        raise InvalidArgumentError(
            f"{schedule} is not doubly stochastic: nodes receive more or less weight than they send, and plain mixing "
            f"would converge to another mean. Pass push_sum=flexcomm.PushSum(), kept from step to step."
        )
    if settings.gamma is not None and not 0.0 < settings.gamma <= 1.0:
        raise InvalidArgumentError(f"gamma is {settings.gamma!r}, but must be above 0 and at most 1.")


def _check_compression(schedule: ScheduleLike, settings: MixSettings) -> None:
    if settings.compressor is None and not settings.has_residuals:
        return
    if settings.compressor is None:
        raise InvalidArgumentError("residuals= is for compressed mixing: pass compressor=, too, or leave it out.")
    if not settings.has_residuals:
        raise InvalidArgumentError(
            "compressed mixing without residuals diverges: pass residuals=flexcomm.MixResiduals(), one for each set of "
            "tensors, and keep it from step to step."
        )
    if not schedule.is_fixed:
        raise InvalidArgumentError(
            f"{schedule} changes from step to step, but residuals of compressed mixing are sums by its weights: use a "
            f"fixed graph, such as gossip.fixed_ring(n), gossip.static_exponential(n) or gossip.complete(n)."
        )
