"""Sync plans: everything about a synchronisation that follows from shapes, settings and topology, computed once."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from flexcomm.codec import TensorShard, assemble_buffer, plan_tensor, shard_tensor
from flexcomm.compress import Compressor, TensorSpec
from flexcomm.errors import InvalidArgumentError
from flexcomm.kernels import Average, BufferPlan, Kernels, Selection, TensorPlan, ValueCode, choose_kernels
from flexcomm.sync.algorithms import Algorithm, NumberedShard, can_reduce, plan_two_phase
from flexcomm.sync.bucket_codec import BucketCodec, BucketCompressor

log = logging.getLogger(__name__)

AlgorithmOption = Literal["auto", "gather", "gatherv", "reduce", "two_phase", "dense", "codec"]
NonFinitePolicy = Literal["raise", "skip", "zero"]  # zero: nonfinite elements count as 0; skip: all outputs are 0
MOST_SPARE = 8  # buffers that a pool keeps for calls under way at once; a burst of more calls frees its own
_LEAST_SHARE = 1 / 16  # the least of bucket_bytes that a bucket holds: 1 MiB of the default

T = TypeVar("T")


@dataclass(frozen=True)
class SyncSettings:
    """The tensors and arguments of a call; they must be equal on all ranks."""

    specs: tuple[TensorSpec, ...]
    compressor: Compressor
    average: Average
    algorithm: AlgorithmOption
    nonfinite: NonFinitePolicy
    bucket_bytes: int | None
    has_residuals: bool

    def __post_init__(self) -> None:
        choices = {"average": Average, "algorithm": AlgorithmOption, "nonfinite": NonFinitePolicy}
        wrong = [
            f"{name} is {getattr(self, name)!r}, but must be one of {', '.join(get_args(choice))}"
            for name, choice in choices.items()
            if getattr(self, name) not in get_args(choice)
        ]
        nbytes: object = self.bucket_bytes  # callers need not heed types
        if nbytes is not None and (not isinstance(nbytes, int) or nbytes < 1):
            wrong.append(f"bucket_bytes is {nbytes!r}, but must be a whole number, at least 1, or None")
        if wrong:
            raise InvalidArgumentError(f"{'; '.join(wrong)}.")

    def fields(self) -> dict[str, object]:
        """Return all settings by name, for ranks to compare."""
        tensors = [f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in self.specs]
        names = ("compressor", "average", "algorithm", "nonfinite", "bucket_bytes")
        return {
            "tensors": len(tensors),
            **{f"tensor {number}": text for number, text in enumerate(tensors)},
            **{name: getattr(self, name) for name in names},
            "residuals": "given" if self.has_residuals else "none",
        }


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: its tensors, the shards of them each rank of a node works on, and how they cross between nodes."""

    tensors: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[tuple[NumberedShard, ...], ...]  # by local rank
    longest: int  # the most elements that a rank works on
    buffers: tuple[BufferPlan, ...]  # by local rank; none for a compressor that is no pipeline
    codecs: tuple[BucketCodec, ...]  # by local rank, for a compressor that is no pipeline
    algorithm: Algorithm
    gathers_payloads: bool  # the ranks of a node gather the payloads they received, not the elements they decoded

    @cached_property
    def digests(self) -> tuple[int, ...]:
        """Numbers that differ wherever what is sent would be read differently, by rank."""
        return tuple(one.digest for one in self.codecs or self.buffers)


class Buffers:
    """The memory one call uses for one bucket: tensors, views of them, encoders and decoders, made on first use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[str, Any] = {}

    def get(self, name: str, make: Callable[[], T]) -> T:
        """Return what was made under that name, which stands for one type."""
        if name not in self._made:
            # Not as inference tensors, which no later call could write.
            with torch.inference_mode(False):
                self._made[name] = make()
        return self._made[name]  # type: ignore[no-any-return]

    def allocate(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


class BufferPool:
    """Buffers of one bucket that no call uses at the moment."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.spare: list[Buffers] = []

    def take(self) -> Buffers:
        return self.spare.pop() if self.spare else Buffers(self._device)

    def give_back(self, buffers: Buffers) -> None:
        if len(self.spare) < MOST_SPARE:
            self.spare.append(buffers)


@dataclass(eq=False)
class SyncPlan:
    """What calls with the same tensors and arguments share."""

    settings: SyncSettings
    device: torch.device
    nodes: int
    node: int
    local_size: int  # 1, if shards are only exchanged
    local_rank: int
    all_ranks: bool  # all take part, not only those of this local rank
    in_background: bool  # comm threads drive the buckets
    inputs_may_change: bool  # before a call is done: threads were asked for, even if there are none
    rank_names: list[list[str]]  # by local rank and node, for messages
    timeout_s: float  # how long a wait for the device may take
    number: int = field(default_factory=count(1).__next__)
    # The numbers of the plans used before, 0 for none, after which all ranks agreed on this one. Numbers, because a
    # forgotten plan must not live on here.
    agreed_after: set[int] = field(default_factory=set)

    @cached_property
    def kernels(self) -> Kernels:
        return choose_kernels(self.device)

    @cached_property
    def names(self) -> list[str]:
        return [spec.name for spec in self.settings.specs]

    @cached_property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """The buckets. Used only once ranks agree: a plan that fails on one rank would fail there alone."""
        return plan_buckets(self.settings, self.nodes, self.local_size)

    @cached_property
    def pools(self) -> list[BufferPool]:
        return [BufferPool(self.device) for _ in self.buckets]

    @cached_property
    def dense_bytes(self) -> int:
        """The length of what this rank works on, uncompressed."""
        own = ((bucket, shard) for bucket in self.buckets for _, shard in bucket.shards[self.local_rank])
        return sum(shard.numel * bucket.dtype.itemsize for bucket, shard in own)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the ranks of a node add up: sixteen bits are too few."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@lru_cache(maxsize=256)
def plan_buckets(settings: SyncSettings, nodes: int, ranks: int) -> tuple[BucketPlan, ...]:
    chosen = choose_algorithms(settings.specs, settings.compressor, nodes, settings.algorithm)
    return tuple(
        _plan_bucket(settings, tensors, chosen[settings.specs[tensors[0]].dtype].algorithm, nodes, ranks)
        for tensors in fill_buckets(settings.specs, settings.bucket_bytes)
    )


class ChosenAlgorithm(NamedTuple):
    """An algorithm, and what a node sends by it and by the others."""

    algorithm: Algorithm
    sent_bytes: dict[Algorithm, float]


def choose_algorithms(
    specs: Sequence[TensorSpec], compressor: Compressor, nodes: int, algorithm: AlgorithmOption = "auto"
) -> dict[torch.dtype, ChosenAlgorithm]:
    """Return the algorithm for all tensors of each dtype, so that the size of buckets does not change the result.

    Args:
        specs: all tensors, however they will be put into buckets.
        compressor: what is sent of them.
        nodes: the number of nodes.
        algorithm: what was asked for; ``"auto"`` takes the one that sends the fewest bytes.

    """
    dtypes = dict.fromkeys(spec.dtype for spec in specs)
    if isinstance(compressor, BucketCompressor):
        if algorithm not in ("auto", "codec"):
            raise InvalidArgumentError(f"{algorithm!r} cannot carry {compressor}, which has a codec: use auto.")
        return {dtype: ChosenAlgorithm("codec", {}) for dtype in dtypes}
    return {
        dtype: _choose_algorithm(tuple(spec for spec in specs if spec.dtype == dtype), compressor, nodes, algorithm)
        for dtype in dtypes
    }


def _choose_algorithm(
    specs: tuple[TensorSpec, ...], compressor: Compressor, nodes: int, algorithm: AlgorithmOption
) -> ChosenAlgorithm:
    dtype, plans = specs[0].dtype, tuple(plan_tensor(spec, compressor) for spec in specs)
    plan = assemble_buffer(specs, plans)
    dense = assemble_buffer(specs, tuple(one.sending_everything(ValueCode.of(dtype)) for one in plans))
    others, share = nodes - 1, (nodes - 1) / nodes
    sent: dict[Algorithm, float] = {}
    # Of equals the first is taken: gathered buffers carry headers and checksums, sums do not.
    if not plan.variable_length:
        sent["gather"] = others * plan.nbytes
        if can_reduce(plan, nodes):
            sent["reduce"] = 2 * share * plan.nbytes
        # What is sent of a chunk must depend on that chunk alone, so that parts send what wholes would.
        if all(one.selection.rule.has_independent_chunks for one in plans):
            uncut = [shard_tensor(spec, one, 1)[0] for spec, one in zip(specs, plans, strict=True)]
            parts = plan_two_phase(tuple(shard for shard in uncut if shard is not None), nodes)
            sent["two_phase"] = share * (plan.nbytes + sum(part.averaged.nbytes for part in parts))
    sent["dense"] = 2 * share * dense.nbytes
    fewest = "gatherv" if plan.variable_length else min(sent, key=sent.__getitem__)
    sent["gatherv"] = others * plan.nbytes
    chosen = fewest if algorithm == "auto" else algorithm
    if chosen not in sent:
        raise InvalidArgumentError(
            f"algorithm {chosen!r} cannot carry this compressor, but {', '.join(sorted(sent))} and auto can: reduce "
            f"needs shared indices and float values, two_phase needs top-k, gather a length known beforehand."
        )
    message = "%d tensors of %s, from %s on, use %s among %d nodes; bytes a node sends: %s"
    log.info(message, len(specs), dtype, specs[0].name, chosen, nodes, sent)
    return ChosenAlgorithm(chosen, sent)


def fill_buckets(specs: Sequence[TensorSpec], bucket_bytes: int | None) -> list[tuple[int, ...]]:
    """Return the numbers of the tensors of each bucket: of one dtype, and of up to so many dense bytes.

    A larger tensor makes a larger bucket. A bucket of less than a sixteenth takes another tensor all the same, because
    a collective costs more than its bytes. Buckets come in the order in which they are complete.

    Args:
        specs: the tensors, in the order in which they become ready.
        bucket_bytes: dense bytes of a bucket; None: one bucket for each dtype.

    """
    full, buckets = float("inf") if bucket_bytes is None else bucket_bytes, []
    open_buckets: dict[torch.dtype, list[int]] = {}
    filled: dict[torch.dtype, int] = {}
    for number, spec in enumerate(specs):
        dtype, nbytes = spec.dtype, torch.Size(spec.shape).numel() * spec.dtype.itemsize
        before = filled.get(dtype, 0)
        if before + nbytes > full and before >= full * _LEAST_SHARE:
            buckets.append(tuple(open_buckets.pop(dtype)))
            before = 0
        open_buckets.setdefault(dtype, []).append(number)
        filled[dtype] = before + nbytes
    return sorted([*buckets, *map(tuple, open_buckets.values())], key=max)


def _plan_bucket(
    settings: SyncSettings, tensors: tuple[int, ...], algorithm: Algorithm, nodes: int, ranks: int
) -> BucketPlan:
    specs, dtype = [settings.specs[number] for number in tensors], settings.specs[tensors[0]].dtype
    summed = specs if ranks == 1 else [spec._replace(dtype=sum_dtype(dtype)) for spec in specs]
    by_rank: list[list[NumberedShard]] = [[] for _ in range(ranks)]
    codecs: list[BucketCodec] = []
    buffers: list[BufferPlan] = []
    if isinstance(settings.compressor, BucketCompressor):
        # Tensors are not cut: the name of each decides which rank of a node works on it.
        number_of = dict(zip(summed, tensors, strict=True))
        for rank, own in enumerate(by_rank):
            own_specs = [spec for spec in summed if zlib.crc32(spec.name.encode()) % ranks == rank]
            codecs.append(settings.compressor.bucket_codec(tuple(own_specs)))
            own += [(number_of[spec], _uncut_shard(spec, codecs[-1])) for spec in own_specs]
    else:
        for number, spec, summed_as in zip(tensors, specs, summed, strict=True):
            plan = plan_tensor(spec, settings.compressor)
            plan = plan.sending_everything(ValueCode.of(dtype)) if algorithm == "dense" else plan
            for own, shard in zip(by_rank, shard_tensor(summed_as, plan, ranks), strict=True):
                own += [] if shard is None else [(number, shard)]
        buffers = [
            assemble_buffer(tuple(shard.spec for _, shard in own), tuple(shard.plan for _, shard in own))
            for own in by_rank
        ]
    shards, longest = tuple(map(tuple, by_rank)), max(sum(shard.numel for _, shard in own) for own in by_rank)
    payloads_nbytes = nodes * max((plan.nbytes for plan in buffers), default=0)
    gathers_payloads = algorithm == "gather" and payloads_nbytes < longest * dtype.itemsize
    return BucketPlan(tensors, dtype, shards, longest, tuple(buffers), tuple(codecs), algorithm, gathers_payloads)


def _uncut_shard(spec: TensorSpec, codec: BucketCodec) -> TensorShard:
    """Return a whole tensor as the shard of a rank; its plan says how large its state is."""
    numel = max(codec.state_numel(spec), 1)
    state = TensorPlan(1, numel, 1, numel, False, Selection.EVERYTHING, numel, ValueCode.FP32)
    return TensorShard(spec, state, 0, torch.Size(spec.shape).numel(), 0)
