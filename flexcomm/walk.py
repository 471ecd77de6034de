"""The walk of one bucket, from the tensors of every rank to the average all of them hold.

The ranks of a node add up their tensors, each keeping the sum of one part; ranks of equal local rank exchange, between
nodes, what the compressor sends of that part; the ranks of a node hand each other the averages. What a leg would do
among one rank is left out.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flexcomm.between import WAYS, Cargo, Pending, decode_gathered_, expect, gather_payloads
from flexcomm.errors import ConfigMismatchError, FlexcommError, SyncError, TransportError, WireError
from flexcomm.routes import sum_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from flexcomm.between import Memory
    from flexcomm.bucket import Incoming
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

    ``unfit`` says why this rank has nothing fit to send, if it has nothing. ``names[r][n]`` is what to call the rank
    that holds local rank r on node n.
    """

    route: Route
    tensors: list[Tensor]
    outputs: list[Tensor]
    momenta: list[Momentum]
    unfit: str
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
        unfit=luggage.unfit,
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


class _Sums(NamedTuple):
    """Everybody's pieces laid out by rank, what is to be filled of it from which tensor, and the sum of one's own."""

    rows: Tensor
    parts: list[tuple[Tensor, Piece, int]]
    shard: Tensor
    pieces: list[Tensor]


def _add_up_inside(luggage: Luggage) -> Generator[Pending, Any, list[Tensor]]:
    """Return the sums, over the ranks of this node, of the pieces this rank works on."""
    sums = luggage.memory.keep("sums", lambda: _lay_out_sums(luggage))
    for part, piece, number in sums.parts:
        part.copy_(piece.of(luggage.tensors[number]))
    others = (luggage.intra.size - 1) * sums.shard.nbytes
    yield Pending(luggage.intra.reduce_scatter(sums.rows, sums.shard), "intra", others, others, may_rest=False)
    return sums.pieces


def _lay_out_sums(luggage: Luggage) -> _Sums:
    route, ranks, dtype = luggage.route, luggage.intra.size, sum_dtype(luggage.route.dtype)
    # Behind what is filled there are zeros, from the beginning: sums of anything could overflow.
    rows = luggage.memory.allocate(ranks, route.longest, dtype=dtype).zero_()
    shard = luggage.memory.allocate(route.longest, dtype=dtype)
    parts = _numbered_parts(rows, route)
    return _Sums(rows, parts, shard, _cut_row(shard, route.pieces[luggage.intra.rank]))


def _numbered_parts(rows: Tensor, route: Route) -> list[tuple[Tensor, Piece, int]]:
    """Return the parts of all ranks' rows, each with the piece it is and the number of its tensor."""
    return [
        (part, piece, number)
        for row, pieces, numbers in zip(rows, route.pieces, route.numbers, strict=True)
        for part, piece, number in zip(_cut_row(row, pieces), pieces, numbers, strict=True)
    ]


def _cut_row(row: Tensor, pieces: tuple[Piece, ...]) -> list[Tensor]:
    """Return the pieces that lie one behind the other in a row."""
    parts, begin = [], 0
    for piece in pieces:
        end = begin + piece.last - piece.first
        parts.append(row[begin:end].view(piece.spec.shape))
        begin = end
    return parts


class _Payloads(NamedTuple):
    """What this rank hands on, and what all ranks of its node did."""

    row: Tensor
    everybodys: Tensor
    incoming: list[Incoming]


def _forward_payloads(luggage: Luggage, cargo: Cargo) -> Walk:
    """Hand on the payloads themselves inside the node, and decode all of them: fewer bytes than the elements."""
    route = luggage.route
    gathered = yield from gather_payloads(cargo)
    kept = luggage.memory.keep("payloads", lambda: _lay_out_payloads(luggage, cargo))
    kept.row[: gathered.numel()] = gathered.view(-1)
    others = (luggage.intra.size - 1) * kept.row.nbytes
    yield Pending(luggage.intra.all_gather(kept.row, kept.everybodys), "intra", others, others)
    flagged = []
    for rank, incoming in enumerate(kept.incoming):
        numbered = zip(route.pieces[rank], route.numbers[rank], strict=True)
        outputs = [piece.of(luggage.outputs[number]) for piece, number in numbered]
        try:
            flagged += decode_gathered_(cargo, incoming, outputs)
        except WireError as error:
            raise _explained(error) from error
    return flagged


def _lay_out_payloads(luggage: Luggage, cargo: Cargo) -> _Payloads:
    route, nodes = luggage.route, luggage.inter.size
    longest = nodes * max(plan.nbytes for plan in route.plans)
    everybodys = luggage.memory.allocate(luggage.intra.size, longest)
    incoming = [
        expect(cargo, plan, row[: nodes * plan.nbytes], senders)
        for plan, row, senders in zip(route.plans, everybodys, luggage.names, strict=True)
    ]
    return _Payloads(luggage.memory.allocate(longest), everybodys, incoming)


class _Elements(NamedTuple):
    """The word and averages of this rank, everybody's, and where in them each piece of a tensor is."""

    row: Tensor
    own: list[Tensor]
    everybodys: Tensor
    parts: list[tuple[Tensor, Piece, int]]


def _hand_round(luggage: Luggage, cargo: Cargo) -> Walk:
    """Decode this rank's part and hand its elements round inside the node, with a word on how it went.

    A rank whose part failed says so instead of leaving the others waiting; then all of them raise.
    """
    kept = luggage.memory.keep("elements", lambda: _lay_out_elements(luggage))
    cargo.outputs = kept.own
    flagged: list[str] = []
    failure: FlexcommError | None = None
    try:
        flagged = yield from _across(cargo, luggage.route)
    except TransportError:
        raise
    except FlexcommError as error:
        failure = error
    kept.row[:_WORDS] = torch.tensor([_word_on(failure, flagged), *_digest_bytes(luggage)])
    others = (luggage.intra.size - 1) * kept.row.nbytes
    yield Pending(luggage.intra.all_gather(kept.row, kept.everybodys), "intra", others, others)
    if failure:
        raise failure
    here = [names[luggage.inter.rank] for names in luggage.names]
    said = kept.everybodys[:, :_WORDS].tolist()
    _check_words(here, said, said[luggage.intra.rank][1:])
    for part, piece, number in kept.parts:
        piece.of(luggage.outputs[number]).copy_(part)
    return flagged or [name for name, words in zip(here, said, strict=True) if words[0] == _UNFIT]


def _lay_out_elements(luggage: Luggage) -> _Elements:
    route, ranks = luggage.route, luggage.intra.size
    row = luggage.memory.allocate(_WORDS + route.longest, dtype=route.dtype)
    everybodys = luggage.memory.allocate(ranks, _WORDS + route.longest, dtype=route.dtype)
    own = _cut_row(row[_WORDS:], route.pieces[luggage.intra.rank])
    return _Elements(row, own, everybodys, _numbered_parts(everybodys[:, _WORDS:], route))


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
