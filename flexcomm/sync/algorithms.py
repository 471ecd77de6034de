"""Algorithms: how a bucket crosses between nodes.

An algorithm is a generator: it encodes this rank's shard, yields each :class:`Collective` it needs, is resumed with the
result, and returns an object that verifies and decodes what was received.

``plan.choose_algorithms`` picks one by what it sends. With P nodes and buffers of B bytes, a node sends (P-1) B to
``gather``, 2 (P-1)/P B to ``reduce``, and (P-1)/P (B + A) to ``two_phase``, where A is the length of all averages.
``dense`` costs 2 (P-1)/P N, for tensors of N bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, SupportsInt, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from flexcomm.codec import Decoder, Encoder, TensorShard, assemble_buffer, shard_tensor
from flexcomm.compress import TensorSpec
from flexcomm.device import copy_to_host, is_on_host, synchronize_event, to_device
from flexcomm.errors import ConfigMismatchError
from flexcomm.kernels import BufferPlan, DeviceStatus, Problem, Selection, StateUpdate, ValueCode
from flexcomm.kernels.layout import HEADER_NBYTES
from flexcomm.stats import Timed
from flexcomm.transport import Handle, Transport

if TYPE_CHECKING:
    from flexcomm.sync.bucket import BucketContext

Algorithm = Literal["gather", "gatherv", "reduce", "two_phase", "dense", "codec"]
Leg = Literal["reduce_inside", "exchange", "second_exchange", "gather_inside"]
"""A part of a bucket's path, with a process group of its own: at most one collective of a sync, or several of a mix."""
LEGS: tuple[Leg, ...] = get_args(Leg)
LEVELS: dict[Leg, Literal["intra", "inter"]] = {leg: "intra" if "inside" in leg else "inter" for leg in LEGS}


class Collective(NamedTuple):
    """A collective that a bucket asks its driver to start; the bucket is resumed with the result."""

    leg: Leg
    start: Callable[[Transport], Handle[Any]]
    sent_bytes: int
    received_bytes: int
    is_short: bool = False  # waiting for it costs little


Read = Literal["read"]
READ: Read = "read"
"""What a bucket yields before it reads a device's memory, for which it waits. It is resumed with None."""

T = TypeVar("T")
Steps = Generator[Collective | Read, Any, T]
"""A part of a bucket's path that returns a ``T``."""


Words = Tensor | list[int]
"""Outcomes of checks, 0 where nothing is wrong: int64, in a device's memory; or numbers, if the host has them."""


def read_words(words: Words, timeout_s: float) -> Steps[list[int]]:
    """Return numbers that may be in a device's memory: the one place where a bucket waits for it."""
    if isinstance(words, Tensor) and not is_on_host(words):
        words, copied = copy_to_host(words)
        yield READ
        # Not for the whole stream, which may have been given later buckets.
        synchronize_event(copied, timeout_s)
    numbers: list[int] = words.tolist() if isinstance(words, Tensor) else words
    return numbers


def words_of(statuses: Sequence[SupportsInt]) -> Words:
    """Return statuses as numbers, or as they are in the device's memory."""
    words = [status.word for status in statuses if isinstance(status, DeviceStatus)]
    return torch.cat(words) if words else [int(status) for status in statuses]


class Received(Protocol):
    """What came from other ranks for some of the bucket's shards."""

    def check(self, ctx: BucketContext) -> Words:
        """Check it, without waiting for a device; return what was found, for :meth:`explain`."""
        ...

    def explain(self, ctx: BucketContext, words: list[int]) -> list[str]:
        """Raise what was found to be wrong; return the senders that had nonfinite values."""
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
        encoder.enqueue_(tensors, states, states_out, update, step=ctx.step, sequence=ctx.sequence)
        if isinstance(encoder.status, DeviceStatus):
            # Nobody waits for it: if there was a problem, receivers find it in the header, this rank among them.
            ctx.problems.append(partial(encoder.problem, tensors))
        else:
            ctx.nonfinite = encoder.problem(tensors)
    if ctx.in_place and states is not None:
        ctx.rollbacks.append(partial(encoder.rollback_, tensors, states, update, step=ctx.step))


@dataclass(frozen=True)
class GatheredPayloads:
    """The buffers of all nodes, one behind the other."""

    gathered: Tensor
    decoder: Decoder

    def check(self, ctx: BucketContext) -> Words:
        return words_of([self.decoder.check(step=ctx.step, sequence=ctx.sequence)])

    def explain(self, ctx: BucketContext, words: list[int]) -> list[str]:
        return self.decoder.explain(words[0], step=ctx.step, sequence=ctx.sequence)

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        self.decoder.decode_(outputs, step=ctx.step, average=ctx.plan.settings.average, epilogue=ctx.epilogue)


def gather(ctx: BucketContext, shard: list[Tensor]) -> Steps[GatheredPayloads]:
    """All-gather buffers whose length follows from the plan: one collective, and no exchange of lengths."""
    plan, nodes, encoder = ctx.buffer_plan, ctx.plan.nodes, _encode_shard(ctx, shard)
    gathered = ctx.buffers.get("gathered", lambda: ctx.buffers.allocate(nodes, plan.nbytes))
    decoder = ctx.buffers.get("decoder", lambda: Decoder(plan, gathered, ctx.senders, ctx.plan.kernels))
    ctx.record.payload_bytes += plan.nbytes
    moved = (nodes - 1) * plan.nbytes
    yield Collective("exchange", methodcaller("all_gather", encoder.buffer, gathered), moved, moved)
    return GatheredPayloads(gathered, decoder)


def gatherv(ctx: BucketContext, shard: list[Tensor]) -> Steps[GatheredPayloads]:
    """All-gather lengths, then buffers as long as what they hold."""
    plan, nodes, encoder = ctx.buffer_plan, ctx.plan.nodes, _encode_shard(ctx, shard)
    moved = (nodes - 1) * torch.int64.itemsize
    # From where the payloads are: not every transport that carries those carries host tensors.
    length = encoder.payload_nbytes.clone()
    lengths = yield Collective("exchange", methodcaller("all_gather", length), moved, moved, is_short=True)
    payloads_nbytes = yield from read_words(lengths.view(-1), ctx.plan.timeout_s)
    counts = [HEADER_NBYTES + nbytes for nbytes in payloads_nbytes]
    nbytes = counts[ctx.plan.node]
    ctx.record.payload_bytes += nbytes
    room = ctx.buffers.get("gathered of any length", lambda: ctx.buffers.allocate(nodes * plan.nbytes))
    gathered = room[: sum(counts)]
    # Before anything is received: it refuses lengths that cannot be.
    received = GatheredPayloads(gathered, Decoder(plan, gathered, ctx.senders, ctx.plan.kernels, counts))
    start = methodcaller("all_gatherv", encoder.buffer[:nbytes], counts, gathered)
    yield Collective("second_exchange", start, (nodes - 1) * nbytes, sum(counts) - nbytes)
    return received


def _encode_shard(ctx: BucketContext, shard: list[Tensor]) -> Encoder:
    plan = ctx.buffer_plan
    encoder = ctx.buffers.get("encoder", lambda: Encoder(plan, ctx.buffers.allocate(plan.nbytes), ctx.plan.kernels))
    encode_(ctx, encoder, shard, ctx.states, ctx.states_out, ctx.update)
    return encoder


_DIGEST_BITS = 64


class ReducedValues:
    """Values summed over nodes; behind them, the bits of a digest and a count of nodes with nonfinite values."""

    def __init__(self, ctx: BucketContext) -> None:
        plan, dtype, kernels = ctx.buffer_plan, _value_dtype(ctx.buffer_plan), ctx.plan.kernels
        assert dtype is not None, "plans are asked before they are reduced"  # noqa: S101  (our own invariant)
        tail = (_DIGEST_BITS + 1) * dtype.itemsize
        buffer = ctx.buffers.allocate(plan.nbytes + -(-tail // 4) * 4)
        self.values = buffer[HEADER_NBYTES : plan.nbytes + tail].view(dtype)
        self.digest, self.nonfinite = self.values[-_DIGEST_BITS - 1 : -1], self.values[-1:]
        self.encoder = Encoder(plan, buffer, kernels)
        self.decoder = Decoder(plan, buffer, ["the sum over nodes"], kernels, summed=ctx.plan.nodes)

    def check(self, ctx: BucketContext) -> Words:
        expected = (digest_bits(ctx) * ctx.plan.nodes).to(self.digest.dtype)
        differs = (self.digest != to_device(expected, self.digest.device)).any()
        nonfinite = self.nonfinite[0].to(torch.int64)
        # As words of statuses, the number of nodes where others have that of the tensor.
        return torch.stack((differs * int(Problem.HEADER), (nonfinite << 8) + (nonfinite != 0)))

    def explain(self, ctx: BucketContext, words: list[int]) -> list[str]:
        differs, nonfinite = words[0], words[1] >> 8
        if differs:
            raise ConfigMismatchError(
                "nodes disagree on what they add up: their tensors, compressor, step or order of calls differ. Nothing "
                "was changed. Make them equal on every rank."
            )
        return [f"{nonfinite} of {ctx.plan.nodes} nodes"] if nonfinite else []

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        self.decoder.decode_(outputs, step=ctx.step, average="nodes", epilogue=ctx.epilogue)


def reduce(ctx: BucketContext, shard: list[Tensor]) -> Steps[ReducedValues]:
    """All-reduce the values, where every node sends the same coefficients.

    Sums travel without header and checksum, so damage on the way is not found. A digest of what nodes must agree on
    does travel, one number for each bit: where all agree, each sums up to 0 or to the number of nodes.
    """
    nodes, reduced = ctx.plan.nodes, ctx.buffers.get("reduced", lambda: ReducedValues(ctx))
    encoder, summed = reduced.encoder, reduced.encoder.buffer
    if ctx.in_place:
        # The sum takes the place of what was sent, which a rollback needs.
        encoder = ctx.buffers.get("sent", lambda: Encoder(ctx.buffer_plan, torch.empty_like(summed), ctx.plan.kernels))
    encode_(ctx, encoder, shard, ctx.states, ctx.states_out, ctx.update)
    if encoder is not reduced.encoder:
        summed.copy_(encoder.buffer)
    reduced.digest.copy_(to_device(digest_bits(ctx), summed.device), non_blocking=True)
    if isinstance(encoder.status, DeviceStatus) and not ctx.nonfinite:
        reduced.nonfinite.copy_(encoder.status.word != 0)
    else:
        reduced.nonfinite.fill_(bool(ctx.nonfinite))
    ctx.record.payload_bytes += reduced.values.nbytes
    moved = 2 * reduced.values.nbytes * (nodes - 1) // nodes
    yield Collective("exchange", methodcaller("all_reduce", reduced.values), moved, moved)
    return reduced


def digest_bits(ctx: BucketContext) -> Tensor:
    """Return the digest of what all nodes must have in common as 64 zeros and ones, which can be summed."""
    octets = np.frombuffer(digest_of(ctx, ctx.bucket.digests[ctx.plan.local_rank]), np.uint8)
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


NumberedShard = tuple[int, TensorShard]
"""A shard, and the number of the tensor, or of the shard, that it is a part of."""


class NodePart:
    """The part of a bucket that one node averages in ``two_phase``: shards of shards, with the plans of both phases."""

    def __init__(self, shards: list[NumberedShard], nodes: int) -> None:
        self.shards = shards
        specs, plans = tuple(shard.spec for _, shard in shards), tuple(shard.plan for _, shard in shards)
        flat_specs = tuple(
            TensorSpec(f"{spec.name} averaged", (plan.chunks * plan.chunk_numel,), torch.float32)
            for spec, plan in zip(specs, plans, strict=True)
        )
        # Averages hold, in full precision, all coefficients that any node may have sent.
        unions = []
        for plan in plans:
            k = min(plan.k * nodes, plan.chunk_numel)
            selection = Selection.EVERYTHING if k == plan.chunk_numel else Selection.TOP_K
            unions.append(replace(plan, selection=selection, k=k, values=ValueCode.FP32))
        # The buffers that all nodes send it, decoded to flat chunks that are not transformed back.
        self.sent = assemble_buffer(specs, plans)
        self.coefficients = assemble_buffer(flat_specs, tuple(plan.of_coefficients() for plan in plans))
        # The buffer of averages that it sends on, decoded to the elements they stand for.
        self.averaged = assemble_buffer(flat_specs, tuple(plan.of_coefficients() for plan in unions))
        self.restored = assemble_buffer(specs, tuple(unions))

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [shard.of(tensors[number]) for number, shard in self.shards]

    def state_views(self, states: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
        return states and [shard.state_of(states[number]) for number, shard in self.shards]


@lru_cache(maxsize=1024)
def plan_two_phase(shards: tuple[TensorShard, ...], nodes: int) -> list[NodePart]:
    """Return which part of a rank's shards each node averages."""
    by_node: list[list[NumberedShard]] = [[] for _ in range(nodes)]
    for number, shard in enumerate(shards):
        for own, part in zip(by_node, shard_tensor(shard.spec, shard.plan, nodes), strict=True):
            own += [] if part is None else [(number, part)]
    return [NodePart(own, nodes) for own in by_node]


class TwoPhases:
    """The buffers of both phases; ``decoders`` read the averages of all parts, each from the node that computed it."""

    def __init__(self, ctx: BucketContext) -> None:
        nodes, kernels, allocate = ctx.plan.nodes, ctx.plan.kernels, ctx.buffers.allocate
        self.parts = plan_two_phase(ctx.shards, nodes)
        own, longest = self.parts[ctx.plan.node], max(part.averaged.nbytes for part in self.parts)
        self.encoders = [Encoder(part.sent, allocate(part.sent.nbytes), kernels) for part in self.parts]
        self.received = allocate(nodes, own.sent.nbytes)
        self.own_decoder = Decoder(own.sent, self.received, ctx.senders, kernels, decoded_as=own.coefficients)
        self.own_status: SupportsInt = 0
        self.coefficients = [allocate(*spec.shape, dtype=torch.float32) for spec in own.coefficients.specs]
        self.averages = Encoder(own.averaged, allocate(longest), kernels)
        self.gathered = allocate(nodes, longest)
        self.decoders = [
            Decoder(part.averaged, row[: part.averaged.nbytes], [sender], kernels, decoded_as=part.restored)
            for part, row, sender in zip(self.parts, self.gathered, ctx.senders, strict=True)
        ]

    def check(self, ctx: BucketContext) -> Words:
        statuses = [one.check(step=ctx.step, sequence=ctx.sequence) for one in self.decoders]
        return words_of([self.own_status, *statuses])

    def explain(self, ctx: BucketContext, words: list[int]) -> list[str]:
        decoders = zip((self.own_decoder, *self.decoders), words, strict=True)
        found = (one.explain(word, step=ctx.step, sequence=ctx.sequence) for one, word in decoders)
        return list(dict.fromkeys(sender for senders in found for sender in senders))

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        for part, decoder in zip(self.parts, self.decoders, strict=True):
            decoder.decode_(part.views(outputs), step=ctx.step, average="nodes", epilogue=ctx.epilogue)


def two_phase(ctx: BucketContext, shard: list[Tensor]) -> Steps[TwoPhases]:
    """Send every node its part, average what came for this node's part, and all-gather the averages."""
    phases = ctx.buffers.get("two phases", lambda: TwoPhases(ctx))
    for part, encoder in zip(phases.parts, phases.encoders, strict=True):
        states, states_out = part.state_views(ctx.states), part.state_views(ctx.states_out)
        encode_(ctx, encoder, part.views(shard), states, states_out, ctx.update)
    sends, others = [(node, encoder.buffer) for node, encoder in enumerate(phases.encoders)], ctx.plan.nodes - 1
    payload_nbytes, own_nbytes = sum(buffer.nbytes for _, buffer in sends), phases.received[0].nbytes
    ctx.record.payload_bytes += payload_nbytes
    start = methodcaller("send_recv", sends, list(enumerate(phases.received)))
    yield Collective("exchange", start, payload_nbytes - own_nbytes, others * own_nbytes)
    with Timed(ctx.record, "decode"):
        status = phases.own_status = phases.own_decoder.check(step=ctx.step, sequence=ctx.sequence)
        if isinstance(status, DeviceStatus):
            # Not read here: averages of what is not finite are marked as nothing to send, too.
            if phases.coefficients:
                phases.coefficients[0].view(-1)[:1].fill_(0.0)
                phases.own_decoder.decode_(phases.coefficients, step=ctx.step, average=ctx.plan.settings.average)
                phases.coefficients[0].view(-1)[:1].masked_fill_(status.word != 0, torch.nan)
        elif int(status):
            # The other nodes wait for the averages, which are marked as nothing to send.
            ctx.nonfinite = ctx.nonfinite or "what came from other nodes cannot be used"
        elif not ctx.nonfinite:
            phases.own_decoder.decode_(phases.coefficients, step=ctx.step, average=ctx.plan.settings.average)
    encode_(ctx, phases.averages, phases.coefficients)
    averages = phases.averages.buffer
    moved = others * averages.nbytes
    yield Collective("second_exchange", methodcaller("all_gather", averages, phases.gathered), moved, moved)
    return phases


ALGORITHMS: dict[Algorithm, Callable[[BucketContext, list[Tensor]], Steps[Received]]] = {
    "gather": gather,
    "gatherv": gatherv,
    "reduce": reduce,
    "two_phase": two_phase,
    "dense": reduce,
    "codec": lambda ctx, shard: ctx.bucket.codecs[ctx.plan.local_rank].exchange(ctx, shard),
}
