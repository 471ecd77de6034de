"""Split: every node averages a share of the bucket, then all gather the averages.

Less is sent than by gathering everything when there are many nodes, as long as what they select coincides enough.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from flexcomm.between.cargo import Cargo, Leg, Pending
from flexcomm.between.gather import decode_gathered_, expect
from flexcomm.bucket import BucketPlan, Incoming, Outgoing, assemble_bucket
from flexcomm.compress import TensorSpec
from flexcomm.kernels import Momentum, Selection, TensorPlan, ValueCode
from flexcomm.pieces import Piece, cut

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Split", "can_be_split", "plan_split", "split"]


class Share(NamedTuple):
    """What one node averages: parts of pieces, and the plans for its way there and back.

    ``collected`` is the plan of what all nodes send it, ``coefficients`` of the same seen as flat chunks, which are not
    transformed back; ``averaged`` of the averages it sends on, and ``restored`` of the same as the elements they
    stand for.
    """

    numbers: tuple[int, ...]
    parts: tuple[Piece, ...]
    collected: BucketPlan
    coefficients: BucketPlan
    averaged: BucketPlan
    restored: BucketPlan


class Split(NamedTuple):
    """The shares of all nodes, and the greatest length of what one of them sends on."""

    shares: list[Share]
    averaged_nbytes: int


@lru_cache(maxsize=1024)
def plan_split(pieces: tuple[Piece, ...], nodes: int) -> Split:
    """Return how pieces are shared out among nodes."""
    parts: list[list[tuple[int, Piece]]] = [[] for _ in range(nodes)]
    for number, piece in enumerate(pieces):
        for node, part in enumerate(cut(piece.spec, piece.plan, nodes)):
            if part is not None:
                parts[node].append((number, part))
    shares = [_plan_share(share, nodes) for share in parts]
    return Split(shares, max(share.averaged.nbytes for share in shares))


def _plan_share(share: list[tuple[int, Piece]], nodes: int) -> Share:
    parts = tuple(part for _, part in share)
    specs, plans = tuple(part.spec for part in parts), tuple(part.plan for part in parts)
    flat_specs = tuple(
        TensorSpec(f"{part.spec.name} averaged", (part.plan.chunks * part.plan.chunk_numel,), torch.float32)
        for part in parts
    )
    united = tuple(_united(plan, nodes) for plan in plans)
    return Share(
        tuple(number for number, _ in share),
        parts,
        assemble_bucket(specs, plans),
        assemble_bucket(flat_specs, tuple(map(_flat, plans))),
        assemble_bucket(flat_specs, tuple(map(_flat, united))),
        assemble_bucket(specs, united),
    )


def _united(plan: TensorPlan, nodes: int) -> TensorPlan:
    """Return a plan that sends all coefficients that any node may have sent, exactly."""
    keep = min(plan.keep * nodes, plan.chunk_numel)
    selection = Selection.EVERYTHING if keep == plan.chunk_numel else Selection.LARGEST
    return replace(plan, selection=selection, keep=keep, values=ValueCode.FP32)


def _flat(plan: TensorPlan) -> TensorPlan:
    """Return the plan for coefficients as they are, chunk by chunk. Its payloads look the same."""
    numel = plan.chunks * plan.chunk_numel
    return replace(plan, rows=1, cols=numel, chunk_rows=1, chunk_cols=plan.chunk_numel, transformed=False)


def can_be_split(plan: BucketPlan) -> bool:
    """Return whether what is sent of a chunk depends on the chunk alone: then shares send what wholes would."""
    return all(one.selection in (Selection.LARGEST, Selection.EVERYTHING) for one in plan.plans)


class Desk(NamedTuple):
    """What a node sends to each other one, what it gets of its own share, and the averages of all shares."""

    sends: list[Outgoing]
    received: Tensor
    collected: Incoming
    coefficients: list[Tensor]
    averages: Tensor
    averaged: Outgoing
    everybodys: Tensor
    restored: list[Incoming]


def split(cargo: Cargo) -> Leg:
    plan, mine = plan_split(cargo.pieces, cargo.nodes), cargo.inter.rank
    own, desk = plan.shares[mine], cargo.memory.keep("splitting", lambda: _set_desk(cargo, plan))
    for share, outgoing in zip(plan.shares, desk.sends, strict=True):
        _encode_share(cargo, share, outgoing)
    sends = [(node, outgoing.buffer) for node, outgoing in enumerate(desk.sends)]
    sent = sum(buffer.numel() for node, buffer in sends if node != mine)
    cargo.record.payload_bytes += sent + own.collected.nbytes
    work = cargo.inter.exchange(sends, list(enumerate(desk.received)))
    yield Pending(work, "inter", sent, (cargo.nodes - 1) * own.collected.nbytes)
    _average_share(cargo, desk)
    others = (cargo.nodes - 1) * plan.averaged_nbytes
    yield Pending(cargo.inter.all_gather(desk.averages, desk.everybodys), "inter", others, others)
    with cargo.record.time("decode"):
        return _restore(cargo, plan, desk)


def _set_desk(cargo: Cargo, plan: Split) -> Desk:
    allocate, nodes, own = cargo.memory.allocate, cargo.nodes, plan.shares[cargo.inter.rank]
    received = allocate(nodes, own.collected.nbytes)
    averages, everybodys = allocate(plan.averaged_nbytes), allocate(nodes, plan.averaged_nbytes)
    return Desk(
        [Outgoing(share.collected, allocate(share.collected.nbytes), cargo.kernels) for share in plan.shares],
        received,
        expect(cargo, own.collected, received, cargo.senders, own.coefficients),
        [allocate(*spec.shape, dtype=torch.float32) for spec in own.coefficients.specs],
        averages,
        Outgoing(own.averaged, averages[: own.averaged.nbytes], cargo.kernels),
        everybodys,
        [
            expect(cargo, share.averaged, row[: share.averaged.nbytes], [sender], share.restored)
            for share, row, sender in zip(plan.shares, everybodys, cargo.senders, strict=True)
        ],
    )


def _encode_share(cargo: Cargo, share: Share, outgoing: Outgoing) -> None:
    numbered = list(zip(share.numbers, share.parts, strict=True))
    inputs = [part.of(cargo.inputs[number]) for number, part in numbered]
    cargo.encode_(outgoing, inputs, [_part_of(cargo.momenta[number], part) for number, part in numbered])


def _part_of(momentum: Momentum, part: Piece) -> Momentum:
    state, next_state = (None if one is None else part.state_of(one) for one in (momentum.state, momentum.next_state))
    return momentum._replace(state=state, next_state=next_state)


def _average_share(cargo: Cargo, desk: Desk) -> None:
    """Average what the nodes sent of this node's share, and fill the buffer it sends on."""
    flagged = decode_gathered_(cargo, desk.collected, desk.coefficients)
    cargo.unfit = cargo.unfit or ", ".join(flagged)
    cargo.encode_(desk.averaged, desk.coefficients, [Momentum()] * len(desk.coefficients))


def _restore(cargo: Cargo, plan: Split, desk: Desk) -> list[str]:
    """Turn everybody's averages into elements, once all of them have been checked."""
    opened = [cargo.open(incoming) for incoming in desk.restored]
    flagged = [sender for one in opened for sender in one.flagged]
    if flagged:
        return flagged
    for share, one in zip(plan.shares, opened, strict=True):
        outs = [part.of(cargo.outputs[number]) for number, part in zip(share.numbers, share.parts, strict=True)]
        cargo.decode_(share.restored, one, outs, "nodes")
    return []
