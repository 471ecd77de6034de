"""Two-phase exchange: every node averages one part of the bucket, then all nodes gather the averages.

With many nodes less is sent than by gathering everything, as long as what they select coincides enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import methodcaller
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexcomm.codec import Decoder, Encoder, assemble_buffer
from flexcomm.compress import TensorSpec
from flexcomm.errors import WireError
from flexcomm.kernels import BufferPlan, Selection, TensorPlan, ValueCode
from flexcomm.stats import Timed
from flexcomm.sync.algorithms import Collective, FailedExchange, Received, Steps, decoder_for, encode_
from flexcomm.sync.shards import TensorShard, shard_tensor

if TYPE_CHECKING:
    from flexcomm.sync.bucket import BucketContext


class NodePart(NamedTuple):
    """The part of a bucket that one node averages: shards of shards, with the plans of both phases.

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


class TwoPhasePlan(NamedTuple):
    """The parts of all nodes, and the greatest length of a buffer of averages."""

    parts: list[NodePart]
    averaged_nbytes: int


@lru_cache(maxsize=1024)
def plan_two_phase(shards: tuple[TensorShard, ...], nodes: int) -> TwoPhasePlan:
    """Return which part of a rank's shards each node averages."""
    by_node: list[list[tuple[int, TensorShard]]] = [[] for _ in range(nodes)]
    for number, shard in enumerate(shards):
        for node, part in enumerate(shard_tensor(shard.spec, shard.plan, nodes)):
            if part is not None:
                by_node[node].append((number, part))
    parts = [_plan_part(numbered, nodes) for numbered in by_node]
    return TwoPhasePlan(parts, max(part.averaged.nbytes for part in parts))


def _plan_part(numbered: list[tuple[int, TensorShard]], nodes: int) -> NodePart:
    shards = tuple(shard for _, shard in numbered)
    specs, plans = tuple(shard.spec for shard in shards), tuple(shard.plan for shard in shards)
    flat_specs = tuple(
        TensorSpec(f"{shard.spec.name} averaged", (shard.plan.chunks * shard.plan.chunk_numel,), torch.float32)
        for shard in shards
    )
    unions = tuple(_union_plan(plan, nodes) for plan in plans)
    return NodePart(
        tuple(number for number, _ in numbered),
        shards,
        assemble_buffer(specs, plans),
        assemble_buffer(flat_specs, tuple(map(_flat_plan, plans))),
        assemble_buffer(flat_specs, tuple(map(_flat_plan, unions))),
        assemble_buffer(specs, unions),
    )


def _union_plan(plan: TensorPlan, nodes: int) -> TensorPlan:
    """Return a plan that sends, in full precision, all coefficients that any node may have sent."""
    k = min(plan.k * nodes, plan.chunk_numel)
    selection = Selection.EVERYTHING if k == plan.chunk_numel else Selection.TOP_K
    return replace(plan, selection=selection, k=k, values=ValueCode.FP32)


def _flat_plan(plan: TensorPlan) -> TensorPlan:
    """Return the plan for coefficients as they are, chunk by chunk. Its payloads look the same."""
    numel = plan.chunks * plan.chunk_numel
    return replace(plan, rows=1, cols=numel, chunk_rows=1, chunk_cols=plan.chunk_numel, transformed=False)


def can_take_two_phases(plan: BufferPlan) -> bool:
    """Return whether what is sent of a chunk depends on that chunk alone, so that parts send what wholes would."""
    return all(one.selection.rule.has_independent_chunks for one in plan.plans)


class _Phases(NamedTuple):
    """The buffers of both phases: encoders for every node's part, and what this node receives and averages."""

    encoders: list[Encoder]
    received: Tensor
    decoder: Decoder
    coefficients: list[Tensor]
    averages: Tensor
    averages_encoder: Encoder
    averaged: GatheredAverages


@dataclass(frozen=True)
class GatheredAverages:
    """The averages of all parts, each from the node that computed it."""

    plan: TwoPhasePlan
    gathered: Tensor
    decoders: list[Decoder]

    def verify(self, ctx: BucketContext) -> list[str]:
        return [sender for one in self.decoders for sender in one.verify(step=ctx.step, sequence=ctx.sequence)]

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        for part, decoder in zip(self.plan.parts, self.decoders, strict=True):
            views = [shard.of(outputs[number]) for number, shard in zip(part.numbers, part.shards, strict=True)]
            decoder.decode_(views, step=ctx.step, average="nodes")


def two_phase(ctx: BucketContext, shard: list[Tensor]) -> Steps[Received]:
    """Send every node its part, average what came for this node's part, and all-gather the averages."""
    plan, mine = plan_two_phase(ctx.shards, ctx.nodes), ctx.node
    own, phases = plan.parts[mine], ctx.buffers.get("two phases", lambda: _make_phases(ctx, plan))
    for part, encoder in zip(plan.parts, phases.encoders, strict=True):
        numbered = list(zip(part.numbers, part.shards, strict=True))
        inputs = [one.of(shard[number]) for number, one in numbered]
        states, states_out = (
            held and [one.state_of(held[number]) for number, one in numbered] for held in (ctx.states, ctx.states_out)
        )
        encode_(ctx, encoder, inputs, states, states_out)
    sends = [(node, encoder.buffer) for node, encoder in enumerate(phases.encoders)]
    sent = sum(buffer.numel() for node, buffer in sends if node != mine)
    ctx.record.payload_bytes += sent + own.sent.nbytes
    start = methodcaller("send_recv", sends, list(enumerate(phases.received)))
    yield Collective("exchange", start, sent, (ctx.nodes - 1) * own.sent.nbytes)
    failure = _average_own_part(ctx, phases)
    others = (ctx.nodes - 1) * plan.averaged_nbytes
    gathered = phases.averaged.gathered
    yield Collective("second_exchange", methodcaller("all_gather", phases.averages, gathered), others, others)
    return phases.averaged if failure is None else FailedExchange(failure)


def _make_phases(ctx: BucketContext, plan: TwoPhasePlan) -> _Phases:
    allocate, nodes, own = ctx.buffers.allocate, ctx.nodes, plan.parts[ctx.node]
    received = allocate(nodes, own.sent.nbytes)
    averages, gathered = allocate(plan.averaged_nbytes), allocate(nodes, plan.averaged_nbytes)
    return _Phases(
        [Encoder(part.sent, allocate(part.sent.nbytes), ctx.kernels) for part in plan.parts],
        received,
        decoder_for(ctx, own.sent, received, ctx.senders, own.coefficients),
        [allocate(*spec.shape, dtype=torch.float32) for spec in own.coefficients.specs],
        averages,
        Encoder(own.averaged, averages[: own.averaged.nbytes], ctx.kernels),
        GatheredAverages(
            plan,
            gathered,
            [
                decoder_for(ctx, part.averaged, row[: part.averaged.nbytes], [sender], part.restored)
                for part, row, sender in zip(plan.parts, gathered, ctx.senders, strict=True)
            ],
        ),
    )


def _average_own_part(ctx: BucketContext, phases: _Phases) -> WireError | None:
    """Average what the nodes sent of this node's part, and encode the averages.

    If that fails, the buffer is marked as that of a rank with nothing to send, for the other nodes wait for it; the
    error is returned.
    """
    failure, nonfinite = None, []
    with Timed(ctx.record, "decode"):
        try:
            nonfinite = phases.decoder.verify(step=ctx.step, sequence=ctx.sequence)
        except WireError as error:
            failure, nonfinite = error, [str(error)]
        if not nonfinite:
            phases.decoder.decode_(phases.coefficients, step=ctx.step, average=ctx.average)
    ctx.nonfinite = ctx.nonfinite or ", ".join(nonfinite)
    if ctx.nonfinite:
        phases.averages_encoder.mark_nonfinite_(step=ctx.step, sequence=ctx.sequence)
    else:
        with Timed(ctx.record, "encode"):
            ctx.nonfinite = phases.averages_encoder.encode_(phases.coefficients, step=ctx.step, sequence=ctx.sequence)
    return failure
