"""The path of one mix: a bucket of every rank is replaced by a weighted sum. And the state that mixes keep.

[Note: compressed mixing] Nodes send the change since their last message, and keep what peers know of them: CHOCO's rule
(Koloskova et al. 2019) for symmetric graphs, and the same on push-sum's numerators (Taheri et al. 2020) for directed
ones. Every node keeps ``public``, the value that its peers know of its ``x``, and ``public_sum``, the weighted sum of
the public values of all nodes it receives from and of its own. In a round it sends ``q = Q(x - public)``, and then

    public += q;  public_sum += sum of w_j * q_j;  x += gamma * (public_sum - public)

``public_sum`` depends on the weights of the graph, so these must not change from step to step.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexcomm.codec import Decoder, Encoder
from flexcomm.device import is_on_host, to_device
from flexcomm.errors import ConfigMismatchError, FlexcommError, InvalidArgumentError, NonFiniteError, SyncError
from flexcomm.gossip.phase import Round
from flexcomm.gossip.plan import MixPlan
from flexcomm.kernels import StateUpdate
from flexcomm.stats import SyncRecord, Timed
from flexcomm.sync.algorithms import Collective, Read, Steps, Words, read_words, words_of
from flexcomm.sync.bucket import VERIFIED, Verified
from flexcomm.sync.plan import Buffers, sum_dtype

Messages = Sequence[tuple[int, Tensor]]
WeightedSum = tuple[float, list[Tensor], list[float]]
"""``self_weight``, ``others`` and ``weights`` of ``self_weight * x + sum of weights[j] * others[j]``."""

_HEADER = struct.Struct("=qQQd")
"""A message's header: the digest of the plan, the step, the number of the call, the sender's push-sum weight."""


@dataclass(eq=False)
class MixContext:
    """One mix under way, and everything its path needs. This is node ``node``; ``sequence`` is the call's number."""

    plan: MixPlan
    x: Tensor
    """All elements, flat."""
    outputs: list[Tensor]
    node: int
    round: Round
    step: int
    sequence: int
    push_sum: PushSum | None
    residuals: MixResiduals | None
    buffers: Buffers
    record: SyncRecord
    next_push_weight: float = 1.0
    unread: list[Found] = field(default_factory=list)
    squared_distance: Tensor | None = None
    """By how far the outputs are from ``x``, once they are written."""

    def __post_init__(self) -> None:
        self.push_weight = 1.0 if self.push_sum is None else self.push_sum.weight

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat buffer; groups differ from phase to phase, so one name may stand for several lengths."""
        return self.buffers.get(f"{name}, {numel} of {dtype}", lambda: self.buffers.allocate(numel, dtype=dtype))


class Found(NamedTuple):
    """Numbers (int64) in a device's memory, what they mean, and whether they say that something is wrong."""

    words: Tensor
    explain: Callable[[list[int]], None]
    is_wrong: Tensor


def mix_bucket(ctx: MixContext) -> Generator[Collective | Read | Verified, Any, None]:
    """Mix one bucket. Yields the collectives it needs, then ``VERIFIED``; resumed after that, it writes outputs."""
    terms = yield from mix_between_nodes(ctx, ctx.x) if ctx.plan.ranks == 1 else mix_by_shards(ctx)
    yield from check(ctx)
    # A mix that is cancelled is not resumed: everything stays as it was.
    yield VERIFIED
    with torch.no_grad():
        outputs = [out.detach() for out in ctx.outputs]
        in_place = len(outputs) == 1 and outputs[0].is_contiguous()
        flat = outputs[0].view(-1) if in_place else ctx.buffer("output", ctx.x.numel(), ctx.x.dtype)
        ctx.squared_distance = ctx.plan.kernels.mix_(ctx.x, *terms, flat)
        if not in_place:
            for part, out in zip(torch.split(flat, [out.numel() for out in outputs]), outputs, strict=True):
                out.copy_(part.view(out.shape))
    if ctx.residuals is not None:
        ctx.residuals.commit()
    if ctx.push_sum is not None:
        ctx.push_sum.weight = ctx.next_push_weight


def mix_by_shards(ctx: MixContext) -> Steps[WeightedSum]:
    """Average over the ranks of this node, mix one shard on each of them, and gather the shards.

    Not for shards of FSDP, which are averaged inside the node already.
    """
    x, ranks = ctx.x, ctx.plan.ranks
    numel, dtype = -(-x.numel() // ranks), sum_dtype(x.dtype)
    # Zeros, because nothing is copied behind the end of x, and compressors read the whole shard.
    rows = ctx.buffers.get("rows", lambda: ctx.buffers.allocate(ranks * numel, dtype=dtype).zero_())
    rows[: x.numel()] = x
    total = ctx.buffer("sum", numel, dtype)
    moved = (ranks - 1) * total.nbytes
    yield Collective("reduce_inside", methodcaller("reduce_scatter", rows.view(ranks, numel), total), moved, moved)
    shard = ctx.buffer("shard", numel, x.dtype).copy_(total.mul_(1.0 / ranks))
    # If one rank of this node fails, all of them raise: the others would wait for its shard.
    terms: WeightedSum = 1.0, [], []
    failure: FlexcommError | None = None
    try:
        terms = yield from mix_between_nodes(ctx, shard)
    except FlexcommError as error:
        failure = error
    failed = torch.full((1,), int(failure is not None), device=shard.device)
    for one in ctx.unread:
        failed += one.is_wrong
    yield Collective("gather_inside", methodcaller("all_reduce", failed), failed.nbytes, failed.nbytes)

    def explain(numbers: list[int]) -> None:
        if failure is not None:
            raise failure
        if numbers[0]:
            raise SyncError("another rank of this node could not mix its shard, and nothing was changed; it says why.")

    note(ctx, failed, explain, failed)
    ctx.plan.kernels.mix_(shard, *terms, shard)
    gathered, moved = ctx.buffer("gathered", ranks * numel, x.dtype), (ranks - 1) * shard.nbytes
    yield Collective("gather_inside", methodcaller("all_gather", shard, gathered.view(ranks, numel)), moved, moved)
    return 0.0, [gathered[: x.numel()]], [1.0]


def note(ctx: MixContext, words: Words, explain: Callable[[list[int]], None], is_wrong: Tensor | None = None) -> None:
    """Have numbers explained: at once, if the host has them; if a device has, when :func:`check` reads all of them."""
    if isinstance(words, Tensor) and not is_on_host(words):
        ctx.unread.append(Found(words.view(-1), explain, (words != 0).any() if is_wrong is None else is_wrong))
    else:
        explain(words.view(-1).tolist() if isinstance(words, Tensor) else words)


def check(ctx: MixContext) -> Steps[None]:
    """Read all that was noted, and raise what is wrong."""
    unread, ctx.unread = ctx.unread, []
    if unread:
        numbers = iter((yield from read_words(torch.cat([one.words for one in unread]), ctx.plan.timeout_s)))
        for one in unread:
            one.explain(list(islice(numbers, one.words.numel())))


def mix_between_nodes(ctx: MixContext, x: Tensor) -> Steps[WeightedSum]:
    """Communicate with the peers of this round, and return the weighted sum that replaces ``x``."""
    round_, gamma, own = ctx.round, ctx.plan.gamma, ctx.push_weight
    self_weight = (1.0 - gamma) + gamma * round_.self_weight
    if ctx.residuals is not None:
        difference, received = yield from send_changes(ctx, x, ctx.residuals)
        self_weight, others, weights = 1.0, [difference], [1.0]
    elif round_.is_idle:
        ctx.next_push_weight = own
        return 1.0, [], []
    elif round_.group:
        total, received = yield from reduce_group(ctx, x)
        others, weights = [total], [1.0]
    else:
        others, weights = yield from send_recv_peers(ctx, x)
        received = sum(weights)
    # The push-sum weight is mixed like the values, which are stored divided by it.
    if ctx.push_sum is not None:
        ctx.next_push_weight = (1.0 - gamma) * own + gamma * (round_.self_weight * own + received)
    return self_weight * own / ctx.next_push_weight, others, [gamma * one / ctx.next_push_weight for one in weights]


def reduce_group(ctx: MixContext, x: Tensor) -> Steps[tuple[Tensor, float]]:
    """All-reduce ``x`` over the group, by sends and receives; return the weighted sum, and that of push-sum weights."""
    group, (weight,), node = ctx.round.group, ctx.round.weights, ctx.node
    others = [peer for peer in group if peer != node]
    parts = dict(zip(group, torch.tensor_split(x, len(group)), strict=True))
    buffers = {peer: ctx.buffer(f"part from {peer}", parts[node].numel(), x.dtype) for peer in others}
    received = yield from send_recv_messages(ctx, [(peer, parts[peer]) for peer in others], list(buffers.items()))
    push_weights = dict(zip(others, received, strict=True)) | {node: ctx.push_weight}
    # Group order, not arrival order: each part is added by another node, and all must add alike.
    first, *rest = [buffers.get(peer, parts[node]) for peer in group]
    weights = [weight * push_weights[peer] for peer in group]
    total = ctx.buffer("group sum", x.numel(), x.dtype)
    sums = dict(zip(group, torch.tensor_split(total, len(group)), strict=True))
    ctx.plan.kernels.mix_(first, weights[0], rest, weights[1:], sums[node])
    yield _send_recv_payloads(ctx, [(peer, sums[node]) for peer in others], [(peer, sums[peer]) for peer in others])
    return total, sum(weights)


def send_changes(ctx: MixContext, x: Tensor, residuals: MixResiduals) -> Steps[tuple[Tensor, float]]:
    """Send the compressed change of ``x`` to each peer; return ``public_sum - public``, and the weights received.

    See [Note: compressed mixing]. The next state of the residuals is computed here, and committed with the outputs.
    """
    plan, own = ctx.plan.buffer_plan, ctx.push_weight
    assert plan is not None, "plans with residuals have a compressor"  # noqa: S101  (our own invariant)
    (public, public_sum), (next_public, next_sum) = residuals.lend(x.numel(), x.device)
    change = ctx.buffer("change", x.numel(), torch.float32)
    parts = torch.split(change, [math.prod(spec.shape) for spec in plan.specs])
    tensors = [part.view(spec.shape) for part, spec in zip(parts, plan.specs, strict=True)]
    torch.sub(x if own == 1.0 else x * own, public, out=change)
    encoder = Encoder(plan, ctx.buffer("payload", plan.nbytes, torch.uint8), ctx.plan.kernels)
    with Timed(ctx.record, "encode"):
        # If the change is nonfinite, the payload is marked so, and all receivers raise, this node among them.
        encoder.enqueue_(tensors, None, None, StateUpdate(), step=ctx.step, sequence=ctx.sequence)
    payloads, weights = yield from send_recv_peers(ctx, encoder.buffer)
    with Timed(ctx.record, "decode"):
        # The own payload is decoded, too: peers know what was sent, not what was meant.
        senders, weights_of_payloads = (ctx.node, *ctx.round.receives_from), (ctx.round.self_weight, *ctx.round.weights)
        decoders = [
            Decoder(plan, payload, [f"node {sender}"], ctx.plan.kernels)
            for sender, payload in zip(senders, (encoder.buffer, *payloads), strict=True)
        ]

        def explain(words: list[int]) -> None:
            for sender, decoder, word in zip(senders, decoders, words, strict=True):
                if decoder.explain(word, step=ctx.step, sequence=ctx.sequence):
                    raise NonFiniteError(
                        f"node {sender} had NaN, infinity or a magnitude of 2**100 or more to mix: nothing was changed "
                        f"here. End the run, and lower the learning rate, or clip."
                    )

        # What a device finds wrong it does not decode.
        note(ctx, words_of([decoder.check(step=ctx.step, sequence=ctx.sequence) for decoder in decoders]), explain)
        for sender, decoder, weight in zip(senders, decoders, weights_of_payloads, strict=True):
            decoder.decode_(tensors, step=ctx.step, average="nodes")
            public_sum = torch.add(public_sum, change, alpha=weight, out=next_sum)
            if sender == ctx.node:
                torch.add(public, change, out=next_public)
        torch.sub(next_sum, next_public, out=change)
    return ctx.buffer("step", x.numel(), x.dtype).copy_(change), sum(weights)


def send_recv_peers(ctx: MixContext, payload: Tensor) -> Steps[tuple[list[Tensor], list[float]]]:
    """Send ``payload`` to each peer; return theirs, and the weight of each, times its sender's push-sum weight."""
    peers = ctx.round.receives_from
    received = [ctx.buffer(f"from peer {number}", payload.numel(), payload.dtype) for number in range(len(peers))]
    sends, receives = [(peer, payload) for peer in ctx.round.sends_to], list(zip(peers, received, strict=True))
    push_weights = yield from send_recv_messages(ctx, sends, receives)
    return received, [weight * push for weight, push in zip(ctx.round.weights, push_weights, strict=True)]


def send_recv_messages(ctx: MixContext, sends: Messages, receives: Messages) -> Steps[list[float]]:
    """Send a payload to each node of ``sends``, fill those of ``receives``; return the senders' push-sum weights.

    Headers travel first: a payload of another length than expected would end the process instead of raising. Where
    nobody's thread may wait for headers, both travel at once.
    """
    if not (sends or receives):
        return []
    header = _HEADER.pack(ctx.plan.digest, ctx.step, ctx.sequence, ctx.push_weight)
    own = to_device(torch.frombuffer(bytearray(header), dtype=torch.int64), ctx.x.device)
    headers = torch.empty(len(receives), own.numel(), dtype=torch.int64, device=own.device)
    sends_headers, receives_headers = (
        [(peer, own) for peer, _ in sends],
        [(peer, row) for (peer, _), row in zip(receives, headers, strict=True)],
    )
    push_weights = [1.0] * len(receives)

    def explain(numbers: list[int]) -> None:
        for number, (peer, _) in enumerate(receives):
            push_weights[number] = _check_header(ctx, numbers[number * own.numel() :][: own.numel()], peer)

    enqueues = ctx.plan.driver.enqueues
    if enqueues:
        yield _send_recv_payloads(ctx, [*sends_headers, *sends], [*receives_headers, *receives])
    else:
        yield _send_recv(ctx, sends_headers, receives_headers)
    note(ctx, headers, explain, (headers[:, :-1] != own[:-1]).any())
    if not enqueues or ctx.push_sum is not None:
        yield from check(ctx)
    if not enqueues:
        yield _send_recv_payloads(ctx, sends, receives)
    return push_weights


def _check_header(ctx: MixContext, words: list[int], sender: int) -> float:
    """Return the push-sum weight in a header; raise if its sender is in another call, or at another step."""
    digest, step, sequence, push_weight = _HEADER.unpack(struct.pack(f"={len(words)}q", *words))
    fields = {
        "step": (step, ctx.step),
        "number of mixes so far": (sequence, ctx.sequence),
        "tensors, schedule or settings (by their digest)": (digest, ctx.plan.digest),
    }
    for name, (theirs, ours) in fields.items():
        if theirs != ours:
            raise ConfigMismatchError(
                f"nodes disagree on what they mix, and nothing was changed: node {sender} sent {name} {theirs}, "
                f"here it is {ours}. Mix the same tensors at the same steps, in the same order, on every node."
            )
    return float(push_weight)


def _send_recv_payloads(ctx: MixContext, sends: Messages, receives: Messages) -> Collective:
    collective = _send_recv(ctx, sends, receives)
    ctx.record.payload_bytes += collective.sent_bytes
    return collective


def _send_recv(ctx: MixContext, sends: Messages, receives: Messages) -> Collective:
    sent, received = (sum(x.nbytes for _, x in messages) for messages in (sends, receives))
    # Nobody waits for what is enqueued, so that all legs can be on their way when the mix is started.
    is_short = ctx.plan.driver.enqueues
    return Collective("exchange", methodcaller("send_recv", sends, receives), sent, received, is_short)


class MixResiduals:
    """The state of compressed mixing for one set of tensors: the values that peers know, and their weighted sum.

    It starts at zero. If all nodes hold the same values at first, :meth:`begin` saves sending them.

    Example:
        >>> import torch, flexcomm
        >>> residuals, int8 = flexcomm.MixResiduals(), flexcomm.dense(values="int8")
        >>> with flexcomm.connect() as world:
        ...     ring = flexcomm.gossip.fixed_ring(world.topology.nodes)
        ...     flexcomm.mix(torch.ones(2), ring, 0, world=world, compressor=int8, residuals=residuals).tensors
        tensor([1., 1.])

    """

    def __init__(self) -> None:
        # Each [2, numel]: ``public`` and ``public_sum``.
        self._state: Tensor | None = None
        self._next: Tensor | None = None
        self._claimed = False

    def claim(self) -> None:
        """Reserve the state for one mix until :meth:`unclaim`: of two at once, each would lose the other's update."""
        if self._claimed:
            raise InvalidArgumentError(
                "these residuals are in use by a mix under way: wait for its handle first, and use other residuals for "
                "each set of tensors."
            )
        self._claimed = True

    def unclaim(self) -> None:
        self._claimed = False

    def begin(self, x: Tensor, weight_sum: float = 1.0) -> None:
        """Start from values ``x`` that all nodes hold: this rank's shard, if the ranks of a node share the work.

        ``weight_sum`` is the sum of this node's weights: 1, if the graph is doubly stochastic.
        """
        public = x.detach().reshape(-1).to(torch.float32)
        self._state, self._next = torch.stack([public, public * weight_sum]), None

    def lend(self, numel: int, device: torch.device) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the state, and memory for the next one, which replaces it when :meth:`commit` is called.

        It follows its tensors: a state that was loaded from a file may be on the host.
        """
        with torch.inference_mode(False):
            if self._state is None:
                self._state = torch.zeros(2, numel, device=device)
            if self._state.shape[1] != numel:
                raise InvalidArgumentError(
                    f"these residuals are of {self._state.shape[1]} elements, but {numel} are to be mixed: use other "
                    f"residuals for each set of tensors."
                )
            self._state = self._state.to(device)
            if self._next is None or self._next.device != device:
                self._next = torch.empty_like(self._state)
            return self._state.unbind(), self._next.unbind()

    def commit(self) -> None:
        self._state, self._next = self._next, self._state

    def state_dict(self) -> dict[str, Tensor]:
        """Return ``public`` and ``public_sum``, not as copies; an empty dict before the first round."""
        return {} if self._state is None else {"public": self._state[0], "public_sum": self._state[1]}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by a copy of this one."""
        self._state = torch.stack([state["public"].detach(), state["public_sum"].detach()]) if state else None
        self._next = None


class PushSum:
    """The push-sum weight of this node, kept from round to round; the weights of all nodes sum to their number.

    For directed graphs, where nodes may receive more or less weight than they send. Tensors are stored de-biased, as
    ``z = x / weight``, and sent with their weight. Rounds preserve, and converge to, the mean of ``weight * z``.

    Args:
        weight: the weight to begin with; 1 on all nodes, unless a state is restored.

    Example:
        >>> import flexcomm
        >>> flexcomm.PushSum().weight  # pass one for each set of tensors to flexcomm.mix
        1.0

    """

    def __init__(self, weight: float = 1.0) -> None:
        if not 0.0 < weight < float("inf"):
            raise InvalidArgumentError(f"a push-sum weight of {weight} is not a finite number above 0: begin with 1.")
        self.weight = weight

    def state_dict(self) -> dict[str, float]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.weight = PushSum(float(state["weight"])).weight
