"""The path of one bucket, :func:`sync_bucket`, from the tensors of every rank to the average that all of them hold.

The ranks of a node add up their tensors, each keeping the sum of its shard; ranks of equal local rank exchange what the
compressor sends of that shard; the ranks of a node gather the shards. A leg that would join a single rank is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, islice, pairwise
from operator import itemgetter, methodcaller
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flexcomm.codec import Decoder, TensorShard
from flexcomm.errors import ConfigMismatchError, FlexcommError, SyncError, WireError
from flexcomm.kernels import STORE, BufferPlan, Epilogue, Problem, StateUpdate, apply_epilogue_
from flexcomm.stats import SyncRecord, Timed
from flexcomm.sync.algorithms import (
    ALGORITHMS,
    Collective,
    GatheredPayloads,
    NumberedShard,
    Read,
    Received,
    Steps,
    Words,
    digest_of,
    read_words,
    words_of,
)
from flexcomm.sync.plan import BucketPlan, Buffers, SyncPlan, sum_dtype

_DISAGREE = (
    "ranks disagree on what they synchronise, and nothing was changed: {} Make the same calls, in the same order and "
    "with the same arguments, on every rank."
)
Verified = Literal["verified"]
VERIFIED: Verified = "verified"
"""What a bucket yields once everything it received has been checked, and nothing has been written."""


@dataclass
class BucketContext:
    """One bucket of a call under way, and everything its path needs."""

    plan: SyncPlan
    bucket: BucketPlan
    tensors: list[Tensor]  # of the whole call
    outputs: list[Tensor]  # of the whole call, contiguous
    update: StateUpdate
    step: int
    sequence: int
    buffers: Buffers
    states: list[Tensor] | None = None
    states_out: list[Tensor] | None = None
    in_place: bool = False  # states_out are the states
    nonfinite: str = ""  # why this rank has nothing to send, if it is known that it has not
    problems: list[Callable[[], str]] = field(default_factory=list)  # say the same of what a device has encoded
    nonfinite_senders: list[str] = field(default_factory=list)  # the ranks that had nothing to send
    rollbacks: list[Callable[[], object]] = field(default_factory=list)  # restore states that were updated in place
    epilogue: Epilogue = STORE  # what becomes of the averages, known when outputs are written
    record: SyncRecord = field(default_factory=SyncRecord)

    @cached_property
    def shards(self) -> tuple[TensorShard, ...]:
        """The shards of the bucket's tensors that this rank works on."""
        return tuple(map(itemgetter(1), self.bucket.shards[self.plan.local_rank]))

    @property
    def buffer_plan(self) -> BufferPlan:
        """The layout of the buffer that this rank sends."""
        return self.bucket.buffers[self.plan.local_rank]

    @property
    def senders(self) -> list[str]:
        """What messages call the ranks that send to this one, by node."""
        return self.plan.rank_names[self.plan.local_rank]


def sync_bucket(ctx: BucketContext) -> Generator[Collective | Read | Verified, Any, None]:
    """Average one bucket. Yields the collectives it needs, then ``VERIFIED``; resumed after that, it writes outputs."""
    shard = yield from reduce_scatter_inside(ctx)
    # Also without a shard of any tensor: the ranks of a node must start their collectives in one order.
    try:
        received = yield from ALGORITHMS[ctx.bucket.algorithm](ctx, shard)
    except (WireError, ConfigMismatchError) as error:
        # The other ranks of the node wait for this one, and learn of it when they gather.
        received = FailedExchange(error)
    received = yield from all_gather_inside(ctx, received)
    ctx.nonfinite_senders = yield from verify(ctx, received)
    # The call resumes all of its buckets, or none: a bucket that fails leaves every output as it was.
    yield VERIFIED
    with Timed(ctx.record, "decode"):
        outputs = output_shards(ctx)
        if ctx.bucket.codecs and ctx.epilogue.kind != "store" and ctx.plan.local_size == 1:
            # Codecs of one's own know nothing of epilogues.
            averages = [torch.empty_like(out) for out in outputs]
            received.decode_(ctx, averages)
            for out, average in zip(outputs, averages, strict=True):
                apply_epilogue_(out, average, ctx.epilogue)
        else:
            received.decode_(ctx, outputs)


def reduce_scatter_inside(ctx: BucketContext) -> Steps[list[Tensor]]:
    """Return the sums, over the ranks of this node, of this rank's tensor shards."""
    if ctx.plan.local_size == 1:
        return [ctx.tensors[number] for number, _ in ctx.bucket.shards[0]]
    sums = ctx.buffers.get("sums", lambda: NodeElements(ctx, sum_dtype(ctx.bucket.dtype)))
    # One by one: a shard of a tensor with gaps is a copy.
    for part, (number, shard) in zip(sums.parts, chain(*ctx.bucket.shards), strict=True):
        part.copy_(shard.of(ctx.tensors[number]))
    moved = (ctx.plan.local_size - 1) * sums.own.nbytes
    yield Collective("reduce_inside", methodcaller("reduce_scatter", sums.rows, sums.own), moved, moved)
    return sums.own_parts


def all_gather_inside(ctx: BucketContext, received: Received) -> Steps[Received]:
    """Gather what all ranks of this node received: payloads, or the elements they stand for if that is shorter."""
    if ctx.plan.local_size == 1:
        return received
    return (yield from (_gather_payloads if ctx.bucket.gathers_payloads else _gather_elements)(ctx, received))


def verify(ctx: BucketContext, received: Received) -> Steps[list[str]]:
    """Check what was received; return the senders that had nonfinite values."""
    with disagreement_told():
        with Timed(ctx.record, "decode"):
            found = received.check(ctx)
        words = found if isinstance(found, list) else (yield from read_words(found, ctx.plan.timeout_s))
        return received.explain(ctx, words)


@contextmanager
def disagreement_told() -> Iterator[None]:
    """Raise ``ConfigMismatchError`` for fields of a header that differ where ranks called differently."""
    try:
        yield
    except WireError as error:
        if error.field not in ("version", "plan hash", "step", "sequence"):
            raise
        raise ConfigMismatchError(_DISAGREE.format(error)) from error


def output_shards(ctx: BucketContext) -> list[Tensor]:
    if ctx.plan.local_size == 1:
        return [ctx.outputs[number] for number, _ in ctx.bucket.shards[0]]
    return [shard.of(ctx.outputs[number]) for number, shard in chain(*ctx.bucket.shards)]


class FailedExchange(NamedTuple):
    """An exchange that failed on this rank."""

    error: FlexcommError

    def check(self, ctx: BucketContext) -> Words:
        del ctx
        raise self.error

    def explain(self, ctx: BucketContext, words: list[int]) -> list[str]:
        del ctx, words
        raise self.error

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        del ctx, outputs
        raise self.error


class NodePayloads:
    """The payloads that each rank of this node received; every rank decodes all of them."""

    def __init__(self, ctx: BucketContext) -> None:
        nodes, longest = ctx.plan.nodes, ctx.plan.nodes * max(plan.nbytes for plan in ctx.bucket.buffers)
        self.row, self.rows = ctx.buffers.allocate(longest), ctx.buffers.allocate(ctx.plan.local_size, longest)
        self.by_rank: list[GatheredPayloads] = []
        for plan, row, senders in zip(ctx.bucket.buffers, self.rows, ctx.plan.rank_names, strict=True):
            gathered = row[: nodes * plan.nbytes]
            self.by_rank.append(GatheredPayloads(gathered, Decoder(plan, gathered, senders, ctx.plan.kernels)))

    def check(self, ctx: BucketContext) -> Words:
        return words_of([one.decoder.check(step=ctx.step, sequence=ctx.sequence) for one in self.by_rank])

    def explain(self, ctx: BucketContext, words: list[int]) -> list[str]:
        by_rank = zip(self.by_rank, words, strict=True)
        return [sender for payloads, word in by_rank for sender in payloads.explain(ctx, [word])]

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        of_shards = iter(outputs)
        for payloads, shards in zip(self.by_rank, ctx.bucket.shards, strict=True):
            payloads.decode_(ctx, list(islice(of_shards, len(shards))))


def _gather_payloads(ctx: BucketContext, received: Received) -> Steps[NodePayloads]:
    assert isinstance(received, GatheredPayloads), "only gathered payloads can be handed on"  # noqa: S101
    payloads = ctx.buffers.get("payloads of the node", lambda: NodePayloads(ctx))
    payloads.row[: received.gathered.numel()] = received.gathered.view(-1)
    moved = (ctx.plan.local_size - 1) * payloads.row.nbytes
    yield Collective("gather_inside", methodcaller("all_gather", payloads.row, payloads.rows), moved, moved)
    return payloads


_NONFINITE, _DISAGREED = int(Problem.NONFINITE), int(Problem.HEADER)
_FAILED = 1 << 62  # more than the word of any status
_STATUS_NBYTES = 16
"""The word of a status, and a digest of what the node's ranks share."""


class NodeElements:
    """All shards of the bucket, in a row for each rank of this node; a row of decoded ones begins with a status.

    ``parts`` are views of the shards in ``rows``, rank by rank, ``own`` is this rank's row.
    """

    def __init__(self, ctx: BucketContext, dtype: torch.dtype, status_nbytes: int = 0) -> None:
        first = status_nbytes // dtype.itemsize

        def parts_of(row: Tensor, shards: tuple[NumberedShard, ...]) -> list[Tensor]:
            bounds = pairwise(accumulate((shard.numel for _, shard in shards), initial=first))
            return [row[begin:end].view(one.spec.shape) for (_, one), (begin, end) in zip(shards, bounds, strict=True)]

        # A multiple of 16 bytes: statuses are words of 8.
        whole = _STATUS_NBYTES // dtype.itemsize
        by_rank, numel = ctx.bucket.shards, -(-(first + ctx.bucket.longest) // whole) * whole
        # Zeros, because nothing is copied behind the shorter rows, and sums of anything could overflow.
        self.rows = ctx.buffers.allocate(ctx.plan.local_size, numel, dtype=dtype).zero_()
        self.parts = [part for row, own in zip(self.rows, by_rank, strict=True) for part in parts_of(row, own)]
        self.own = ctx.buffers.allocate(numel, dtype=dtype)
        self.own_parts = parts_of(self.own, by_rank[ctx.plan.local_rank])

        self.statuses = self.rows[:, :first].view(torch.int64) if first else None
        self.received: Received | None = None
        self.own_words: Words = []
        self.failure: FlexcommError | None = None

    def check(self, ctx: BucketContext) -> Words:
        del ctx
        assert self.statuses is not None, "rows that are gathered have statuses"  # noqa: S101  (our own invariant)
        return self.statuses.reshape(-1)

    def explain(self, ctx: BucketContext, words: list[int]) -> list[str]:
        names = [of_rank[ctx.plan.node] for of_rank in ctx.plan.rank_names]
        statuses, digests = words[::2], words[1::2]
        if self.failure is not None:
            raise self.failure
        own: list[str] = []
        nonfinite = []
        if statuses[ctx.plan.local_rank] and self.received is not None:
            # What this rank found it can tell, by reading again: the device has been waited for.
            own = self.received.explain(ctx, torch.as_tensor(self.own_words).tolist())
        common = int.from_bytes(digest_of(ctx, *ctx.bucket.digests), "little", signed=True)
        for name, status, digest in zip(names, statuses, digests, strict=True):
            problem = status & 0xFF
            if problem == _DISAGREED or digest != common:
                raise ConfigMismatchError(
                    _DISAGREE.format(f"{name} is at another step or call, or met a node that is.")
                )
            if status and problem != _NONFINITE:
                raise SyncError(f"{name} could not decode its shard, and nothing was changed; its own output says why.")
            nonfinite += [name] if status else []
        return own or nonfinite

    def decode_(self, ctx: BucketContext, outputs: Sequence[Tensor]) -> None:
        for part, out in zip(self.parts, outputs, strict=True):
            apply_epilogue_(out, part, ctx.epilogue)


def _gather_elements(ctx: BucketContext, received: Received) -> Steps[NodeElements]:
    """Decode this rank's shard and gather the elements of all ranks, with a status: if one failed, all raise."""
    elements = ctx.buffers.get("elements", lambda: NodeElements(ctx, ctx.bucket.dtype, _STATUS_NBYTES))
    elements.received, elements.own_words, elements.failure = received, [], None
    own = elements.own[: _STATUS_NBYTES // ctx.bucket.dtype.itemsize].view(torch.int64)
    own[0], own[1] = 0, int.from_bytes(digest_of(ctx, *ctx.bucket.digests), "little", signed=True)
    try:
        with Timed(ctx.record, "decode"), disagreement_told():
            words = elements.own_words = received.check(ctx)
            if isinstance(words, Tensor):
                # The first that is not 0. It is not read here: what is decoded is used only if all of them are 0.
                own[:1] = words[(words != 0).to(torch.int8).argmax().view(1)]
                received.decode_(ctx, elements.own_parts)
            elif found := [word for word in words if word]:
                own[0] = found[0]
                received.explain(ctx, words)
            else:
                received.decode_(ctx, elements.own_parts)
    except FlexcommError as error:
        elements.failure = error
        own[0] = _DISAGREED if isinstance(error, ConfigMismatchError) else _FAILED
    moved = (ctx.plan.local_size - 1) * elements.own.nbytes
    yield Collective("gather_inside", methodcaller("all_gather", elements.own, elements.rows), moved, moved)
    return elements
