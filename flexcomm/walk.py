"""The walk of one bucket, from the tensors of every rank to the average all of them hold.

The ranks of a node add up their tensors, each keeping the sum of one part; ranks of equal local rank exchange, between
nodes, what the compressor sends of that part; the ranks of a node hand each other the averages. What a leg would do
among one rank is left out.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flexcomm.between import WAYS, Cargo, Gathered, Pending, decode_gathered_, gather_payloads
from flexcomm.errors import ConfigMismatchError, FlexcommError, SyncError, TransportError, WireError
from flexcomm.routes import sum_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from flexcomm.between import Memory
    from flexcomm.kernels import Average, Kernels, Momentum
    from flexcomm.pieces import Piece
    from flexcomm.routes import Route
    from flexcomm.stats import SyncRecord
    from flexcomm.transport import Transport

__all__ = ["Luggage", "Walk", "walk"]

Walk = Generator[Pending, Any, list[str]]

_FINE, _UNFIT, _FAILED, _DISAGREED = 0.0, 1.0, 2.0, 3.0
"""What a rank says of its part when it hands it on."""
_WORDS = 9
"""How many numbers it says that in: how it went, and the bytes of a digest of what it did."""
_DISAGREEMENTS = ("version", "plan hash", "step", "sequence")


@dataclass
class Luggage:
    """What a walk takes along. ``tensors`` and ``outputs`` are those of the whole call; outputs are contiguous.

    ``names[r][n]`` is what to call the rank that holds local rank r on node n.
    """

    route: Route
    tensors: list[Tensor]
    outputs: list[Tensor]
    momenta: list[Momentum]
    step: int
    sequence: int
    average: Average
    kernels: Kernels
    intra: Transport
    inter: Transport
    names: list[list[str]]
    memory: Memory
    record: SyncRecord


def walk(luggage: Luggage) -> Walk:
    """Take a bucket through all its legs. Return who had nothing fit to send; then the outputs hold nothing."""
    if luggage.intra.size == 1:
        cargo = _load(luggage, [luggage.tensors[number] for number in luggage.route.numbers[0]])
        cargo.outputs = [luggage.outputs[number] for number in luggage.route.numbers[0]]
        return (yield from _across(cargo, luggage.route))
    cargo = _load(luggage, (yield from _add_up_inside(luggage)))
    if luggage.route.forwards:
        return (yield from _forward_payloads(luggage, cargo))
    return (yield from _hand_round(luggage, cargo))


def _load(luggage: Luggage, inputs: list[Tensor]) -> Cargo:
    mine = luggage.intra.rank
    return Cargo(
        pieces=luggage.route.pieces[mine],
        plan=luggage.route.plans[mine],
        inputs=inputs,
        momenta=luggage.momenta,
        outputs=[],
        step=luggage.step,
        sequence=luggage.sequence,
        average=luggage.average,
        kernels=luggage.kernels,
        inter=luggage.inter,
        senders=luggage.names[mine],
        memory=luggage.memory,
        record=luggage.record,
    )


def _across(cargo: Cargo, route: Route) -> Walk:
    """Cross over to the other nodes and back.

    Also without a piece to carry: the ranks of a node must start their collectives in one order.
    """
    try:
        return (yield from WAYS[route.way](cargo))
    except WireError as error:
        raise _explained(error) from error


def _explained(error: WireError) -> FlexcommError:
    """Return what a payload that is not the one expected means: ranks called differently."""
    if error.field not in _DISAGREEMENTS:
        return error
    return ConfigMismatchError(
        f"ranks disagree on what they synchronise, and nothing was changed: {error} Make the same calls, in the same "
        f"order and with the same arguments, on every rank."
    )


def _add_up_inside(luggage: Luggage) -> Generator[Pending, Any, list[Tensor]]:
    """Return the sums, over the ranks of this node, of the pieces this rank works on."""
    route, ranks, dtype = luggage.route, luggage.intra.size, sum_dtype(luggage.route.dtype)
    rows = luggage.memory.take("rows", (ranks, route.longest), dtype)
    shard = luggage.memory.take("shard", (route.longest,), dtype)
    for row, pieces, numbers in zip(rows, route.pieces, route.numbers, strict=True):
        begin = 0
        for piece, number in zip(pieces, numbers, strict=True):
            end = begin + piece.last - piece.first
            row[begin:end] = piece.of(luggage.tensors[number]).view(-1)
            begin = end
        row[begin:] = 0
    others = (ranks - 1) * shard.nbytes
    yield Pending(luggage.intra.reduce_scatter(rows, shard), "intra", others, others, may_rest=False)
    return _cut_row(shard, route.pieces[luggage.intra.rank])


def _cut_row(row: Tensor, pieces: tuple[Piece, ...]) -> list[Tensor]:
    """Return the pieces that lie one behind the other in a row."""
    parts, begin = [], 0
    for piece in pieces:
        end = begin + piece.last - piece.first
        parts.append(row[begin:end].view(piece.spec.shape))
        begin = end
    return parts


def _forward_payloads(luggage: Luggage, cargo: Cargo) -> Walk:
    """Hand on the payloads themselves inside the node, and decode all of them: fewer bytes than the elements."""
    route, ranks = luggage.route, luggage.intra.size
    longest = luggage.inter.size * max(plan.nbytes for plan in route.plans)
    row = luggage.memory.take("payloads", (longest,))
    everybodys = luggage.memory.take("everybody's payloads", (ranks, longest))
    gathered = yield from gather_payloads(cargo)
    row[: gathered.buffers.numel()] = gathered.buffers
    others = (ranks - 1) * longest
    yield Pending(luggage.intra.all_gather(row, everybodys), "intra", others, others)
    flagged = []
    for rank, plan in enumerate(route.plans):
        numbered = zip(route.pieces[rank], route.numbers[rank], strict=True)
        outputs = [piece.of(luggage.outputs[number]) for piece, number in numbered]
        nbytes = [plan.nbytes] * luggage.inter.size
        payloads = Gathered(everybodys[rank, : sum(nbytes)], nbytes)
        try:
            flagged += decode_gathered_(cargo, plan, payloads, luggage.names[rank], outputs)
        except WireError as error:
            raise _explained(error) from error
    return flagged


def _hand_round(luggage: Luggage, cargo: Cargo) -> Walk:
    """Decode this rank's part and hand its elements round inside the node, with a word on how it went.

    A rank whose part failed says so instead of leaving the others waiting; then all of them raise.
    """
    route, ranks = luggage.route, luggage.intra.size
    row = luggage.memory.take("elements", (_WORDS + route.longest,), route.dtype)
    everybodys = luggage.memory.take("everybody's elements", (ranks, _WORDS + route.longest), route.dtype)
    cargo.outputs = _cut_row(row[_WORDS:], cargo.pieces)
    flagged: list[str] = []
    failure: FlexcommError | None = None
    try:
        flagged = yield from _across(cargo, route)
    except TransportError:
        raise
    except FlexcommError as error:
        failure = error
    row[:_WORDS] = torch.tensor([_word_on(failure, flagged), *_digest_bytes(luggage)])
    others = (ranks - 1) * row.nbytes
    yield Pending(luggage.intra.all_gather(row, everybodys), "intra", others, others)
    if failure:
        raise failure
    here = [names[luggage.inter.rank] for names in luggage.names]
    said = everybodys[:, :_WORDS].tolist()
    _check_words(here, said, said[luggage.intra.rank][1:])
    for rank in range(ranks):
        parts = _cut_row(everybodys[rank, _WORDS:], route.pieces[rank])
        for part, piece, number in zip(parts, route.pieces[rank], route.numbers[rank], strict=True):
            piece.of(luggage.outputs[number]).copy_(part)
    return flagged or [name for name, words in zip(here, said, strict=True) if words[0] == _UNFIT]


def _word_on(failure: FlexcommError | None, flagged: list[str]) -> float:
    if failure:
        return _DISAGREED if isinstance(failure, ConfigMismatchError) else _FAILED
    return _UNFIT if flagged else _FINE


def _digest_bytes(luggage: Luggage) -> list[float]:
    """Return what all ranks of a node must have in common, as numbers small enough for any dtype."""
    # Integers hash alike in every process.
    mixed = hash((*(plan.digest for plan in luggage.route.plans), luggage.step, luggage.sequence))
    return [float(byte) for byte in mixed.to_bytes(_WORDS - 1, "little", signed=True)]


def _check_words(names: list[str], said: list[list[float]], mine: list[float]) -> None:
    """Raise unless all ranks of this node did the same, and nothing went wrong on any."""
    for name, (went, *digest) in zip(names, said, strict=True):
        if went == _DISAGREED or digest != mine:
            raise ConfigMismatchError(
                f"ranks disagree on what they synchronise, and nothing was changed: {name} is at another step or in "
                f"another call, or met a node that is. Make the same calls, in the same order and with the same "
                f"arguments, on every rank."
            )
        if went == _FAILED:
            raise SyncError(f"{name} could not decode its part, and nothing was changed; its own output says why.")
