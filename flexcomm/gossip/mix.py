"""The path of one mix, from a bucket of every rank to the weighted sum that replaces it.

The ranks of a node average the bucket, each keeping one shard of it; ranks of equal local rank send their shard to the
peers of this round and receive theirs; the ranks of a node gather the mixed shards. Shards of FSDP are averaged inside
the node already, so only the leg between nodes is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from flexcomm.errors import FlexcommError, SyncError, TransportError
from flexcomm.gossip.compressed import send_recv_changes
from flexcomm.gossip.messages import HEADER_NBYTES, MessageHeader, send_recv_messages
from flexcomm.gossip.plan import round_of
from flexcomm.gossip.worker import comm_thread_of
from flexcomm.stats import SyncRecord
from flexcomm.sync.plan import sum_dtype

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from flexcomm.gossip.compressed import MixResiduals
    from flexcomm.gossip.phase import Phase
    from flexcomm.gossip.plan import MixPlan, Round
    from flexcomm.gossip.push_sum import PushSum
    from flexcomm.sync.buffers import Buffers
    from flexcomm.transport import Transport
    from flexcomm.world import World

__all__ = ["MixCall", "MixContext", "WeightedSum", "mix_bucket"]


class WeightedSum(NamedTuple):
    """The sum that replaces ``x``: ``self_weight * x + sum of weights[j] * others[j]``.

    ``push_weight`` is this node's push-sum weight after the round.
    """

    self_weight: float
    others: list[Tensor]
    weights: list[float]
    push_weight: float


@dataclass(eq=False)
class MixContext:
    """One mix under way, and everything its path needs."""

    plan: MixPlan
    round: Round
    header: MessageHeader
    intra: Transport
    inter: Transport
    buffers: Buffers
    record: SyncRecord
    has_push_sum: bool
    residuals: MixResiduals | None

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat buffer; groups differ from phase to phase, so one name may stand for several lengths."""
        return _flat_buffer(self.buffers, name, numel, dtype)

    def count_messages(self, sent: int, received: int, nbytes: int) -> None:
        """Count messages with payloads of ``nbytes``."""
        self.record.count("inter", sent * (nbytes + HEADER_NBYTES), received * (nbytes + HEADER_NBYTES))
        self.record.payload_bytes += sent * nbytes


def mix_bucket(ctx: MixContext, x: Tensor) -> WeightedSum:
    """Return the weighted sum that replaces the flat bucket ``x``. Writes neither ``x`` nor any output."""
    if not ctx.plan.averages_inside:
        return mix_between_nodes(ctx, x)
    shard = reduce_scatter_inside(ctx, x)
    terms = _mix_on_all_ranks(ctx, shard)
    ctx.plan.kernels.mix_(shard, terms.self_weight, terms.others, terms.weights, shard)
    mixed = all_gather_inside(ctx, shard)
    return WeightedSum(0.0, [mixed[: x.numel()]], [1.0], terms.push_weight)


def reduce_scatter_inside(ctx: MixContext, x: Tensor) -> Tensor:
    """Return this rank's shard of the average over the ranks of this node."""
    ranks, numel, dtype = ctx.intra.size, -(-x.numel() // ctx.intra.size), sum_dtype(x.dtype)
    # Zeros, because nothing is copied behind the end of x, and compressors read the whole shard.
    rows = ctx.buffers.get("rows", lambda: ctx.buffers.allocate(ranks * numel, dtype=dtype).zero_())
    rows[: x.numel()] = x
    total = ctx.buffer("sum", numel, dtype)
    ctx.record.count("intra", (ranks - 1) * total.nbytes, (ranks - 1) * total.nbytes)
    ctx.intra.reduce_scatter(rows.view(ranks, numel), total).wait()
    return ctx.buffer("shard", numel, x.dtype).copy_(total.mul_(1.0 / ranks))


def all_gather_inside(ctx: MixContext, shard: Tensor) -> Tensor:
    """Return the shards of all ranks of this node, one behind the other."""
    ranks = ctx.intra.size
    gathered = ctx.buffer("gathered", ranks * shard.numel(), shard.dtype)
    ctx.record.count("intra", (ranks - 1) * shard.nbytes, (ranks - 1) * shard.nbytes)
    ctx.intra.all_gather(shard, gathered.view(ranks, shard.numel())).wait()
    return gathered


def _mix_on_all_ranks(ctx: MixContext, shard: Tensor) -> WeightedSum:
    """Mix between nodes. If one rank of this node fails, all of them raise: the others would wait for its shard."""
    terms, failure = None, None
    try:
        terms = mix_between_nodes(ctx, shard)
    except TransportError:
        raise
    except FlexcommError as error:
        failure = error
    failed = ctx.intra.all_reduce(torch.tensor([float(terms is None)], device=shard.device)).wait()
    if failure is not None:
        raise failure
    if terms is None or failed.item():
        raise SyncError("another rank of this node could not mix its shard, and nothing was changed; it says why.")
    return terms


def mix_between_nodes(ctx: MixContext, x: Tensor) -> WeightedSum:
    """Communicate with the peers of this round, and return the weighted sum that replaces ``x``."""
    if ctx.residuals is not None:
        return mix_compressed(ctx, x, ctx.residuals)
    return mix_group(ctx, x) if ctx.round.group else mix_with_peers(ctx, x)


def mix_with_peers(ctx: MixContext, x: Tensor) -> WeightedSum:
    """Send ``x`` to each peer and receive theirs."""
    peers = ctx.round.receives_from
    buffers = [ctx.buffer(f"from peer {number}", x.numel(), x.dtype) for number in range(len(peers))]
    ctx.count_messages(len(ctx.round.sends_to), len(peers), x.nbytes)
    sends = [(peer, x) for peer in ctx.round.sends_to]
    received = send_recv_messages(ctx.inter, ctx.header, sends, list(zip(peers, buffers, strict=True)))
    weights = [weight * push for weight, push in zip(ctx.round.weights, received.push_weights, strict=True)]
    return _weigh(ctx, received.payloads, weights, sum(weights))


def mix_group(ctx: MixContext, x: Tensor) -> WeightedSum:
    """All-reduce ``x`` over the group: a reduce-scatter, then an all-gather, both by sends and receives."""
    group, (weight,), node = ctx.round.group, ctx.round.weights, ctx.inter.rank
    others = [peer for peer in group if peer != node]
    parts = dict(zip(group, torch.tensor_split(x, len(group)), strict=True))
    own = parts[node]
    buffers = {peer: ctx.buffer(f"part from {peer}", own.numel(), x.dtype) for peer in others}
    ctx.count_messages(len(others), len(others), own.nbytes)
    sends, receives = [(peer, parts[peer]) for peer in others], [(peer, buffers[peer]) for peer in others]
    received = send_recv_messages(ctx.inter, ctx.header, sends, receives)
    push_weights = dict(zip(others, received.push_weights, strict=True)) | {node: ctx.header.push_weight}
    # Group order, not arrival order: each part is added by another node, and all must add alike.
    first, *rest = [buffers.get(peer, own) for peer in group]
    weights = [weight * push_weights[peer] for peer in group]
    total = ctx.buffer("group sum", x.numel(), x.dtype)
    sums = dict(zip(group, torch.tensor_split(total, len(group)), strict=True))
    ctx.plan.kernels.mix_(first, weights[0], rest, weights[1:], sums[node])
    ctx.count_messages(len(others), len(others), own.nbytes)
    ctx.inter.send_recv([(peer, sums[node]) for peer in others], [(peer, sums[peer]) for peer in others]).wait()
    return _weigh(ctx, [total], [1.0], sum(weights))


def mix_compressed(ctx: MixContext, x: Tensor, residuals: MixResiduals) -> WeightedSum:
    """Send the compressed change of ``x`` to each peer, and move ``x`` towards the sum of what peers have sent."""
    changes = send_recv_changes(ctx, x, residuals)
    weights = [weight * push for weight, push in zip(ctx.round.weights, changes.push_weights, strict=True)]
    push_weight = _push_weight_after(ctx, sum(weights))
    return WeightedSum(
        ctx.header.push_weight / push_weight, [changes.step], [ctx.plan.gamma / push_weight], push_weight
    )


def _weigh(ctx: MixContext, others: list[Tensor], weights: list[float], received: float) -> WeightedSum:
    """Return the sum of the share ``gamma`` of the way; ``received`` is the push-sum weight that peers sent."""
    gamma, push_weight = ctx.plan.gamma, _push_weight_after(ctx, received)
    self_weight = ((1.0 - gamma) + gamma * ctx.round.self_weight) * ctx.header.push_weight / push_weight
    return WeightedSum(self_weight, others, [gamma * weight / push_weight for weight in weights], push_weight)


def _push_weight_after(ctx: MixContext, received: float) -> float:
    """Return this node's push-sum weight after the round; 1 without push-sum."""
    if not ctx.has_push_sum:
        return 1.0
    gamma, own = ctx.plan.gamma, ctx.header.push_weight
    return (1.0 - gamma) * own + gamma * (ctx.round.self_weight * own + received)


class MixCall:
    """One call under way: communicates on the comm thread, and writes its outputs when it is waited for."""

    def __init__(
        self,
        world: World,
        plan: MixPlan,
        tensors: list[Tensor],
        outputs: list[Tensor],
        step: int,
        push_sum: PushSum | None,
        residuals: MixResiduals | None,
    ) -> None:
        self.record = SyncRecord(syncs=1, dense_bytes=plan.numel * plan.dtype.itemsize)
        self._world, self._plan, self._outputs, self._step = world, plan, outputs, step
        self._push_sum, self._residuals = push_sum, residuals
        if residuals is not None:
            residuals.claim()
        self._buffers = plan.pool.take()
        self._flat = _flatten(tensors, self._buffers, plan)
        self._received: Future[WeightedSum] | None = None
        self._squared_distance: Tensor | None = None

    def start(self, phase: Phase) -> None:
        """Submit this node's round of a phase to the comm thread."""
        if self._world.topology.size == 1:
            return
        plan, thread = self._plan, comm_thread_of(self._world, self._plan.communicator)
        # Nodes without a peer count, too: the headers of all nodes carry the number of the call.
        thread.sequence += 1
        node = self._world.topology.node
        round_ = round_of(phase, node)
        if round_.is_idle and not plan.averages_inside:
            return
        ctx = MixContext(
            plan=plan,
            # Compressed payloads cannot be added on the way.
            round=round_ if plan.buffer_plan is None else round_.without_group(node),
            header=MessageHeader(
                plan.digest, self._step, thread.sequence, 1.0 if self._push_sum is None else self._push_sum.weight
            ),
            intra=thread.groups.intra,
            inter=thread.groups.inter,
            buffers=self._buffers,
            record=self.record,
            has_push_sum=self._push_sum is not None,
            residuals=self._residuals,
        )
        self._received = thread.submit(partial(mix_bucket, ctx, self._flat))

    def has_received(self) -> bool:
        return self._received is None or self._received.done()

    def wait_received(self) -> WeightedSum:
        """Return the sum to be written; a node without peers keeps its values."""
        if self._received is None:
            return WeightedSum(1.0, [], [], 1.0)
        try:
            with self.record.time("waiting"):
                terms = self._received.result()
        except BaseException:
            self._unclaim()
            raise
        comm_thread_of(self._world, self._plan.communicator).order_current_stream()
        return terms

    def cancel(self) -> None:
        """Wait for the messages and ignore them: peers count on them being received."""
        self.wait_received()
        self._unclaim()

    def finish(self) -> Tensor:
        """Write the outputs, once, and return the squared distance from the input."""
        if self._squared_distance is None:
            self._squared_distance = self._write_outputs()
            self._unclaim()
            self._world.add_stats(self.record, step=self._step)
            self._plan.pool.give_back(self._buffers)
        return self._squared_distance

    def _write_outputs(self) -> Tensor:
        terms = self.wait_received()
        with torch.no_grad():
            out = _flat_output(self._outputs, self._buffers, self._plan)
            moved = self._plan.kernels.mix_(self._flat, terms.self_weight, terms.others, terms.weights, out)
            _unflatten(out, self._outputs)
        if self._received is not None:
            if self._residuals is not None:
                self._residuals.commit()
            if self._push_sum is not None:
                self._push_sum.weight = terms.push_weight
        return moved

    def _unclaim(self) -> None:
        if self._residuals is not None:
            self._residuals.unclaim()


def _flatten(tensors: list[Tensor], buffers: Buffers, plan: MixPlan) -> Tensor:
    """Return all elements as one flat tensor: a view of a single tensor, or a copy of several."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1)
    flat = _flat_buffer(buffers, "input", plan.numel, plan.dtype)
    if tensors:
        torch.cat([x.reshape(-1) for x in tensors], out=flat)
    return flat


def _flat_output(outputs: list[Tensor], buffers: Buffers, plan: MixPlan) -> Tensor:
    if len(outputs) == 1 and outputs[0].is_contiguous():
        return outputs[0].detach().view(-1)
    return _flat_buffer(buffers, "output", plan.numel, plan.dtype)


def _unflatten(flat: Tensor, outputs: list[Tensor]) -> None:
    """Copy the flat output into the outputs, unless it is a view of them."""
    if len(outputs) == 1 and outputs[0].is_contiguous():
        return
    parts = torch.split(flat, [x.numel() for x in outputs])
    for part, out in zip(parts, outputs, strict=True):
        out.detach().copy_(part.view(out.shape))


def _flat_buffer(buffers: Buffers, name: str, numel: int, dtype: torch.dtype) -> Tensor:
    return buffers.get(f"{name}, {numel} of {dtype}", lambda: buffers.allocate(numel, dtype=dtype))
