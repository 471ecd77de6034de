"""The verb of decentralized training: nodes mix their tensors with those of few others, instead of all.

``x`` becomes ``W x``, where ``W`` are the weights of one phase of a schedule: over nodes, and over the ranks of a node
in equal parts. What is bound when a mix starts, phase and weights among it, is what it ends by.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypedDict, TypeVar, Unpack, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flexcomm.bucket import check_numbers, plan_bucket
from flexcomm.compress import TensorSpec
from flexcomm.errors import InvalidArgumentError, InvalidTensorError
from flexcomm.gossip.carrier import carrier_of
from flexcomm.gossip.compressed import MixMemory, choose_gamma, cross_compressed, spelled_out
from flexcomm.gossip.letters import Line
from flexcomm.gossip.trip import Joined, Rooms, Trip, mixed_inside
from flexcomm.gossip.turn import turn_of
from flexcomm.kernels import Kernels, choose_kernels
from flexcomm.stats import SyncRecord
from flexcomm.world import World, default_world

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from concurrent.futures import Future

    from flexcomm.bucket import BucketPlan
    from flexcomm.compress import Compressor
    from flexcomm.gossip.push_sum import PushSum
    from flexcomm.gossip.schedule import ScheduleLike
    from flexcomm.gossip.turn import Turn

__all__ = ["MixHandle", "MixOptions", "Mixed", "mix", "plan_mix", "start_mix"]

_MOST_KINDS = 256
_MOST_SPARE = 4
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

T = TypeVar("T", Tensor, list[Tensor])


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
    memory: MixMemory | None
    """What compressed mixing remembers of these tensors."""
    lane: str
    """Mixes of one lane start in the same order on all ranks; those of several need not agree on an order."""
    out: Tensor | Sequence[Tensor] | None
    """Where the mixed tensors go, instead of new ones; may be the tensors themselves."""


class Mixed(NamedTuple, Generic[T]):
    """The mixed tensors, and how far that is from what this rank had: ``|W x - x|^2``, as a float64 scalar."""

    tensors: T
    squared_distance: Tensor


def mix(tensors: T, schedule: ScheduleLike, step: int, **options: Unpack[MixOptions]) -> Mixed[T]:
    """Return ``W x`` for every tensor, where ``W`` are the weights of the schedule's phase at ``step``.

    All ranks call it with equal shapes, steps and options. Nothing is changed by a call that raises.
    """
    return start_mix(tensors, schedule, step, **options).wait()


def plan_mix(tensors: list[Tensor], schedule: ScheduleLike, **options: Unpack[MixOptions]) -> None:
    """Agree on a mix, and lay its cables, without sending anything: later ones need no agreement. All ranks call it.

    For those who start mixes where ranks may come in another order, such as the hooks of a backward pass.
    """
    _kind_for(_world_of(options), tensors, schedule, options)


def start_mix(tensors: T, schedule: ScheduleLike, step: int, **options: Unpack[MixOptions]) -> MixHandle[T]:
    """Start :func:`mix`, and return at once; the tensors may be read, but not changed, until it is waited for."""
    world = _world_of(options)
    single = isinstance(tensors, Tensor)
    xs = cast("list[Tensor]", [tensors] if single else list(tensors))
    kind = _kind_for(world, xs, schedule, options)
    check_numbers(step, 0)
    outputs = _outputs_for(xs, options.get("out"))
    call = _Call(world, kind, [x.detach() for x in xs], outputs, schedule, step, options)
    return MixHandle(call, cast("T", outputs[0] if single else outputs))


class MixHandle(Generic[T]):
    """A mix under way. Handles may be waited for in any order."""

    def __init__(self, call: _Call, result: T) -> None:
        self._call = call
        self._result: T = result

    def wait(self) -> Mixed[T]:
        """Return the mixed tensors; calling again returns them again. Raises what went wrong, every time."""
        return Mixed(self._result, self._call.finish())

    def arrive(self) -> None:
        """Return when all has arrived, and the tensors are no longer read; they change when it is waited for."""
        self._call.arrive()

    def drop(self) -> None:
        """Let it arrive, and do nothing with what came: tensors, memory and weight stay what they are."""
        self._call.drop()

    def done(self) -> bool:
        """Return whether all has arrived: then ``wait`` has only the mixing to do."""
        return self._call.has_arrived()

    @property
    def record(self) -> SyncRecord:
        """What it cost so far."""
        return self._call.record


@dataclass(eq=False)
class _Kind:
    """What calls that ask for the same have in common."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    inside: bool
    lane: str
    gamma: float
    digest: int
    kernels: Kernels
    plan: BucketPlan | None
    free: list[Rooms] = field(default_factory=list)

    def take_rooms(self) -> Rooms:
        return self.free.pop() if self.free else Rooms(self.device)

    def give_back(self, rooms: Rooms) -> None:
        if len(self.free) < _MOST_SPARE:
            self.free.append(rooms)


class _Call:
    """One mix, from the tensors of its start to its end."""

    def __init__(
        self,
        world: World,
        kind: _Kind,
        tensors: list[Tensor],
        outputs: list[Tensor],
        schedule: ScheduleLike,
        step: int,
        options: MixOptions,
    ) -> None:
        self.record = SyncRecord(syncs=1, dense_bytes=kind.numel * kind.dtype.itemsize)
        self._world, self._kind, self._outputs, self._step = world, kind, outputs, step
        self._push_sum, self._memory = options.get("push_sum"), options.get("memory")
        if self._memory is not None:
            self._memory.claim()
        self._rooms = kind.take_rooms()
        self._flat = _flat_of(tensors, self._rooms, kind)
        self._arriving: Future[Joined] | None = None
        self._moved: Tensor | None = None
        if world.topology.size > 1:
            self._depart(turn_of(schedule.phase(step), world.topology.node))

    def _depart(self, turn: Turn) -> None:
        carrier, kind = carrier_of(self._world, self._kind.lane), self._kind
        # Also by nodes that have nobody to meet now: all count the same calls.
        carrier.sequence += 1
        if turn.is_idle and not kind.inside:
            return
        trip = Trip(
            carrier.cables.inter,
            turn if kind.plan is None else spelled_out(turn, self._world.topology.node),
            Line(kind.digest, self._step, carrier.sequence, 1.0 if self._push_sum is None else self._push_sum.weight),
            kind.gamma,
            kind.kernels,
            self._rooms,
            self.record,
            pushes=self._push_sum is not None,
        )
        cross: Callable[[Tensor], Joined] = trip.cross
        if kind.plan is not None and self._memory is not None:
            cross = partial(cross_compressed, trip, kind.plan, self._memory)
        if kind.inside:
            self._arriving = carrier.submit(partial(mixed_inside, trip, cross, carrier.cables.intra, self._flat))
        else:
            self._arriving = carrier.submit(partial(cross, self._flat))

    def has_arrived(self) -> bool:
        return self._arriving is None or self._arriving.done()

    def arrive(self) -> Joined:
        """Return what came; where nothing travels, that all stays as it is."""
        if self._arriving is None:
            return Joined(1.0, [], [], 1.0)
        try:
            with self.record.time("waiting"):
                came = self._arriving.result()
        except BaseException:
            self._release()
            raise
        carrier_of(self._world, self._kind.lane).settle()
        return came

    def drop(self) -> None:
        self.arrive()
        self._release()

    def finish(self) -> Tensor:
        """Mix what came with what is here, once, and return the squared distance."""
        if self._moved is None:
            self._moved = self._mix()
            self._release()
            self._world.enter(self.record, step=self._step)
            self._kind.give_back(self._rooms)
        return self._moved

    def _release(self) -> None:
        if self._memory is not None:
            self._memory.release()

    def _mix(self) -> Tensor:
        came = self.arrive()
        with torch.no_grad():
            out = _flat_output(self._outputs, self._rooms, self._kind)
            moved = self._kind.kernels.mix_(self._flat, came.keep, came.others, came.weights, out)
            _hand_over(out, self._outputs)
        if self._arriving is not None:
            if self._memory is not None:
                self._memory.commit()
            if self._push_sum is not None:
                self._push_sum.weight = came.push_weight
        return moved


_kinds: WeakKeyDictionary[World, dict[Hashable, _Kind]] = WeakKeyDictionary()


def _world_of(options: MixOptions) -> World:
    strange = options.keys() - MixOptions.__annotations__.keys()
    if strange:
        raise InvalidArgumentError(
            f"got {', '.join(sorted(strange))}, but the options are {', '.join(MixOptions.__annotations__)}."
        )
    return options.get("world") or default_world()


def _kind_for(world: World, tensors: list[Tensor], schedule: ScheduleLike, options: MixOptions) -> _Kind:
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


def _make_kind(world: World, tensors: list[Tensor], schedule: ScheduleLike, options: MixOptions) -> _Kind:
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
    (world.agree_between if sharded else world.agree)(fields)
    if world.topology.size > 1:
        carrier_of(world, lane)
    digest = int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=8).digest(), "little", signed=True)
    device = tensors[0].device if tensors else world.device
    dtype = tensors[0].dtype if tensors else torch.float32
    return _Kind(numel, dtype, device, inside, lane, gamma, digest, choose_kernels(device), plan)


def _check_tensors(tensors: list[Tensor]) -> None:
    kinds = {(x.dtype, x.device) for x in tensors}
    if len(kinds) > 1:
        said = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise InvalidTensorError(f"the tensors of one mix are {said}: mix those of one dtype and device at a time.")
    for x in tensors:
        if x.dtype not in _DTYPES or x.layout is not torch.strided or x.device.type not in ("cpu", "cuda"):
            raise InvalidTensorError(
                f"a tensor to be mixed is {x.dtype}, {x.layout}, on {x.device}: needed are dense tensors of "
                f"{', '.join(map(str, _DTYPES))} on cpu or cuda."
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


def _check_memory(schedule: ScheduleLike, compressor: Compressor | None, memory: MixMemory | None) -> None:
    if compressor is None and memory is None:
        return
    if compressor is None:
        raise InvalidArgumentError("memory is for compressed mixing: pass compressor=, too, or leave it out.")
    if memory is None:
        raise InvalidArgumentError(
            "compressed mixing without a memory diverges: pass memory=flexcomm.MixMemory(), one for each set of "
            "tensors, and keep it from step to step."
        )
    if not schedule.is_fixed:
        raise InvalidArgumentError(
            f"{schedule} changes from step to step, but compressed mixing remembers sums by weights that must not: use "
            f"a fixed graph, such as gossip.fixed_ring(n), gossip.static_exponential(n) or gossip.complete(n)."
        )


def _plan_for(tensors: list[Tensor], part_numel: int | None, compressor: Compressor | None) -> BucketPlan | None:
    """Return how changes are compressed: tensor by tensor or, if ranks of a node share the work, a flat part."""
    if compressor is None:
        return None
    if part_numel is not None:
        return plan_bucket([TensorSpec("part", (part_numel,), torch.float32)], compressor)
    specs = [TensorSpec(str(number), tuple(x.shape), torch.float32) for number, x in enumerate(tensors)]
    return plan_bucket(specs, compressor)


def _outputs_for(tensors: list[Tensor], out: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    if out is None:
        return [torch.empty_like(x, memory_format=torch.contiguous_format, requires_grad=False) for x in tensors]
    outputs = [out] if isinstance(out, Tensor) else list(out)
    if [(x.shape, x.dtype, x.device) for x in outputs] != [(x.shape, x.dtype, x.device) for x in tensors]:
        raise InvalidTensorError(
            f"out has {[list(x.shape) for x in outputs]} for tensors of {[list(x.shape) for x in tensors]}: pass one "
            f"for each, of the same shape, dtype and device; the tensors themselves will do."
        )
    return outputs


def _flat_of(tensors: list[Tensor], rooms: Rooms, kind: _Kind) -> Tensor:
    """Return all elements one behind the other: the one tensor itself, or a copy of several."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1)
    flat = rooms.get("flat", kind.numel, kind.dtype)
    if tensors:
        torch.cat([x.reshape(-1) for x in tensors], out=flat)
    return flat


def _flat_output(outputs: list[Tensor], rooms: Rooms, kind: _Kind) -> Tensor:
    if len(outputs) == 1 and outputs[0].is_contiguous():
        return outputs[0].detach().view(-1)
    return rooms.get("out", kind.numel, kind.dtype)


def _hand_over(flat: Tensor, outputs: list[Tensor]) -> None:
    """Copy what was mixed to where it is wanted, unless it is there."""
    if len(outputs) == 1 and outputs[0].is_contiguous():
        return
    parts = torch.split(flat, [x.numel() for x in outputs])
    for part, out in zip(parts, outputs, strict=True):
        out.detach().copy_(part.view(out.shape))
