"""The path of one mix, from a bucket of every rank to the weighted sum that replaces it.

The ranks of a node average the bucket, each keeping one shard of it; ranks of equal local rank send their shard to the
peers of this round and receive theirs; the ranks of a node gather the mixed shards. Shards of FSDP are averaged inside
the node already, so only the leg between nodes is left.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexcomm.codec import Decoder, Encoder, regions_of
from flexcomm.errors import ConfigMismatchError, FlexcommError, NonFiniteError, SyncError
from flexcomm.gossip.plan import MixPlan, Round
from flexcomm.gossip.state import MixResiduals, PushSum
from flexcomm.kernels import BufferPlan
from flexcomm.stats import SyncRecord, Timed
from flexcomm.sync.algorithms import Collective, Steps
from flexcomm.sync.bucket import VERIFIED, Verified
from flexcomm.sync.plan import Buffers, sum_dtype

Messages = Sequence[tuple[int, Tensor]]


@dataclass(eq=False)
class MixContext:
    """One mix under way, and everything its path needs. This is node ``node``."""

    plan: MixPlan
    tensors: list[Tensor]
    outputs: list[Tensor]
    node: int
    round: Round
    header: MessageHeader
    push_sum: PushSum | None
    residuals: MixResiduals | None
    buffers: Buffers
    record: SyncRecord
    x: Tensor = field(init=False)
    """All elements, flat: a view of a single tensor, or a copy of several."""
    squared_distance: Tensor | None = None
    """By how far the outputs are from the tensors, once they are written."""

    def __post_init__(self) -> None:
        if len(self.tensors) == 1 and self.tensors[0].is_contiguous():
            self.x = self.tensors[0].view(-1)
            return
        self.x = self.buffer("input", self.plan.numel, self.plan.dtype)
        if self.tensors:
            torch.cat([x.reshape(-1) for x in self.tensors], out=self.x)

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat buffer; groups differ from phase to phase, so one name may stand for several lengths."""
        key = f"{name}, {numel} of {dtype}"
        return self.buffers.get(key, lambda: self.buffers.allocate(numel, dtype=dtype))


class WeightedSum(NamedTuple):
    """The sum that replaces ``x``: ``self_weight * x + sum of weights[j] * others[j]``.

    ``push_weight`` is this node's push-sum weight after the round.
    """

    self_weight: float
    others: list[Tensor]
    weights: list[float]
    push_weight: float


def mix_bucket(ctx: MixContext) -> Generator[Collective | Verified, Any, None]:
    """Mix one bucket. Yields the collectives it needs, then ``VERIFIED``; resumed after that, it writes outputs."""
    shard = yield from reduce_scatter_inside(ctx)
    terms = yield from mix_and_share_failure(ctx, shard)
    terms = yield from all_gather_inside(ctx, shard, terms)
    # A mix that is cancelled is not resumed: everything stays as it was.
    yield VERIFIED
    write_outputs(ctx, terms)
    if ctx.residuals is not None:
        ctx.residuals.commit()
    if ctx.push_sum is not None:
        ctx.push_sum.weight = terms.push_weight


def reduce_scatter_inside(ctx: MixContext) -> Steps[Tensor]:
    """Return this rank's shard of the average over the ranks of this node."""
    x, ranks = ctx.x, ctx.plan.ranks
    if ranks == 1:
        return x
    numel, dtype = -(-x.numel() // ranks), sum_dtype(x.dtype)
    # Zeros, because nothing is copied behind the end of x, and compressors read the whole shard.
    rows = ctx.buffers.get("rows", lambda: ctx.buffers.allocate(ranks * numel, dtype=dtype).zero_())
    rows[: x.numel()] = x
    total = ctx.buffer("sum", numel, dtype)
    moved = (ranks - 1) * total.nbytes
    yield Collective("reduce_inside", methodcaller("reduce_scatter", rows.view(ranks, numel), total), moved, moved)
    return ctx.buffer("shard", numel, x.dtype).copy_(total.mul_(1.0 / ranks))


def all_gather_inside(ctx: MixContext, shard: Tensor, terms: WeightedSum) -> Steps[WeightedSum]:
    """Mix this rank's shard, and gather those of all ranks of this node, which replace the bucket."""
    ranks = ctx.plan.ranks
    if ranks == 1:
        return terms
    ctx.plan.kernels.mix_(shard, terms.self_weight, terms.others, terms.weights, shard)
    gathered, moved = ctx.buffer("gathered", ranks * shard.numel(), shard.dtype), (ranks - 1) * shard.nbytes
    rows = gathered.view(ranks, shard.numel())
    yield Collective("gather_inside", methodcaller("all_gather", shard, rows), moved, moved)
    return WeightedSum(0.0, [gathered[: ctx.x.numel()]], [1.0], terms.push_weight)


def mix_and_share_failure(ctx: MixContext, shard: Tensor) -> Steps[WeightedSum]:
    """Mix between nodes. If one rank of this node fails, all of them raise: the others would wait for its shard."""
    if ctx.plan.ranks == 1:
        return (yield from mix_between_nodes(ctx, shard))
    terms, failure = None, None
    try:
        terms = yield from mix_between_nodes(ctx, shard)
    except FlexcommError as error:
        failure = error
    failed = torch.tensor([float(terms is None)], device=shard.device)
    yield Collective("gather_inside", methodcaller("all_reduce", failed), failed.nbytes, failed.nbytes)
    if failure is not None:
        raise failure
    if terms is None or failed.item():
        raise SyncError("another rank of this node could not mix its shard, and nothing was changed; it says why.")
    return terms


def mix_between_nodes(ctx: MixContext, x: Tensor) -> Steps[WeightedSum]:
    """Communicate with the peers of this round, and return the weighted sum that replaces ``x``."""
    if ctx.residuals is not None:
        return (yield from mix_compressed(ctx, x, ctx.residuals))
    if ctx.round.is_idle:
        return WeightedSum(1.0, [], [], ctx.header.push_weight)
    return (yield from (mix_group(ctx, x) if ctx.round.group else mix_with_peers(ctx, x)))


def mix_with_peers(ctx: MixContext, x: Tensor) -> Steps[WeightedSum]:
    """Send ``x`` to each peer and receive theirs."""
    peers = ctx.round.receives_from
    received = [ctx.buffer(f"from peer {number}", x.numel(), x.dtype) for number in range(len(peers))]
    sends, receives = [(peer, x) for peer in ctx.round.sends_to], list(zip(peers, received, strict=True))
    push_weights = yield from send_recv_messages(ctx, sends, receives)
    weights = [weight * push for weight, push in zip(ctx.round.weights, push_weights, strict=True)]
    return _weigh(ctx, received, weights, sum(weights))


def mix_group(ctx: MixContext, x: Tensor) -> Steps[WeightedSum]:
    """All-reduce ``x`` over the group: a reduce-scatter, then an all-gather, both by sends and receives."""
    group, (weight,), node = ctx.round.group, ctx.round.weights, ctx.node
    others = [peer for peer in group if peer != node]
    parts = dict(zip(group, torch.tensor_split(x, len(group)), strict=True))
    own = parts[node]
    buffers = {peer: ctx.buffer(f"part from {peer}", own.numel(), x.dtype) for peer in others}
    sends, receives = [(peer, parts[peer]) for peer in others], [(peer, buffers[peer]) for peer in others]
    received = yield from send_recv_messages(ctx, sends, receives)
    push_weights = dict(zip(others, received, strict=True)) | {node: ctx.header.push_weight}
    # Group order, not arrival order: each part is added by another node, and all must add alike.
    first, *rest = [buffers.get(peer, own) for peer in group]
    weights = [weight * push_weights[peer] for peer in group]
    total = ctx.buffer("group sum", x.numel(), x.dtype)
    sums = dict(zip(group, torch.tensor_split(total, len(group)), strict=True))
    ctx.plan.kernels.mix_(first, weights[0], rest, weights[1:], sums[node])
    yield _send_recv_payloads(ctx, [(peer, sums[node]) for peer in others], [(peer, sums[peer]) for peer in others])
    return _weigh(ctx, [total], [1.0], sum(weights))


def mix_compressed(ctx: MixContext, x: Tensor, residuals: MixResiduals) -> Steps[WeightedSum]:
    """Send the compressed change of ``x`` to each peer, and move ``x`` towards the sum of what peers have sent.

    See [Note: compressed mixing]. The next state of the residuals is computed here, and committed with the outputs.
    """
    round_, own, plan = ctx.round, ctx.header.push_weight, ctx.plan.buffer_plan
    assert plan is not None, "plans with residuals have a compressor"  # noqa: S101  (our own invariant)
    state, after = residuals.lend(x.numel(), x.device)
    change = ctx.buffer("change", x.numel(), torch.float32)
    torch.sub(x if own == 1.0 else x * own, state.public, out=change)
    payload = _encode(ctx, plan, change)
    sends = [(peer, payload) for peer in round_.sends_to]
    receives = [
        (peer, ctx.buffer(f"payload {number}", plan.nbytes, torch.uint8))
        for number, peer in enumerate(round_.receives_from)
    ]
    push_weights = yield from send_recv_messages(ctx, sends, receives)
    with Timed(ctx.record, "decode"):
        # The own payload is decoded, too: peers know what was sent, not what was meant.
        _decode(ctx, plan, payload, ctx.node, change)
        torch.add(state.public, change, out=after.public)
        torch.add(state.public_sum, change, alpha=round_.self_weight, out=after.public_sum)
        for (sender, buffer), weight in zip(receives, round_.weights, strict=True):
            _decode(ctx, plan, buffer, sender, change)
            after.public_sum.add_(change, alpha=weight)
        torch.sub(after.public_sum, after.public, out=change)
    weights = [weight * push for weight, push in zip(round_.weights, push_weights, strict=True)]
    push_weight = _push_weight_after(ctx, sum(weights))
    step = ctx.buffer("step", x.numel(), x.dtype).copy_(change)
    return WeightedSum(own / push_weight, [step], [ctx.plan.gamma / push_weight], push_weight)


def _encode(ctx: MixContext, plan: BufferPlan, change: Tensor) -> Tensor:
    """Return the payload; if ``change`` is nonfinite, it is marked so, and all receivers raise."""
    encoder = Encoder(plan, ctx.buffer("payload", plan.nbytes, torch.uint8), ctx.plan.kernels)
    with Timed(ctx.record, "encode"):
        encoder.encode_(_split(change, plan), step=ctx.header.step, sequence=ctx.header.sequence)
    return encoder.buffer


def _decode(ctx: MixContext, plan: BufferPlan, payload: Tensor, sender: int, out: Tensor) -> None:
    decoder = Decoder(plan, payload, regions_of([f"node {sender}"], [plan.nbytes]), ctx.plan.kernels)
    if decoder.verify(step=ctx.header.step, sequence=ctx.header.sequence):
        raise NonFiniteError(
            f"node {sender} had NaN, infinity or a magnitude of 2**100 or more to mix: nothing was changed here. End "
            f"the run, and lower the learning rate, or clip."
        )
    decoder.decode_(_split(out, plan), step=ctx.header.step, average="nodes")


def _split(flat: Tensor, plan: BufferPlan) -> list[Tensor]:
    """Return views of the plan's tensors, which lie one behind the other."""
    parts = torch.split(flat, [math.prod(spec.shape) for spec in plan.specs])
    return [part.view(spec.shape) for part, spec in zip(parts, plan.specs, strict=True)]


def _weigh(ctx: MixContext, others: list[Tensor], weights: list[float], received: float) -> WeightedSum:
    """Return the sum of the share ``gamma`` of the way; ``received`` is the push-sum weight that peers sent."""
    gamma, push_weight = ctx.plan.gamma, _push_weight_after(ctx, received)
    self_weight = ((1.0 - gamma) + gamma * ctx.round.self_weight) * ctx.header.push_weight / push_weight
    return WeightedSum(self_weight, others, [gamma * weight / push_weight for weight in weights], push_weight)


def _push_weight_after(ctx: MixContext, received: float) -> float:
    """Return this node's push-sum weight after the round; 1 without push-sum."""
    if ctx.push_sum is None:
        return 1.0
    gamma, own = ctx.plan.gamma, ctx.header.push_weight
    return (1.0 - gamma) * own + gamma * (ctx.round.self_weight * own + received)


@torch.no_grad()
def write_outputs(ctx: MixContext, terms: WeightedSum) -> None:
    """Compute the weighted sum in a single contiguous output, or in a buffer, and copy it to several."""
    outputs = [out.detach() for out in ctx.outputs]
    in_place = len(outputs) == 1 and outputs[0].is_contiguous()
    flat = outputs[0].view(-1) if in_place else ctx.buffer("output", ctx.plan.numel, ctx.plan.dtype)
    ctx.squared_distance = ctx.plan.kernels.mix_(ctx.x, terms.self_weight, terms.others, terms.weights, flat)
    if not in_place:
        for part, out in zip(torch.split(flat, [out.numel() for out in outputs]), outputs, strict=True):
            out.copy_(part.view(out.shape))


_INT64 = 1 << 63


class MessageHeader(NamedTuple):
    """The digest of the plan, the step, the number of the call, and the sender's push-sum weight.

    It identifies the call, so a node that is in another call, or at another step, is found before any of its payload
    is used.
    """

    digest: int
    step: int
    sequence: int
    push_weight: float

    def to_tensor(self, device: torch.device) -> Tensor:
        """Return the header as four int64 words."""
        bits = struct.unpack("<q", struct.pack("<d", self.push_weight))[0]
        words = [self.digest, self.step, self.sequence, bits]
        return torch.tensor([(word + _INT64) % (2 * _INT64) - _INT64 for word in words], device=device)

    def check(self, words: Sequence[int], sender: int) -> float:
        """Return the push-sum weight in a received header. Raise if any other field differs from this one."""
        digest, step, sequence, bits = words
        fields = {
            "step": (step, self.step),
            "number of mixes so far": (sequence, self.sequence),
            "tensors, schedule or settings (by their digest)": (digest, self.digest),
        }
        for name, (theirs, ours) in fields.items():
            if (theirs - ours) % (2 * _INT64):
                raise ConfigMismatchError(
                    f"nodes disagree on what they mix, and nothing was changed: node {sender} sent {name} {theirs}, "
                    f"here it is {ours}. Mix the same tensors at the same steps, in the same order, on every node."
                )
        push_weight: float = struct.unpack("<d", struct.pack("<q", bits))[0]
        return push_weight


def send_recv_messages(ctx: MixContext, sends: Messages, receives: Messages) -> Steps[list[float]]:
    """Send a payload to each node of ``sends``, fill those of ``receives``; return the senders' push-sum weights.

    Headers travel first: a payload of another length than expected would end the process instead of raising.
    """
    if not (sends or receives):
        return []
    own = ctx.header.to_tensor(ctx.plan.device)
    headers = [(peer, torch.empty_like(own)) for peer, _ in receives]
    yield _send_recv([(peer, own) for peer, _ in sends], headers)
    push_weights = [ctx.header.check(words.tolist(), peer) for peer, words in headers]
    yield _send_recv_payloads(ctx, sends, receives)
    return push_weights


def _send_recv_payloads(ctx: MixContext, sends: Messages, receives: Messages) -> Collective:
    collective = _send_recv(sends, receives)
    ctx.record.payload_bytes += collective.sent_bytes
    return collective


def _send_recv(sends: Messages, receives: Messages) -> Collective:
    sent, received = (sum(x.nbytes for _, x in messages) for messages in (sends, receives))
    return Collective("exchange", methodcaller("send_recv", sends, receives), sent, received)
