"""Trips: how a flat tensor gets to the nodes of this phase, and what comes back joins it.

Whole tensors are averaged inside the node first, every rank of it takes one part to the same local rank of its peers,
and the ranks hand each other the mixed parts. Shards of FSDP are averaged already, and need neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from flexcomm.errors import FlexcommError, SyncError, TransportError
from flexcomm.gossip.letters import LINE_NBYTES, Line, swap
from flexcomm.sync.plan import sum_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from flexcomm.gossip.turn import Turn
    from flexcomm.kernels import Kernels
    from flexcomm.stats import SyncRecord
    from flexcomm.transport import Transport

__all__ = ["Joined", "Rooms", "Trip", "mixed_inside"]


class Joined(NamedTuple):
    """What becomes of ``x``: ``keep * x + sum of weights[j] * others[j]``, and of this node's push-sum weight."""

    keep: float
    others: list[Tensor]
    weights: list[float]
    push_weight: float


class Rooms:
    """Memory that trips of one kind use one after the other, made when first asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rooms: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def get(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        key = name, numel, dtype
        if key not in self._rooms:
            # Not as inference tensors, which no later call could write.
            with torch.inference_mode(False):
                self._rooms[key] = torch.zeros(numel, dtype=dtype, device=self._device)
        return self._rooms[key]


@dataclass(eq=False)
class Trip:
    """What a trip takes along: ``gamma`` is the share of the way to go, ``pushes`` that push-sum's weights count."""

    inter: Transport
    turn: Turn
    line: Line
    gamma: float
    kernels: Kernels
    rooms: Rooms
    record: SyncRecord
    pushes: bool = False

    def cross(self, x: Tensor) -> Joined:
        """Exchange ``x`` with the nodes of this turn."""
        turn = self.turn
        if turn.group:
            return self._add_up(x)
        rooms = [self.rooms.get(f"from {number}", x.numel(), x.dtype) for number in range(len(turn.hears))]
        self.count(len(turn.sends_to), len(rooms), x.nbytes)
        sent = [(peer, x) for peer in turn.sends_to]
        heard = swap(self.inter, self.line, sent, list(zip(turn.hears, rooms, strict=True)))
        shares = [weight * push for weight, push in zip(turn.weights, heard.weights, strict=True)]
        return self._joined(heard.bodies, shares, self.push_weight(turn.keep, turn.weights, heard.weights))

    def push_weight(self, keep: float, weights: Sequence[float], theirs: Sequence[float]) -> float:
        """Return this node's push-sum weight after it has gone the share ``gamma`` of the way; 1 if there is none."""
        if not self.pushes:
            return 1.0
        own = self.line.weight
        heard = keep * own + sum(weight * push for weight, push in zip(weights, theirs, strict=True))
        return (1.0 - self.gamma) * own + self.gamma * heard

    def count(self, sent: int, heard: int, nbytes: int) -> None:
        """Take note of so many letters of ``nbytes``."""
        self.record.count("inter", sent * (nbytes + LINE_NBYTES), heard * (nbytes + LINE_NBYTES))
        self.record.payload_bytes += sent * nbytes

    def _add_up(self, x: Tensor) -> Joined:
        """Add up a group's tensors: each node the part that is its own, which it then gives to all."""
        group, (weight,) = self.turn.group, self.turn.weights
        mine, others = group.index(self.inter.rank), [peer for peer in group if peer != self.inter.rank]
        parts = dict(zip(group, torch.tensor_split(x, len(group)), strict=True))
        own = parts[self.inter.rank]
        rooms = {peer: self.rooms.get(f"part of {peer}", own.numel(), x.dtype) for peer in others}
        self.count(len(others), len(others), own.nbytes)
        sent = [(peer, parts[peer]) for peer in others]
        heard = swap(self.inter, self.line, sent, [(peer, rooms[peer]) for peer in others])
        pushed = dict(zip(others, heard.weights, strict=True)) | {self.inter.rank: self.line.weight}
        # In the group's order, not in that of arrival: the node that adds differs from part to part.
        first, *rest = [rooms.get(peer, own) for peer in group]
        shares = [weight * pushed[peer] for peer in group]
        total = self.rooms.get("total", x.numel(), x.dtype)
        sums = dict(zip(group, torch.tensor_split(total, len(group)), strict=True))
        self.kernels.mix_(first, shares[0], rest, shares[1:], sums[group[mine]])
        self.count(len(others), len(others), own.nbytes)
        self.inter.send_recv(
            [(peer, sums[group[mine]]) for peer in others], [(peer, sums[peer]) for peer in others]
        ).wait()
        return self._joined([total], [1.0], self.push_weight(self.turn.keep, [1.0], [sum(shares)]))

    def _joined(self, others: list[Tensor], shares: list[float], push_weight: float) -> Joined:
        kept = ((1.0 - self.gamma) + self.gamma * self.turn.keep) * self.line.weight / push_weight
        return Joined(kept, others, [self.gamma * share / push_weight for share in shares], push_weight)


def mixed_inside(trip: Trip, cross: Callable[[Tensor], Joined], intra: Transport, x: Tensor) -> Joined:
    """Average ``x`` inside the node, ``cross`` with one part of it, and return what all ranks of the node then have.

    If one of them cannot cross, all raise: they would wait for its part.
    """
    numel, dtype = -(-x.numel() // intra.size), sum_dtype(x.dtype)
    rows = trip.rooms.get("rows", intra.size * numel, dtype)
    rows[: x.numel()] = x
    summed = trip.rooms.get("sum", numel, dtype)
    trip.record.count("intra", (intra.size - 1) * summed.nbytes, (intra.size - 1) * summed.nbytes)
    intra.reduce_scatter(rows.view(intra.size, numel), summed).wait()
    part = trip.rooms.get("part", numel, x.dtype).copy_(summed.mul_(1.0 / intra.size))
    came = _crossed_by_all(cross, intra, part)
    trip.kernels.mix_(part, came.keep, came.others, came.weights, part)
    whole = trip.rooms.get("whole", intra.size * numel, x.dtype)
    trip.record.count("intra", (intra.size - 1) * part.nbytes, (intra.size - 1) * part.nbytes)
    intra.all_gather(part, whole.view(intra.size, numel)).wait()
    return Joined(0.0, [whole[: x.numel()]], [1.0], came.push_weight)


def _crossed_by_all(cross: Callable[[Tensor], Joined], intra: Transport, part: Tensor) -> Joined:
    came, failure = None, None
    try:
        came = cross(part)
    except TransportError:
        raise
    except FlexcommError as error:
        failure = error
    failed = intra.all_reduce(torch.tensor([float(came is None)], device=part.device)).wait()
    if failure is not None:
        raise failure
    if came is None or failed.item():
        raise SyncError("another rank of this node could not mix its part, and nothing was changed; it says why.")
    return came
