"""Plans: everything about a mix that follows from shapes, schedule and settings, agreed by all ranks once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexcomm.codec import plan_buffer
from flexcomm.compress import Compressor, TensorSpec
from flexcomm.device import KINDS
from flexcomm.errors import CompressorError, InvalidArgumentError, InvalidTensorError
from flexcomm.gossip.schedule import ScheduleLike
from flexcomm.kernels import BufferPlan, Kernels, choose_kernels
from flexcomm.sync.algorithms import Leg
from flexcomm.sync.engine import Driver, engine_of, legs_of_threads
from flexcomm.sync.plan import BufferPool
from flexcomm.transport import Transport
from flexcomm.world import World

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_BIASED_GAMMA = 0.9
_FEW_MAGNITUDES = 4
_LARGE = {False: (1 << 22,), True: (1 << 11, 1 << 11)}
"""Shapes, flat or of two dims, for which the share that a compressor sends is computed."""


@dataclass(eq=False)
class MixPlan:
    """The common part of all calls with equal shapes, schedule and settings, with the buffers they use again.

    ``ranks`` of this node average their tensors and share the work between nodes: 1 if tensors are shards. Compressed
    payloads have a ``buffer_plan``.
    """

    ranks: int
    gamma: float
    digest: int
    kernels: Kernels
    buffer_plan: BufferPlan | None
    pool: BufferPool
    driver: Driver
    timeout_s: float  # how long a wait for the device may take


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
    if key not in plans:
        plans[key] = _make_plan(world, tensors, schedule, settings)
    plan: MixPlan = plans[key]
    return plan


def _make_plan(world: World, tensors: list[Tensor], schedule: ScheduleLike, settings: MixSettings) -> MixPlan:
    _check_tensors(tensors)
    _check_settings(schedule, world.topology.nodes, settings)
    gamma, compressor = settings.gamma, settings.compressor
    ranks = 1 if settings.sharded else world.intra.size
    buffer_plan = None
    if compressor is not None:
        # Tensor by tensor or, if the ranks of a node share the work, one flat shard.
        numel = sum(x.numel() for x in tensors)
        shapes: list[tuple[int, ...]] = [tuple(x.shape) for x in tensors] if ranks == 1 else [(-(-numel // ranks),)]
        specs = [TensorSpec(str(number), shape, torch.float32) for number, shape in enumerate(shapes)]
        buffer_plan = plan_buffer(specs, compressor)
        gamma = _choose_gamma(compressor, shapes, gamma)
    gamma = 1.0 if gamma is None else gamma
    device = tensors[0].device if tensors else world.device
    fields = {
        "tensors to be mixed": [(list(x.shape), str(x.dtype)) for x in tensors],
        "schedule": schedule.digest,
        "gamma": gamma,
        "compressor": compressor,
        "push-sum": settings.has_push_sum,
        "sharded": settings.sharded,
        "communicator": settings.communicator,
        "device": device.type,
    }
    # Ranks of a node may hold shards of unequal lengths.
    (world.agree_inter if settings.sharded else world.agree)(fields)
    digest = int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=8).digest(), "little", signed=True)
    drivers, key = engine_of(world).drivers, ("mix", settings.communicator, device)
    if key not in drivers:
        groups = world.clone_groups() if world.topology.size > 1 else world
        intra, inter = groups.intra, groups.inter
        legs: dict[Leg, Transport] = {"reduce_inside": intra, "exchange": inter, "gather_inside": intra}
        of_thread = tuple(leg for leg in legs if leg in legs_of_threads(world, device))
        drivers[key] = Driver(world, legs, {"mixing": of_thread} if of_thread else {}, device)
    kernels, pool = choose_kernels(device), BufferPool(device)
    return MixPlan(ranks, gamma, digest, kernels, buffer_plan, pool, drivers[key], world.inter.timeout_s)


def _check_tensors(tensors: list[Tensor]) -> None:
    found = sorted({f"{x.dtype} ({x.layout}) on {x.device}" for x in tensors})
    usable = all(x.dtype in _DTYPES and x.layout is torch.strided and x.device.type in KINDS for x in tensors)
    if len(found) > 1 or not usable:
        raise InvalidTensorError(
            f"the tensors of one mix are {', '.join(found)}: mix those of one dtype and device at a time, dense, of "
            f"{', '.join(map(str, _DTYPES))}, on {' or '.join(KINDS)}."
        )


def _check_settings(schedule: ScheduleLike, nodes: int, settings: MixSettings) -> None:
    if schedule.nodes != nodes:
        raise InvalidArgumentError(
            f"the schedule is for {schedule.nodes} nodes, but this world has {nodes}: make it by world.topology.nodes. "
            f"To mix ranks instead of nodes, connect with ranks_per_node=1."
        )
    if not schedule.is_doubly_stochastic and not settings.has_push_sum:
        raise InvalidArgumentError(
            f"{schedule} is not doubly stochastic, and plain mixing would converge to another mean: pass "
            f"push_sum=flexcomm.PushSum(), kept from step to step."
        )
    if settings.gamma is not None and not 0.0 < settings.gamma <= 1.0:
        raise InvalidArgumentError(f"gamma is {settings.gamma!r}, but must be above 0 and at most 1.")
    if settings.has_residuals != (settings.compressor is not None):
        raise InvalidArgumentError(
            "pass compressor= and residuals=flexcomm.MixResiduals() together: compressed mixing without residuals that "
            "are kept from step to step, for each set of tensors, diverges."
        )
    if settings.compressor is not None and not schedule.is_fixed:
        raise InvalidArgumentError(
            f"{schedule} changes from step to step, but residuals of compressed mixing are sums by its weights: use a "
            f"fixed graph, such as gossip.fixed_ring(n), gossip.static_exponential(n) or gossip.complete(n)."
        )


def _choose_gamma(compressor: Compressor, shapes: list[tuple[int, ...]], asked: float | None) -> float:
    """Return the ``gamma`` that was asked for, or one that converges.

    Of a compressor that drops coefficients it may be at most the share that is sent, or twice that if the largest are
    sent first (measured: docs/decentralized.md): nodes would move by differences that peers do not know yet. It depends
    on the compressor alone, so it is equal on ranks whose shards have different lengths.
    """
    share = most = 1.0
    for large in {_LARGE[len(shape) > 1] for shape in shapes}:
        plan = compressor.plan(TensorSpec("any", large, torch.float32))
        magnitudes = plan.values.format.magnitudes
        if plan.variable_length:
            raise CompressorError(
                f"{compressor} sends payloads of any length, but messages have a fixed length: give threshold a "
                f"capacity, or use top_k."
            )
        if magnitudes == 1:
            raise CompressorError(
                f"{compressor} sends one magnitude for a chunk: differences between nodes concentrate in few elements, "
                f"and mixing diverges on some graphs after hundreds of rounds. Use values='sign2' or 'int8'."
            )
        sent = min(1.0, plan.entries / (plan.chunks * plan.chunk_numel))
        converges = sent if plan.selection.rule.sample_key is not None else 2.0 * sent
        if sent < 1.0 or (magnitudes is not None and magnitudes <= _FEW_MAGNITUDES):
            converges = min(_MOST_BIASED_GAMMA, converges)
        share, most = min(share, sent), min(most, converges)
    if asked is not None and asked > most:
        raise InvalidArgumentError(
            f"gamma={asked:g} diverges with {compressor}, which sends a share of {share:.3g} and drops the rest: pass "
            f"at most gamma={most:.3g}, leave it out, or send everything, as dense(values='int8') does."
        )
    return min(share, most) if asked is None else asked
