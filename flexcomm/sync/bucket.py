"""The path of one bucket, from the tensors of every rank to the average that all of them hold.

The ranks of a node add up their tensors, each keeping the sum of its shard; ranks of equal local rank exchange, between
nodes, what the compressor sends of that shard; the ranks of a node gather the shards of all. A leg that would join
a single rank is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import Enum
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexcomm.errors import ConfigMismatchError, FlexcommError, SyncError, WireError
from flexcomm.kernels import Average, BufferPlan, Kernels, StateUpdate
from flexcomm.stats import SyncRecord, Timed
from flexcomm.sync.algorithms import Collective, GatheredPayloads, Received, Steps, decoder_for, gather, gatherv, reduce
from flexcomm.sync.bucket_codec import exchange_by_codec
from flexcomm.sync.buffers import Buffers
from flexcomm.sync.plan import Algorithm, BucketPlan, sum_dtype
from flexcomm.sync.shards import TensorShard
from flexcomm.sync.two_phase import two_phase

ALGORITHMS: dict[Algorithm, Callable[[BucketContext, list[Tensor]], Steps[Received]]] = {
    "gather": gather,
    "gatherv": gatherv,
    "reduce": reduce,
    "two_phase": two_phase,
    "dense": reduce,
    "codec": exchange_by_codec,
}


class Verified(Enum):
    """What a bucket yields once everything it received has been checked, and nothing has been written."""

    VERIFIED = "verified"


VERIFIED = Verified.VERIFIED


@dataclass
class BucketContext:
    """One bucket of a call under way, and everything its path needs.

    ``tensors`` and ``outputs`` are those of the whole call; outputs are contiguous. This is ``local_rank`` of
    ``local_size``, on node ``node`` of ``nodes``. If this rank has nothing to send, ``nonfinite`` says why;
    ``nonfinite_senders`` are the ranks that had nothing.
    """

    plan: BucketPlan
    tensors: list[Tensor]
    outputs: list[Tensor]
    states: list[Tensor] | None
    states_out: list[Tensor] | None
    update: StateUpdate
    step: int
    sequence: int
    average: Average
    kernels: Kernels
    local_rank: int
    local_size: int
    node: int
    nodes: int
    rank_names: list[list[str]]
    buffers: Buffers
    record: SyncRecord
    nonfinite: str = ""
    nonfinite_senders: list[str] = field(default_factory=list)

    @property
    def shards(self) -> tuple[TensorShard, ...]:
        """The shards of the bucket's tensors that this rank works on."""
        return self.plan.shards[self.local_rank]

    @property
    def buffer_plan(self) -> BufferPlan:
        """The layout of the buffer that this rank sends."""
        return self.plan.buffers[self.local_rank]

    @property
    def senders(self) -> list[str]:
        """What messages call the ranks that send to this one, by node."""
        return self.rank_names[self.local_rank]


def sync_bucket(ctx: BucketContext) -> Generator[Collective | Verified, Any, None]:
    """Average one bucket. Yields the collectives it needs, then ``VERIFIED``; resumed after that, it writes outputs."""
    shard = yield from reduce_scatter_inside(ctx)
    # Also without a shard of any tensor: the ranks of a node must start their collectives in one order.
    received = yield from ALGORITHMS[ctx.plan.algorithm](ctx, shard)
    average = yield from all_gather_inside(ctx, received)
    ctx.nonfinite_senders = average.verify(ctx)
    # The call resumes all of its buckets, or none: a bucket that fails leaves every output as it was.
    yield VERIFIED
    with Timed(ctx.record, "decode"):
        average.write_outputs(ctx)


def reduce_scatter_inside(ctx: BucketContext) -> Steps[list[Tensor]]:
    """Return the sums, over the ranks of this node, of this rank's tensor shards."""
    if ctx.local_size == 1:
        return [ctx.tensors[number] for number in ctx.plan.numbers[0]]
    sums = ctx.buffers.get("sums", lambda: _make_sums(ctx))
    for part, shard, number in sums.parts:
        part.copy_(shard.of(ctx.tensors[number]))
    moved = (ctx.local_size - 1) * sums.own.nbytes
    yield Collective("reduce_inside", methodcaller("reduce_scatter", sums.rows, sums.own), moved, moved)
    return sums.shard


class _Sums(NamedTuple):
    """The input of the reduce-scatter, one row for each rank, and its output.

    ``parts`` are the slices of ``rows``, each with its tensor shard and the tensor's number; ``shard`` those of
    ``own``, the output.
    """

    rows: Tensor
    parts: list[tuple[Tensor, TensorShard, int]]
    own: Tensor
    shard: list[Tensor]


def _make_sums(ctx: BucketContext) -> _Sums:
    plan, dtype = ctx.plan, sum_dtype(ctx.plan.dtype)
    # Zeros, because nothing is copied behind the shorter rows, and sums of anything could overflow.
    rows = ctx.buffers.allocate(ctx.local_size, plan.longest, dtype=dtype).zero_()
    own = ctx.buffers.allocate(plan.longest, dtype=dtype)
    return _Sums(rows, _numbered_parts(rows, plan), own, _slice_row(own, ctx.shards))


def _numbered_parts(rows: Tensor, plan: BucketPlan) -> list[tuple[Tensor, TensorShard, int]]:
    """Return the slices of all ranks' rows, each with its tensor shard and the tensor's number."""
    return [
        (part, shard, number)
        for row, shards, numbers in zip(rows, plan.shards, plan.numbers, strict=True)
        for part, shard, number in zip(_slice_row(row, shards), shards, numbers, strict=True)
    ]


def _slice_row(row: Tensor, shards: tuple[TensorShard, ...]) -> list[Tensor]:
    """Return views of the shards that lie one behind the other in a row."""
    parts, begin = [], 0
    for shard in shards:
        end = begin + shard.last - shard.first
        parts.append(row[begin:end].view(shard.spec.shape))
        begin = end
    return parts


def all_gather_inside(ctx: BucketContext, received: Received) -> Steps[OwnAverage | NodePayloads | NodeElements]:
    """Gather what all ranks of this node received: payloads, or the elements they stand for if that is shorter."""
    if ctx.local_size == 1:
        return OwnAverage(received)
    if ctx.plan.gathers_payloads:
        return (yield from _gather_payloads(ctx, received))
    return (yield from _gather_elements(ctx, received))


class OwnAverage(NamedTuple):
    """What the only rank of a node received."""

    received: Received

    def verify(self, ctx: BucketContext) -> list[str]:
        return _verify(ctx, self.received)

    def write_outputs(self, ctx: BucketContext) -> None:
        self.received.decode_(ctx, [ctx.outputs[number] for number in ctx.plan.numbers[0]])


class NodePayloads(NamedTuple):
    """The payloads that each rank of this node received; every rank decodes all of them."""

    row: Tensor
    rows: Tensor
    by_rank: list[GatheredPayloads]

    def verify(self, ctx: BucketContext) -> list[str]:
        return [sender for payloads in self.by_rank for sender in _verify(ctx, payloads)]

    def write_outputs(self, ctx: BucketContext) -> None:
        for payloads, shards, numbers in zip(self.by_rank, ctx.plan.shards, ctx.plan.numbers, strict=True):
            outputs = [shard.of(ctx.outputs[number]) for shard, number in zip(shards, numbers, strict=True)]
            payloads.decode_(ctx, outputs)


def _gather_payloads(ctx: BucketContext, received: Received) -> Steps[NodePayloads]:
    assert isinstance(received, GatheredPayloads), "only gathered payloads can be handed on"  # noqa: S101
    payloads = ctx.buffers.get("payloads of the node", lambda: _make_node_payloads(ctx))
    payloads.row[: received.gathered.numel()] = received.gathered.view(-1)
    moved = (ctx.local_size - 1) * payloads.row.nbytes
    yield Collective("gather_inside", methodcaller("all_gather", payloads.row, payloads.rows), moved, moved)
    return payloads


def _make_node_payloads(ctx: BucketContext) -> NodePayloads:
    longest = ctx.nodes * max(plan.nbytes for plan in ctx.plan.buffers)
    rows = ctx.buffers.allocate(ctx.local_size, longest)
    by_rank = []
    for plan, row, senders in zip(ctx.plan.buffers, rows, ctx.rank_names, strict=True):
        gathered = row[: ctx.nodes * plan.nbytes]
        by_rank.append(GatheredPayloads(gathered, decoder_for(ctx, plan, gathered, senders)))
    return NodePayloads(ctx.buffers.allocate(longest), rows, by_rank)


class NodeElements(NamedTuple):
    """The elements that each rank of this node decoded, behind a status.

    ``row`` is this rank's, of which ``own`` are the slices; ``parts`` are the slices of all ``rows``.
    """

    row: Tensor
    own: list[Tensor]
    rows: Tensor
    parts: list[tuple[Tensor, TensorShard, int]]

    def verify(self, ctx: BucketContext) -> list[str]:
        names = [of_rank[ctx.node] for of_rank in ctx.rank_names]
        nonfinite = []
        for name, (status, *digest) in zip(names, self.rows[:, :_STATUS_NUMEL].tolist(), strict=True):
            if status == _DISAGREED or digest != _status_digest(ctx):
                raise ConfigMismatchError(
                    f"ranks disagree on what they synchronise, and nothing was changed: {name} is at another step or "
                    f"in another call, or met a node that is. Make the same calls, in the same order and with the same "
                    f"arguments, on every rank."
                )
            if status == _FAILED:
                raise SyncError(f"{name} could not decode its shard, and nothing was changed; its own output says why.")
            nonfinite += [name] if status == _NONFINITE else []
        return ctx.nonfinite_senders or nonfinite

    def write_outputs(self, ctx: BucketContext) -> None:
        for part, shard, number in self.parts:
            shard.of(ctx.outputs[number]).copy_(part)


_OK, _NONFINITE, _FAILED, _DISAGREED = 0.0, 1.0, 2.0, 3.0
"""The status of a rank's shard."""
_STATUS_NUMEL = 9
"""Its length in elements: the status itself, and the bytes of a digest of what the rank did."""


def _gather_elements(ctx: BucketContext, received: Received) -> Steps[NodeElements]:
    """Decode this rank's shard and gather the elements of all ranks, with a status.

    A rank whose shard failed says so instead of leaving the others waiting; then all of them raise.
    """
    elements = ctx.buffers.get("elements of the node", lambda: _make_node_elements(ctx))
    failure: FlexcommError | None = None
    status = _OK
    try:
        ctx.nonfinite_senders = _verify(ctx, received)
        if ctx.nonfinite_senders:
            status = _NONFINITE
        else:
            with Timed(ctx.record, "decode"):
                received.decode_(ctx, elements.own)
    except FlexcommError as error:
        failure, status = error, _DISAGREED if isinstance(error, ConfigMismatchError) else _FAILED
    elements.row[:_STATUS_NUMEL] = torch.tensor([status, *_status_digest(ctx)])
    moved = (ctx.local_size - 1) * elements.row.nbytes
    yield Collective("gather_inside", methodcaller("all_gather", elements.row, elements.rows), moved, moved)
    if failure is not None:
        raise failure
    return elements


def _make_node_elements(ctx: BucketContext) -> NodeElements:
    plan, numel = ctx.plan, _STATUS_NUMEL + ctx.plan.longest
    row = ctx.buffers.allocate(numel, dtype=plan.dtype)
    rows = ctx.buffers.allocate(ctx.local_size, numel, dtype=plan.dtype)
    own = _slice_row(row[_STATUS_NUMEL:], ctx.shards)
    return NodeElements(row, own, rows, _numbered_parts(rows[:, _STATUS_NUMEL:], plan))


def _status_digest(ctx: BucketContext) -> list[float]:
    """Return what all ranks of a node must have in common, as numbers small enough for any dtype."""
    # Integers hash alike in every process.
    digest = hash((*ctx.plan.digests, ctx.step, ctx.sequence))
    return [float(byte) for byte in digest.to_bytes(_STATUS_NUMEL - 1, "little", signed=True)]


_DISAGREEMENTS = ("version", "plan hash", "step", "sequence")
"""Fields of a header that differ where ranks called differently."""


def _verify(ctx: BucketContext, received: Received) -> list[str]:
    try:
        with Timed(ctx.record, "decode"):
            return received.verify(ctx)
    except WireError as error:
        if error.field not in _DISAGREEMENTS:
            raise
        raise ConfigMismatchError(
            f"ranks disagree on what they synchronise, and nothing was changed: {error} Make the same calls, in the "
            f"same order and with the same arguments, on every rank."
        ) from error
