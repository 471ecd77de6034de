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
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from flexcomm.codec import Decoder, Encoder, regions_of
from flexcomm.errors import ConfigMismatchError, FlexcommError, WireError
from flexcomm.kernels import BufferPlan, Selection, TensorPlan, ValueCode
from flexcomm.kernels.layout import HEADER_NBYTES
from flexcomm.stats import Timed
from flexcomm.transport import Handle, Transport

if TYPE_CHECKING:
    from flexcomm.sync.bucket import BucketContext

Leg = Literal["reduce_inside", "exchange", "second_exchange", "gather_inside"]
"""A part of a bucket's path with at most one collective: inside the node, or between nodes."""
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
    """What came from the other nodes for this rank's shard."""

    def verify(self, ctx: BucketContext) -> list[str]:
        """Check it; return the senders that had nonfinite values."""
        ...

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        """Fill ``outputs``, one for each tensor shard, with the averages."""
        ...


class FailedExchange(NamedTuple):
    """An exchange that failed on this rank; the ranks of its node learn of it when they gather."""

    error: FlexcommError

    def verify(self, ctx: BucketContext) -> list[str]:
        del ctx
        raise self.error

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        del ctx, outputs
        raise self.error


def encode_(
    ctx: BucketContext,
    encoder: Encoder,
    shard: Sequence[Tensor],
    states: Sequence[Tensor] | None,
    states_out: Sequence[Tensor] | None,
) -> None:
    """Fill the encoder's buffer, or mark it where values are nonfinite."""
    with Timed(ctx.record, "encode"):
        if ctx.nonfinite:
            encoder.mark_nonfinite_(step=ctx.step, sequence=ctx.sequence)
        else:
            ctx.nonfinite = encoder.encode_(shard, states, states_out, ctx.update, step=ctx.step, sequence=ctx.sequence)


def decoder_for(
    ctx: BucketContext,
    plan: BufferPlan,
    gathered: Tensor,
    senders: Sequence[str],
    decoded_as: BufferPlan | None = None,
) -> Decoder:
    """Return a decoder of buffers that are all as long as the plan says."""
    return Decoder(plan, gathered, regions_of(senders, [plan.nbytes] * len(senders)), ctx.kernels, decoded_as)


@dataclass(frozen=True)
class GatheredPayloads:
    """The buffers of all nodes, one behind the other."""

    gathered: Tensor
    decoder: Decoder

    def verify(self, ctx: BucketContext) -> list[str]:
        return self.decoder.verify(step=ctx.step, sequence=ctx.sequence)

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        self.decoder.decode_(outputs, step=ctx.step, average=ctx.average)


def gather(ctx: BucketContext, shard: list[Tensor]) -> Steps[GatheredPayloads]:
    """All-gather buffers whose length follows from the plan: one collective, and no exchange of lengths."""
    nbytes = ctx.buffer_plan.nbytes
    encoder = ctx.buffers.get("encoder", lambda: _make_encoder(ctx))
    encode_(ctx, encoder, shard, ctx.states, ctx.states_out)
    ctx.record.payload_bytes += nbytes
    received = ctx.buffers.get("gathered", lambda: _make_gathered(ctx))
    moved = (ctx.nodes - 1) * nbytes
    yield Collective("exchange", methodcaller("all_gather", encoder.buffer, received.gathered), moved, moved)
    return received


def _make_encoder(ctx: BucketContext) -> Encoder:
    return Encoder(ctx.buffer_plan, ctx.buffers.allocate(ctx.buffer_plan.nbytes), ctx.kernels)


def _make_gathered(ctx: BucketContext) -> GatheredPayloads:
    gathered = ctx.buffers.allocate(ctx.nodes, ctx.buffer_plan.nbytes)
    return GatheredPayloads(gathered, decoder_for(ctx, ctx.buffer_plan, gathered, ctx.senders))


def gatherv(ctx: BucketContext, shard: list[Tensor]) -> Steps[Received]:
    """All-gather lengths, then buffers as long as what they hold."""
    most = ctx.buffer_plan.nbytes
    encoder = ctx.buffers.get("encoder", lambda: _make_encoder(ctx))
    encode_(ctx, encoder, shard, ctx.states, ctx.states_out)
    nbytes = encoder.nbytes
    moved = (ctx.nodes - 1) * torch.int64.itemsize
    length = torch.tensor([nbytes], device="cpu")
    lengths = yield Collective("exchange", methodcaller("all_gather", length), moved, moved, is_short=True)
    counts: list[int] = lengths.view(-1).tolist()
    for sender, count in zip(ctx.senders, counts, strict=True):
        if not 0 < count <= most:
            problem = f"it announces {count} bytes, where 1 to {most} are possible: install one release on every rank."
            return FailedExchange(WireError(sender, "length", problem))
    ctx.record.payload_bytes += nbytes
    room = ctx.buffers.get("gathered of any length", lambda: ctx.buffers.allocate(ctx.nodes * most))
    gathered = room[: sum(counts)]
    start = methodcaller("all_gatherv", encoder.buffer[:nbytes], counts, gathered)
    yield Collective("second_exchange", start, (ctx.nodes - 1) * nbytes, sum(counts) - nbytes)
    return GatheredPayloads(gathered, Decoder(ctx.buffer_plan, gathered, regions_of(ctx.senders, counts), ctx.kernels))


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
        self.decoder.decode_(outputs, step=ctx.step, average="nodes")
        if ctx.nodes > 1:
            for out in outputs:
                out.div_(ctx.nodes)


def reduce(ctx: BucketContext, shard: list[Tensor]) -> Steps[ReducedValues]:
    """All-reduce the values, where every node sends the same coefficients.

    No header travels, but a digest of it does, one number for each bit: where all nodes agree, each bit sums up to 0 or
    to the number of nodes.
    """
    reduced = ctx.buffers.get("reduced", lambda: _make_reduced(ctx))
    encode_(ctx, reduced.encoder, shard, ctx.states, ctx.states_out)
    reduced.digest.copy_(digest_bits(ctx))
    reduced.nonfinite.fill_(bool(ctx.nonfinite))
    ctx.record.payload_bytes += reduced.values.nbytes
    moved = 2 * reduced.values.nbytes * (ctx.nodes - 1) // ctx.nodes
    yield Collective("exchange", methodcaller("all_reduce", reduced.values), moved, moved)
    return reduced


def _make_reduced(ctx: BucketContext) -> ReducedValues:
    plan, dtype = ctx.buffer_plan, _value_dtype(ctx.buffer_plan)
    assert dtype is not None, "plans are asked before they are reduced"  # noqa: S101  (our own invariant)
    tail = (_DIGEST_BITS + 1) * dtype.itemsize
    buffer = ctx.buffers.allocate(plan.nbytes + -(-tail // 4) * 4)
    values = buffer[HEADER_NBYTES : plan.nbytes + tail].view(dtype)
    return ReducedValues(
        Encoder(plan, buffer, ctx.kernels),
        decoder_for(ctx, plan, buffer, ["the sum over nodes"]),
        values,
        values[-_DIGEST_BITS - 1 : -1],
        values[-1:],
    )


def digest_bits(ctx: BucketContext) -> Tensor:
    """Return what all nodes must have in common as 64 zeros and ones, which sums can be compared with."""
    digest = hash((ctx.plan.digests[ctx.local_rank], ctx.step, ctx.sequence))  # integers hash alike in every process
    octets = np.frombuffer(digest.to_bytes(_DIGEST_BITS // 8, "little", signed=True), np.uint8)
    return torch.from_numpy(np.unpackbits(octets, bitorder="little").astype(np.float32))


def can_reduce(plan: BufferPlan, nodes: int) -> bool:
    """Return whether every node sends the same coefficients, in one dtype that can count the nodes."""
    dtype = _value_dtype(plan)
    # Up to 2 / eps a dtype counts without rounding.
    can_count = dtype is not None and nodes <= 2 / torch.finfo(dtype).eps
    return can_count and not any(one.sends_indices for one in plan.plans)


def _value_dtype(plan: BufferPlan) -> torch.dtype | None:
    codes = {one.values for one in plan.plans} or {ValueCode.FP32}
    return codes.pop().format.sum_dtype if len(codes) == 1 else None


def dense_plan(plan: TensorPlan, dtype: torch.dtype) -> TensorPlan:
    """Return a plan that sends every coefficient, in the same coordinates."""
    return replace(
        plan,
        selection=Selection.EVERYTHING,
        k=plan.chunk_numel,
        values=ValueCode.of(dtype),
        tau=0.0,
        seed=0,
        variable_length=False,
    )
