"""Compressed mixing: nodes send what changed since their peers last heard of them, and remember what those know.

CHOCO's rule (Koloskova et al. 2019) for symmetric graphs, and the same on push-sum's numerators (Taheri et al. 2020)
for directed ones. Every node keeps ``public``, what its peers know of its ``x``, and ``heard``, the weighted sum of
what it knows of all it hears, itself included. In a round it sends ``q = Q(x - public)``, and then

    public += q;  heard += sum of w_j * q_j;  x += gamma * (heard - public)

``heard`` follows the graph's weights, so these must not change from step to step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from flexcomm.codec import Decoder, Encoder, regions_of
from flexcomm.compress import TensorSpec
from flexcomm.errors import CompressorError, InvalidArgumentError, NonFiniteError
from flexcomm.gossip.letters import swap
from flexcomm.gossip.trip import Joined, Trip
from flexcomm.kernels import Momentum

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from flexcomm.codec import BufferPlan
    from flexcomm.compress import Compressor
    from flexcomm.gossip.turn import Turn
    from flexcomm.kernels import TensorPlan

__all__ = ["MixResiduals", "choose_gamma", "cross_compressed", "spelled_out"]

_MOST_COARSE = 0.9
_FEW_MAGNITUDES = 4
_LARGE = {False: (1 << 22,), True: (1 << 11, 1 << 11)}
"""Tensors on which a compressor shows the share it sends, flat or not."""


class _Slot(NamedTuple):
    public: Tensor
    heard: Tensor


class MixResiduals:
    """What compressed mixing remembers of one set of tensors: what peers know of them, and what is known of peers.

    Begins at zero or, where all nodes hold the same at first, with :meth:`begin` at that, which saves sending it. A
    round that fails leaves it as it was.
    """

    def __init__(self) -> None:
        self._slot: _Slot | None = None
        self._next: _Slot | None = None
        self._in_use = False

    def claim(self) -> None:
        """Take it into use until :meth:`release`: two rounds at once would each forget what the other sent."""
        if self._in_use:
            raise InvalidArgumentError(
                "this memory is in use by a mix under way: wait for its handle first, and use one memory for each set "
                "of tensors."
            )
        self._in_use = True

    def release(self) -> None:
        """Give it free again."""
        self._in_use = False

    def begin(self, x: Tensor, heard_weight: float = 1.0) -> None:
        """Take note that all nodes hold ``x``, flat; ``heard_weight`` is the sum of a node's weights."""
        known = x.detach().reshape(-1).to(torch.float32, copy=True)
        self._slot = _Slot(known, known * heard_weight)

    def lend(self, numel: int, device: torch.device) -> tuple[_Slot, _Slot]:
        """Return what is known, and room for what will be once :meth:`commit` is called."""
        with torch.inference_mode(False):
            if self._slot is None:
                self._slot = _Slot(*torch.zeros(2, numel, device=device))
            if self._slot.public.numel() != numel or self._slot.public.device != device:
                raise InvalidArgumentError(
                    f"this memory is of {self._slot.public.numel()} elements on {self._slot.public.device}, but "
                    f"{numel} on {device} are to be mixed: use one memory for each set of tensors."
                )
            if self._next is None:
                self._next = _Slot(*torch.empty(2, numel, device=device))
        return self._slot, self._next

    def commit(self) -> None:
        """Keep what the last round found."""
        self._slot, self._next = self._next, self._slot

    def state_dict(self) -> dict[str, Tensor]:
        """Return both, not as copies; nothing before the first round."""
        return {} if self._slot is None else self._slot._asdict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        self._slot = _Slot(**{name: kept.detach().clone() for name, kept in state.items()}) if state else None
        self._next = None


def choose_gamma(compressor: Compressor, dims: Iterable[int], asked: float | None) -> float:
    """Return the share of the way to go for tensors of so many dims: what was asked for, or what is safe.

    What drops coefficients is biased: with a large ``gamma`` nodes follow what they have not heard yet, further with
    every round. Coefficients that are drawn wait for their turn, so ``gamma`` may be no more than the share sent, and
    twice that where the largest go first (measured: docs/decentralized.md). It follows from the compressor alone, so
    that ranks whose shards have other lengths go as far.
    """
    plans = [compressor.plan(TensorSpec("any", _LARGE[dim > 1], torch.float32)) for dim in dims]
    _check_kept(compressor, plans)
    share = min((_share_of(one) for one in plans), default=1.0)
    most = min((_most_of(one) for one in plans), default=1.0)
    if asked is not None and asked > most:
        raise InvalidArgumentError(
            f"gamma={asked:g} diverges with {compressor}, which sends a share of {share:.3g} and drops the rest: pass "
            f"at most gamma={most:.3g}, leave it out, or send everything, as dense(values='int8') does."
        )
    return min(share, most) if asked is None else asked


def _check_kept(compressor: Compressor, plans: list[TensorPlan]) -> None:
    if any(one.variable_length for one in plans):
        raise CompressorError(
            f"{compressor} sends payloads of any length, but letters are of one length: give threshold a capacity, or "
            f"use top_k."
        )
    if any(one.values.format.magnitudes == 1 for one in plans):
        raise CompressorError(
            f"{compressor} sends one magnitude for a chunk: what nodes differ in gathers in few elements, and mixing "
            f"diverges on some graphs after hundreds of rounds. Use values='sign2' or 'int8'."
        )


def _share_of(plan: TensorPlan) -> float:
    """Return the share of a tensor's coefficients that is sent."""
    return min(1.0, plan.entries / (plan.chunks * plan.chunk_numel))


def _most_of(plan: TensorPlan) -> float:
    """Return the largest step size that is known to converge."""
    share, drawn = _share_of(plan), plan.selection.rule.sample_key is not None
    coarse = plan.values.format.magnitudes is not None and plan.values.format.magnitudes <= _FEW_MAGNITUDES
    most = 1.0 if share == 1.0 else share * (1.0 if drawn else 2.0)
    return min(most, _MOST_COARSE if coarse or share < 1.0 else 1.0)


def spelled_out(turn: Turn, node: int) -> Turn:
    """Return a turn in which a group's nodes each send to all others: payloads cannot be added on the way."""
    if not turn.group:
        return turn
    others = tuple(member for member in turn.group if member != node)
    (weight,) = turn.weights
    return type(turn)(others, others, turn.keep + weight, (weight,) * len(others))


def cross_compressed(trip: Trip, plan: BufferPlan, memory: MixResiduals, x: Tensor) -> Joined:
    """Exchange what changed of ``x``, and write what is known afterwards beside what is known now."""
    turn, own = trip.turn, trip.line.weight
    known, after = memory.lend(x.numel(), x.device)
    change = trip.rooms.get("change", x.numel(), torch.float32)
    torch.sub(x if own == 1.0 else x * own, known.public, out=change)
    payload = _encoded(trip, plan, change)
    rooms = [trip.rooms.get(f"payload {number}", plan.nbytes, torch.uint8) for number in range(len(turn.hears))]
    trip.count(len(turn.sends_to), len(rooms), plan.nbytes)
    sent = [(peer, payload) for peer in turn.sends_to]
    heard = swap(trip.inter, trip.line, sent, list(zip(turn.hears, rooms, strict=True)))
    with trip.record.time("decode"):
        _decode(trip, plan, payload, trip.inter.rank, change)
        torch.add(known.public, change, out=after.public)
        torch.add(known.heard, change, alpha=turn.keep, out=after.heard)
        for sender, buffer, weight in zip(turn.hears, rooms, turn.weights, strict=True):
            _decode(trip, plan, buffer, sender, change)
            after.heard.add_(change, alpha=weight)
        torch.sub(after.heard, after.public, out=change)
    push_weight = trip.push_weight(turn.keep, turn.weights, heard.weights)
    step = trip.rooms.get("step", x.numel(), x.dtype).copy_(change)
    return Joined(own / push_weight, [step], [trip.gamma / push_weight], push_weight)


def _encoded(trip: Trip, plan: BufferPlan, change: Tensor) -> Tensor:
    """Return the payload; where ``change`` is nonfinite it is marked so, and all who receive it raise."""
    encoder = Encoder(plan, trip.rooms.get("payload", plan.nbytes, torch.uint8), trip.kernels)
    numbers = {"step": trip.line.step, "sequence": trip.line.sequence}
    with trip.record.time("encode"):
        try:
            encoder.encode_(_cut(change, plan), [Momentum()] * len(plan.specs), **numbers)
        except NonFiniteError:
            encoder.mark_nonfinite_(**numbers)
    return encoder.buffer


def _decode(trip: Trip, plan: BufferPlan, payload: Tensor, sender: int, out: Tensor) -> None:
    decoder = Decoder(plan, payload, regions_of([f"node {sender}"], [plan.nbytes]), trip.kernels)
    if decoder.verify(step=trip.line.step, sequence=trip.line.sequence):
        raise NonFiniteError(
            f"node {sender} had NaN, infinity or a magnitude of 2**100 or more to mix: nothing was changed here. End "
            f"the run, and lower the learning rate, or clip."
        )
    decoder.decode_(_cut(out, plan), step=trip.line.step, average="nodes")


def _cut(flat: Tensor, plan: BufferPlan) -> list[Tensor]:
    """Return the plan's tensors, which lie one behind the other."""
    parts = torch.split(flat, [math.prod(spec.shape) for spec in plan.specs])
    return [part.view(spec.shape) for part, spec in zip(parts, plan.specs, strict=True)]
