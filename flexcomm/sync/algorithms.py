"""Algorithms: how a bucket crosses between nodes.

An algorithm is a generator: it encodes this rank's shard, yields each :class:`Collective` it needs, is resumed with the
result, and returns an object that verifies and decodes what was received. It writes no output.

``plan.choose_algorithms`` picks one by what it sends. With P nodes and buffers of B bytes, a node sends (P-1) B to
``gather``, 2 (P-1)/P B to ``reduce``, and (P-1)/P (B + A) to ``two_phase``, where A is the length of all averages.
``dense`` costs 2 (P-1)/P N, for tensors of N bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from flexcomm.codec import Decoder, Encoder, TensorShard, assemble_buffer, regions_of, shard_tensor
from flexcomm.compress import TensorSpec
from flexcomm.errors import ConfigMismatchError, WireError
from flexcomm.kernels import BufferPlan, Selection, StateUpdate, TensorPlan, ValueCode
from flexcomm.kernels.layout import HEADER_NBYTES
from flexcomm.stats import Timed
from flexcomm.transport import Handle, Transport

if TYPE_CHECKING:
    from flexcomm.sync.bucket import BucketContext

Algorithm = Literal["gather", "gatherv", "reduce", "two_phase", "dense", "codec"]
Leg = Literal["reduce_inside", "exchange", "second_exchange", "gather_inside"]
"""A part of a bucket's path whose collectives run one after the other, on one process group.

A synchronisation has at most one collective on a leg; a mix may have several.
"""
LEGS: tuple[Leg, ...] = get_args(Leg)
LEVELS: dict[Leg, Literal["intra", "inter"]] = {
    "reduce_inside": "intra",
    "exchange": "inter",
    "second_exchange": "inter",
    "gather_inside": "intra",
}


class Collective(NamedTuple):
    """A collective that a bucket asks its driver to start; the bucket is resumed with the result."""

    leg: Leg
    start: Callable[[Transport], Handle[Any]]
    sent_bytes: int
    received_bytes: int
    is_short: bool = False
    """Whether it is answered at once by all ranks, so that waiting for it costs little."""


T = TypeVar("T")
Steps = Generator[Collective, Any, T]
"""A part of a bucket's path that returns a ``T``."""


class Received(Protocol):
    """What came from other ranks for some of the bucket's shards."""

    def verify(self, ctx: BucketContext) -> list[str]:
        """Check it; return the senders that had nonfinite values."""
        ...

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        """Do with ``outputs``, one for each of these shards, and the averages what ``ctx.epilogue`` says."""
        ...


def encode_(
    ctx: BucketContext,
    encoder: Encoder,
    tensors: Sequence[Tensor],
    states: Sequence[Tensor] | None = None,
    states_out: Sequence[Tensor] | None = None,
    update: StateUpdate | None = None,
) -> None:
    """Fill the encoder's buffer, or mark it as that of a sender with nothing to send."""
    with Timed(ctx.record, "encode"):
        if ctx.nonfinite:
            encoder.mark_nonfinite_(step=ctx.step, sequence=ctx.sequence)
            return
        update = update or StateUpdate()
        ctx.nonfinite = encoder.encode_(tensors, states, states_out, update, step=ctx.step, sequence=ctx.sequence)
    if ctx.in_place and states is not None and not ctx.nonfinite:
        ctx.rollbacks.append(partial(encoder.rollback_, tensors, states, update, step=ctx.step))


def decoder_for(
    ctx: BucketContext,
    plan: BufferPlan,
    gathered: Tensor,
    senders: Sequence[str],
    decoded_as: BufferPlan | None = None,
    summed: int = 1,
) -> Decoder:
    """Return a decoder of buffers that are all as long as the plan says."""
    regions = regions_of(senders, [plan.nbytes] * len(senders))
    return Decoder(plan, gathered, regions, ctx.kernels, decoded_as, summed)


@dataclass(frozen=True)
class GatheredPayloads:
    """The buffers of all nodes, one behind the other."""

    gathered: Tensor
    decoder: Decoder

    def verify(self, ctx: BucketContext) -> list[str]:
        return self.decoder.verify(step=ctx.step, sequence=ctx.sequence)

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        self.decoder.decode_(outputs, step=ctx.step, average=ctx.average, epilogue=ctx.epilogue)


def gather(ctx: BucketContext, shard: list[Tensor]) -> Steps[GatheredPayloads]:
    """All-gather buffers whose length follows from the plan: one collective, and no exchange of lengths."""
    plan, encoder = ctx.buffer_plan, _encode_shard(ctx, shard)

    def make_received() -> GatheredPayloads:
        gathered = ctx.buffers.allocate(ctx.nodes, plan.nbytes)
        return GatheredPayloads(gathered, decoder_for(ctx, plan, gathered, ctx.senders))

    ctx.record.payload_bytes += plan.nbytes
    received = ctx.buffers.get("gathered", make_received)
    moved = (ctx.nodes - 1) * plan.nbytes
    yield Collective("exchange", methodcaller("all_gather", encoder.buffer, received.gathered), moved, moved)
    return received


def gatherv(ctx: BucketContext, shard: list[Tensor]) -> Steps[GatheredPayloads]:
    """All-gather lengths, then buffers as long as what they hold."""
    plan, encoder = ctx.buffer_plan, _encode_shard(ctx, shard)
    nbytes, moved = encoder.nbytes, (ctx.nodes - 1) * torch.int64.itemsize
    length = torch.tensor([nbytes], device="cpu")
    lengths = yield Collective("exchange", methodcaller("all_gather", length), moved, moved, is_short=True)
    counts: list[int] = lengths.view(-1).tolist()
    for sender, count in zip(ctx.senders, counts, strict=True):
        if not 0 < count <= plan.nbytes:
            needed = f"where 1 to {plan.nbytes} are possible: install one release on every rank."
            raise WireError(sender, "length", f"it announces {count} bytes, {needed}")
    ctx.record.payload_bytes += nbytes
    room = ctx.buffers.get("gathered of any length", lambda: ctx.buffers.allocate(ctx.nodes * plan.nbytes))
    gathered = room[: sum(counts)]
    start = methodcaller("all_gatherv", encoder.buffer[:nbytes], counts, gathered)
    yield Collective("second_exchange", start, (ctx.nodes - 1) * nbytes, sum(counts) - nbytes)
    return GatheredPayloads(gathered, Decoder(plan, gathered, regions_of(ctx.senders, counts), ctx.kernels))


def _encode_shard(ctx: BucketContext, shard: list[Tensor]) -> Encoder:
    """Return the encoder of the buffer that now holds the shard."""
    plan = ctx.buffer_plan
    encoder = ctx.buffers.get("encoder", lambda: Encoder(plan, ctx.buffers.allocate(plan.nbytes), ctx.kernels))
    encode_(ctx, encoder, shard, ctx.states, ctx.states_out, ctx.update)
    return encoder


_DIGEST_BITS = 64


@dataclass(frozen=True)
class ReducedValues:
    """Values summed over nodes; behind them, the bits of a digest and a count of nodes with nonfinite values."""

    encoder: Encoder
    decoder: Decoder
    values: Tensor
    digest: Tensor
    nonfinite: Tensor

    def verify(self, ctx: BucketContext) -> list[str]:
        if not torch.equal(self.digest, (digest_bits(ctx) * ctx.nodes).to(self.digest)):
            raise ConfigMismatchError(
                "nodes disagree on what they add up: their tensors, compressor, step or order of calls differ. Nothing "
                "was changed. Make them equal on every rank."
            )
        nonfinite = self.nonfinite.item()
        return [f"{nonfinite:g} of {ctx.nodes} nodes"] if nonfinite else []

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        self.decoder.decode_(outputs, step=ctx.step, average="nodes", epilogue=ctx.epilogue)


def reduce(ctx: BucketContext, shard: list[Tensor]) -> Steps[ReducedValues]:
    """All-reduce the values, where every node sends the same coefficients.

    No header travels, but a digest of it does, one number for each bit: where all nodes agree, each bit sums up to 0 or
    to the number of nodes.
    """

    def make_reduced() -> ReducedValues:
        plan, dtype = ctx.buffer_plan, _value_dtype(ctx.buffer_plan)
        assert dtype is not None, "plans are asked before they are reduced"  # noqa: S101  (our own invariant)
        tail = (_DIGEST_BITS + 1) * dtype.itemsize
        buffer = ctx.buffers.allocate(plan.nbytes + -(-tail // 4) * 4)
        values = buffer[HEADER_NBYTES : plan.nbytes + tail].view(dtype)
        decoder = decoder_for(ctx, plan, buffer, ["the sum over nodes"], summed=ctx.nodes)
        encoder, digest = Encoder(plan, buffer, ctx.kernels), values[-_DIGEST_BITS - 1 : -1]
        return ReducedValues(encoder, decoder, values, digest, values[-1:])

    reduced = ctx.buffers.get("reduced", make_reduced)
    encode_(ctx, reduced.encoder, shard, ctx.states, ctx.states_out, ctx.update)
    if ctx.rollbacks and ctx.states is not None:
        # The sum takes the place of what was sent: roll back from a copy of it.
        buffer = reduced.encoder.buffer
        sent = ctx.buffers.get("sent", lambda: Encoder(ctx.buffer_plan, torch.empty_like(buffer), ctx.kernels))
        sent.buffer.copy_(buffer)
        ctx.rollbacks[:] = [partial(sent.rollback_, shard, ctx.states, ctx.update, step=ctx.step)]
    reduced.digest.copy_(digest_bits(ctx))
    reduced.nonfinite.fill_(bool(ctx.nonfinite))
    ctx.record.payload_bytes += reduced.values.nbytes
    moved = 2 * reduced.values.nbytes * (ctx.nodes - 1) // ctx.nodes
    yield Collective("exchange", methodcaller("all_reduce", reduced.values), moved, moved)
    return reduced


def digest_bits(ctx: BucketContext) -> Tensor:
    """Return what all nodes must have in common as 64 zeros and ones, which sums can be compared with."""
    octets = np.frombuffer(digest_of(ctx, ctx.plan.digests[ctx.local_rank]), np.uint8)
    return torch.from_numpy(np.unpackbits(octets, bitorder="little").astype(np.float32))


def digest_of(ctx: BucketContext, *digests: int) -> bytes:
    # Integers hash alike in every process.
    return hash((*digests, ctx.step, ctx.sequence)).to_bytes(_DIGEST_BITS // 8, "little", signed=True)


def can_reduce(plan: BufferPlan, nodes: int) -> bool:
    """Return whether every node sends the same coefficients, in one dtype that can count the nodes."""
    dtype = _value_dtype(plan)
    # Up to 2 / eps a dtype counts without rounding.
    can_count = dtype is not None and nodes <= 2 / torch.finfo(dtype).eps
    return can_count and not any(one.sends_indices for one in plan.plans)


def _value_dtype(plan: BufferPlan) -> torch.dtype | None:
    codes = {one.values for one in plan.plans} or {ValueCode.FP32}
    return codes.pop().format.sum_dtype if len(codes) == 1 else None


class NodePart(NamedTuple):
    """The part of a bucket that one node averages in ``two_phase``: shards of shards, with the plans of both phases.

    ``sent`` is the plan of the buffers that all nodes send it, ``coefficients`` of the same seen as flat chunks, which
    are not transformed back; ``averaged`` of the averages it sends on, and ``restored`` of the same as the elements
    they stand for.
    """

    numbers: tuple[int, ...]
    shards: tuple[TensorShard, ...]
    sent: BufferPlan
    coefficients: BufferPlan
    averaged: BufferPlan
    restored: BufferPlan

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [shard.of(tensors[number]) for number, shard in zip(self.numbers, self.shards, strict=True)]

    def state_views(self, states: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
        numbered = zip(self.numbers, self.shards, strict=True)
        return states and [shard.state_of(states[number]) for number, shard in numbered]


@lru_cache(maxsize=1024)
def plan_two_phase(shards: tuple[TensorShard, ...], nodes: int) -> list[NodePart]:
    """Return which part of a rank's shards each node averages."""
    by_node: list[list[tuple[int, TensorShard]]] = [[] for _ in range(nodes)]
    for number, shard in enumerate(shards):
        for node, part in enumerate(shard_tensor(shard.spec, shard.plan, nodes)):
            if part is not None:
                by_node[node].append((number, part))
    return [_plan_part(numbered, nodes) for numbered in by_node]


def _plan_part(numbered: list[tuple[int, TensorShard]], nodes: int) -> NodePart:
    numbers, shards = tuple(number for number, _ in numbered), tuple(shard for _, shard in numbered)
    specs, plans = tuple(shard.spec for shard in shards), tuple(shard.plan for shard in shards)
    # Averages hold, in full precision, all coefficients that any node may have sent.
    unions = []
    for plan in plans:
        k = min(plan.k * nodes, plan.chunk_numel)
        selection = Selection.EVERYTHING if k == plan.chunk_numel else Selection.TOP_K
        unions.append(replace(plan, selection=selection, k=k, values=ValueCode.FP32))
    flat_specs = tuple(
        TensorSpec(f"{spec.name} averaged", (plan.chunks * plan.chunk_numel,), torch.float32)
        for spec, plan in zip(specs, plans, strict=True)
    )
    return NodePart(
        numbers,
        shards,
        assemble_buffer(specs, plans),
        assemble_buffer(flat_specs, tuple(map(_flat_plan, plans))),
        assemble_buffer(flat_specs, tuple(map(_flat_plan, unions))),
        assemble_buffer(specs, tuple(unions)),
    )


def _flat_plan(plan: TensorPlan) -> TensorPlan:
    """Return the plan for coefficients as they are, chunk by chunk. Its payloads look the same."""
    numel = plan.chunks * plan.chunk_numel
    return replace(plan, rows=1, cols=numel, chunk_rows=1, chunk_cols=plan.chunk_numel, transformed=False)


@dataclass(frozen=True)
class TwoPhases:
    """The buffers of both phases: encoders for every node's part, what this node received and averages, all averages.

    ``decoders`` read the averages of all parts, each from the node that computed it.
    """

    parts: list[NodePart]
    encoders: list[Encoder]
    received: Tensor
    own_decoder: Decoder
    coefficients: list[Tensor]
    averages: Tensor
    averages_encoder: Encoder
    gathered: Tensor
    decoders: list[Decoder]

    def verify(self, ctx: BucketContext) -> list[str]:
        return [sender for one in self.decoders for sender in one.verify(step=ctx.step, sequence=ctx.sequence)]

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        for part, decoder in zip(self.parts, self.decoders, strict=True):
            decoder.decode_(part.views(outputs), step=ctx.step, average="nodes", epilogue=ctx.epilogue)


def two_phase(ctx: BucketContext, shard: list[Tensor]) -> Steps[TwoPhases]:
    """Send every node its part, average what came for this node's part, and all-gather the averages.

    With many nodes less is sent than by gathering everything, as long as what they select coincides enough.
    """
    phases = ctx.buffers.get("two phases", lambda: _make_phases(ctx, plan_two_phase(ctx.shards, ctx.nodes)))
    for part, encoder in zip(phases.parts, phases.encoders, strict=True):
        states, states_out = part.state_views(ctx.states), part.state_views(ctx.states_out)
        encode_(ctx, encoder, part.views(shard), states, states_out, ctx.update)
    sends = [(node, encoder.buffer) for node, encoder in enumerate(phases.encoders)]
    own_nbytes = phases.parts[ctx.node].sent.nbytes
    sent = sum(buffer.numel() for _, buffer in sends) - own_nbytes
    ctx.record.payload_bytes += sent + own_nbytes
    start = methodcaller("send_recv", sends, list(enumerate(phases.received)))
    yield Collective("exchange", start, sent, (ctx.nodes - 1) * own_nbytes)
    failure: WireError | None = None
    with Timed(ctx.record, "decode"):
        try:
            senders = phases.own_decoder.verify(step=ctx.step, sequence=ctx.sequence)
            ctx.nonfinite = ctx.nonfinite or ", ".join(senders)
        except WireError as error:
            # The other nodes wait for the averages, which are marked as nothing to send.
            failure, ctx.nonfinite = error, ctx.nonfinite or str(error)
        if not ctx.nonfinite:
            phases.own_decoder.decode_(phases.coefficients, step=ctx.step, average=ctx.average)
    encode_(ctx, phases.averages_encoder, phases.coefficients)
    moved = (ctx.nodes - 1) * phases.averages.nbytes
    yield Collective("second_exchange", methodcaller("all_gather", phases.averages, phases.gathered), moved, moved)
    if failure is not None:
        raise failure
    return phases


def _make_phases(ctx: BucketContext, parts: list[NodePart]) -> TwoPhases:
    allocate, own, longest = ctx.buffers.allocate, parts[ctx.node], max(part.averaged.nbytes for part in parts)
    received, averages, gathered = allocate(ctx.nodes, own.sent.nbytes), allocate(longest), allocate(ctx.nodes, longest)
    return TwoPhases(
        parts,
        [Encoder(part.sent, allocate(part.sent.nbytes), ctx.kernels) for part in parts],
        received,
        decoder_for(ctx, own.sent, received, ctx.senders, own.coefficients),
        [allocate(*spec.shape, dtype=torch.float32) for spec in own.coefficients.specs],
        averages,
        Encoder(own.averaged, averages[: own.averaged.nbytes], ctx.kernels),
        gathered,
        [
            decoder_for(ctx, part.averaged, row[: part.averaged.nbytes], [sender], part.restored)
            for part, row, sender in zip(parts, gathered, ctx.senders, strict=True)
        ],
    )


def dense_plan(plan: TensorPlan, dtype: torch.dtype) -> TensorPlan:
    return plan.sending_everything(ValueCode.of(dtype))


ALGORITHMS: dict[Algorithm, Callable[[BucketContext, list[Tensor]], Steps[Received]]] = {
    "gather": gather,
    "gatherv": gatherv,
    "reduce": reduce,
    "two_phase": two_phase,
    "dense": reduce,
    "codec": lambda ctx, shard: ctx.plan.codecs[ctx.local_rank].exchange(ctx, shard),
}
