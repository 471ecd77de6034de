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
from flexcomm.kernels import BufferPlan, Kernels, TensorPlan, choose_kernels
from flexcomm.sync.algorithms import Leg
from flexcomm.sync.engine import CommThreads, engine_of
from flexcomm.sync.plan import BufferPool
from flexcomm.transport import Transport
from flexcomm.world import World

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_BIASED_GAMMA = 0.9
_FEW_MAGNITUDES = 4
_LARGE = {False: (1 << 22,), True: (1 << 11, 1 << 11)}
"""Shapes for which the share that a compressor sends is computed: flat, or of two dims."""


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
    _check_settings(schedule, world.topology.nodes, settings)
    gamma, compressor = settings.gamma, settings.compressor
    ranks = 1 if settings.sharded else world.intra.size
    numel = sum(x.numel() for x in tensors)
    buffer_plan = None
    if compressor is not None:
        # Tensor by tensor or, if the ranks of a node share the work, one flat shard.
        shapes = [tuple(x.shape) for x in tensors] if ranks == 1 else [(-(-numel // ranks),)]
        specs = [TensorSpec(str(number), shape, torch.float32) for number, shape in enumerate(shapes)]
        buffer_plan = plan_buffer(specs, compressor)
        gamma = _choose_gamma(compressor, {len(shape) > 1 for shape in shapes}, gamma)
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
    kernels, pool, threads = choose_kernels(device), BufferPool(device), _threads_of(world, settings.communicator)
    return MixPlan(numel, dtype, device, ranks, gamma, digest, kernels, buffer_plan, pool, threads)


def _threads_of(world: World, communicator: str) -> CommThreads | None:
    """Return the thread that drives the mixes of a communicator, made on first use, with cloned groups."""
    if world.topology.size == 1:
        return None
    communicators = engine_of(world).communicators
    if communicator not in communicators:
        groups = world.clone_groups()
        intra, inter = groups.intra, groups.inter
        transports: dict[Leg, Transport] = {"reduce_inside": intra, "exchange": inter, "gather_inside": intra}
        communicators[communicator] = CommThreads(world, transports, {"mixing": tuple(transports)}, world.device)
    return communicators[communicator]


def _check_tensors(tensors: list[Tensor]) -> None:
    found = {(x.dtype, x.device) for x in tensors}
    if len(found) > 1:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in found))
        raise InvalidTensorError(f"the tensors of one mix are {listed}: mix those of one dtype and device at a time.")
    for x in tensors:
        if x.dtype not in _DTYPES or x.layout is not torch.strided or x.device.type not in KINDS:
            raise InvalidTensorError(
                f"a tensor to be mixed is {x.dtype}, {x.layout}, on {x.device}: needed are dense tensors of "
                f"{', '.join(map(str, _DTYPES))} on {' or '.join(KINDS)}."
            )


def _check_settings(schedule: ScheduleLike, nodes: int, settings: MixSettings) -> None:
    if schedule.nodes != nodes:
        raise InvalidArgumentError(
            f"the schedule is for {schedule.nodes} nodes, but this world has {nodes}: make it by world.topology.nodes. "
            f"To mix ranks instead of nodes, connect with ranks_per_node=1."
        )
    if not schedule.is_doubly_stochastic and not settings.has_push_sum:
        raise InvalidArgumentError(
            f"{schedule} is not doubly stochastic: nodes receive more or less weight than they send, and plain mixing "
            f"would converge to another mean. Pass push_sum=flexcomm.PushSum(), kept from step to step."
        )
    if settings.gamma is not None and not 0.0 < settings.gamma <= 1.0:
        raise InvalidArgumentError(f"gamma is {settings.gamma!r}, but must be above 0 and at most 1.")
    if settings.has_residuals and settings.compressor is None:
        raise InvalidArgumentError("residuals= is for compressed mixing: pass compressor=, too, or leave it out.")
    if settings.compressor is not None and not settings.has_residuals:
        raise InvalidArgumentError(
            "compressed mixing without residuals diverges: pass residuals=flexcomm.MixResiduals(), one for each set of "
            "tensors, and keep it from step to step."
        )
    if settings.compressor is not None and not schedule.is_fixed:
        raise InvalidArgumentError(
            f"{schedule} changes from step to step, but residuals of compressed mixing are sums by its weights: use a "
            f"fixed graph, such as gossip.fixed_ring(n), gossip.static_exponential(n) or gossip.complete(n)."
        )


def _choose_gamma(compressor: Compressor, kinds: set[bool], asked: float | None) -> float:
    """Return ``gamma`` for flat tensors, or those of several dims: the one asked for, or one that converges.

    A compressor that drops coefficients is biased. With a large ``gamma`` nodes move by differences that peers do not
    know yet, and diverge. ``gamma`` may be at most the share that is sent, or twice that share if the largest
    coefficients are sent first (measured: docs/decentralized.md). It depends on the compressor alone, so it is equal on
    ranks whose shards have different lengths.
    """
    plans = [compressor.plan(TensorSpec("any", _LARGE[kind], torch.float32)) for kind in kinds]
    if any(plan.variable_length for plan in plans):
        raise CompressorError(
            f"{compressor} sends payloads of any length, but messages have a fixed length: give threshold a capacity, "
            f"or use top_k."
        )
    if any(plan.values.format.magnitudes == 1 for plan in plans):
        raise CompressorError(
            f"{compressor} sends one magnitude for a chunk: differences between nodes concentrate in few elements, and "
            f"mixing diverges on some graphs after hundreds of rounds. Use values='sign2' or 'int8'."
        )
    share, most = map(min, zip((1.0, 1.0), *map(_share_and_most_gamma, plans), strict=True))
    if asked is not None and asked > most:
        raise InvalidArgumentError(
            f"gamma={asked:g} diverges with {compressor}, which sends a share of {share:.3g} and drops the rest: pass "
            f"at most gamma={most:.3g}, leave it out, or send everything, as dense(values='int8') does."
        )
    return min(share, most) if asked is None else asked


def _share_and_most_gamma(plan: TensorPlan) -> tuple[float, float]:
    """Return the share of a tensor's coefficients that is sent, and the largest ``gamma`` that is known to converge."""
    share = min(1.0, plan.entries / (plan.chunks * plan.chunk_numel))
    magnitudes = plan.values.format.magnitudes
    coarse = magnitudes is not None and magnitudes <= _FEW_MAGNITUDES
    if share == 1.0:
        return share, _MOST_BIASED_GAMMA if coarse else 1.0
    drawn = plan.selection.rule.sample_key is not None
    return share, min(_MOST_BIASED_GAMMA, share if drawn else 2.0 * share)
