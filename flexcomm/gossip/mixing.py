"""The verb of decentralized training: nodes mix their tensors with those of few others, instead of all.

``x`` becomes ``W x``, where ``W`` are the weights of one phase of a schedule: over nodes, and over the ranks of a node
in equal parts. What is bound when a mix starts, phase and weights among it, is what it ends by.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, Unpack, cast

import torch
from torch import Tensor

from flexcomm.codec import check_numbers
from flexcomm.errors import InvalidTensorError
from flexcomm.gossip.carrier import carrier_of
from flexcomm.gossip.compressed import cross_compressed, spelled_out
from flexcomm.gossip.kinds import Kind, MixOptions, kind_for, world_of
from flexcomm.gossip.letters import Line
from flexcomm.gossip.trip import Joined, Rooms, Trip, mixed_inside
from flexcomm.gossip.turn import turn_of
from flexcomm.stats import SyncRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from flexcomm.gossip.schedule import ScheduleLike
    from flexcomm.gossip.turn import Turn
    from flexcomm.world import World

__all__ = ["MixHandle", "MixOptions", "MixResult", "mix", "plan_mix", "start_mix"]

T = TypeVar("T", Tensor, list[Tensor])


class MixResult(NamedTuple, Generic[T]):
    """The mixed tensors, and how far that is from what this rank had: ``|W x - x|^2``, as a float64 scalar."""

    tensors: T
    squared_distance: Tensor


def mix(tensors: T, schedule: ScheduleLike, step: int, **options: Unpack[MixOptions]) -> MixResult[T]:
    """Return ``W x`` for every tensor, where ``W`` are the weights of the schedule's phase at ``step``.

    All ranks call it with equal shapes, steps and options. Nothing is changed by a call that raises.
    """
    return start_mix(tensors, schedule, step, **options).wait()


def plan_mix(tensors: list[Tensor], schedule: ScheduleLike, **options: Unpack[MixOptions]) -> None:
    """Agree on a mix, and lay its cables, without sending anything: later ones need no agreement. All ranks call it.

    For those who start mixes where ranks may come in another order, such as the hooks of a backward pass.
    """
    kind_for(world_of(options), tensors, schedule, options)


def start_mix(tensors: T, schedule: ScheduleLike, step: int, **options: Unpack[MixOptions]) -> MixHandle[T]:
    """Start :func:`mix`, and return at once; the tensors may be read, but not changed, until it is waited for."""
    world = world_of(options)
    single = isinstance(tensors, Tensor)
    xs = cast("list[Tensor]", [tensors] if single else list(tensors))
    kind = kind_for(world, xs, schedule, options)
    check_numbers(step, 0)
    outputs = _outputs_for(xs, options.get("out"))
    call = _Call(world, kind, [x.detach() for x in xs], outputs, schedule, step, options)
    return MixHandle(call, cast("T", outputs[0] if single else outputs))


class MixHandle(Generic[T]):
    """A mix under way. Handles may be waited for in any order."""

    def __init__(self, call: _Call, result: T) -> None:
        self._call = call
        self._result: T = result

    def wait(self) -> MixResult[T]:
        """Return the mixed tensors; calling again returns them again. Raises what went wrong, every time."""
        return MixResult(self._result, self._call.finish())

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


class _Call:
    """One mix, from the tensors of its start to its end."""

    def __init__(
        self,
        world: World,
        kind: Kind,
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
            self._world.add_stats(self.record, step=self._step)
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


def _flat_of(tensors: list[Tensor], rooms: Rooms, kind: Kind) -> Tensor:
    """Return all elements one behind the other: the one tensor itself, or a copy of several."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1)
    flat = rooms.get("flat", kind.numel, kind.dtype)
    if tensors:
        torch.cat([x.reshape(-1) for x in tensors], out=flat)
    return flat


def _flat_output(outputs: list[Tensor], rooms: Rooms, kind: Kind) -> Tensor:
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
