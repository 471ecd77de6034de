"""Sync plans: everything about a synchronisation that follows from shapes, settings and topology, computed once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, Literal, NamedTuple, get_args

import torch

from flexcomm.codec import assemble_buffer, plan_tensor
from flexcomm.compress import Compressor, TensorSpec
from flexcomm.errors import InvalidArgumentError
from flexcomm.kernels import Average, BufferPlan, Kernels, choose_kernels
from flexcomm.sync.algorithms import can_reduce, dense_plan
from flexcomm.sync.bucket_codec import BucketCodec, BucketCompressor, rank_of, uncut_shard
from flexcomm.sync.buffers import BufferPool
from flexcomm.sync.shards import TensorShard, shard_tensor
from flexcomm.sync.two_phase import can_take_two_phases, plan_two_phase

log = logging.getLogger(__name__)

Algorithm = Literal["gather", "gatherv", "reduce", "two_phase", "dense", "codec"]
AlgorithmOption = Literal["auto", "gather", "gatherv", "reduce", "two_phase", "dense", "codec"]
NonFinitePolicy = Literal["raise", "skip", "zero"]


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
        tensors = {
            f"tensor {number}": f"{spec.name} {spec.dtype} {list(spec.shape)}" for number, spec in enumerate(self.specs)
        }
        return {
            "tensors": len(self.specs),
            **tensors,
            "compressor": self.compressor,
            "average": self.average,
            "algorithm": self.algorithm,
            "nonfinite": self.nonfinite,
            "bucket_bytes": self.bucket_bytes,
            "residuals": "given" if self.has_residuals else "none",
        }


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: its tensors, the shards of them each rank of a node works on, and how they cross between nodes.

    ``shards[r]`` are those of local rank r, ``numbers[r]`` the tensors they belong to and ``buffers[r]`` the layout of
    their buffer. ``gathers_payloads`` says whether the ranks of a node hand each other the payloads they received, or
    the elements they decoded. ``sent_bytes`` is what a node sends of all tensors of this dtype, by algorithm.
    """

    tensors: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[tuple[TensorShard, ...], ...]
    numbers: tuple[tuple[int, ...], ...]
    buffers: tuple[BufferPlan, ...]
    algorithm: Algorithm
    gathers_payloads: bool
    sent_bytes: tuple[tuple[Algorithm, float], ...]
    codecs: tuple[BucketCodec, ...] = ()
    """Those of a compressor that is no pipeline, by rank: then there are no buffer plans."""

    @cached_property
    def digests(self) -> tuple[int, ...]:
        """Numbers that differ wherever what is sent would be read differently, by rank."""
        return tuple(one.digest for one in self.codecs or self.buffers)

    @property
    def longest(self) -> int:
        """Elements of the rank that has most of them."""
        return max(map(_numel, self.shards))


@dataclass(eq=False)
class SyncPlan:
    """What calls with the same tensors and arguments share, on local rank ``rank`` of ``ranks``, on ``nodes`` nodes.

    ``all_ranks`` says whether all ranks take part, or only those of this local rank, and ``in_background`` whether comm
    threads drive the buckets. ``rank_names[r][n]`` is what
    messages call local rank r of node n. ``agreed_after`` are the numbers of the plans used before, 0 for none, after
    which all ranks were found to use this one: numbers, because a forgotten plan must not live on here.
    """

    settings: SyncSettings
    device: torch.device
    nodes: int
    ranks: int
    rank: int
    all_ranks: bool
    in_background: bool
    rank_names: list[list[str]]
    number: int = field(default_factory=count(1).__next__)
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
        return plan_buckets(self.settings, self.nodes, self.ranks)

    @cached_property
    def pools(self) -> list[BufferPool]:
        """The buffers of each bucket."""
        return [BufferPool(self.device) for _ in self.buckets]

    @cached_property
    def dense_bytes(self) -> int:
        """The length of what this rank works on, uncompressed."""
        return sum(_numel(bucket.shards[self.rank]) * bucket.dtype.itemsize for bucket in self.buckets)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the ranks of a node add up: sixteen bits are too few."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@lru_cache(maxsize=256)
def plan_buckets(settings: SyncSettings, nodes: int, ranks: int) -> tuple[BucketPlan, ...]:
    """Return the buckets of a call, for nodes of so many ranks."""
    chosen = choose_algorithms(settings.specs, settings.compressor, nodes, settings.algorithm)
    return tuple(
        _plan_bucket(settings, tensors, *chosen[settings.specs[tensors[0]].dtype], nodes, ranks)
        for tensors in fill_buckets(settings.specs, settings.bucket_bytes)
    )


class ChosenAlgorithm(NamedTuple):
    """An algorithm, and what a node sends by it and by the others."""

    algorithm: Algorithm
    sent_bytes: dict[Algorithm, float]


def choose_algorithms(
    specs: Sequence[TensorSpec], compressor: Compressor, nodes: int, algorithm: AlgorithmOption = "auto"
) -> dict[torch.dtype, ChosenAlgorithm]:
    """Return the algorithm for all tensors of each dtype.

    For all, not for each bucket: algorithms send different things, and the size of buckets must not change the result.

    Args:
        specs: all tensors, however they will be put into buckets.
        compressor: what is sent of them.
        nodes: the number of nodes.
        algorithm: what was asked for; ``"auto"`` takes the one that sends the fewest bytes.

    """
    dtypes = dict.fromkeys(spec.dtype for spec in specs)
    if isinstance(compressor, BucketCompressor):
        if algorithm not in ("auto", "codec"):
            raise InvalidArgumentError(
                f"algorithm {algorithm!r} cannot carry {compressor}, which has a codec: use auto."
            )
        return {dtype: ChosenAlgorithm("codec", {}) for dtype in dtypes}
    return {
        dtype: _choose_algorithm(tuple(spec for spec in specs if spec.dtype == dtype), compressor, nodes, algorithm)
        for dtype in dtypes
    }


def _choose_algorithm(
    specs: tuple[TensorSpec, ...], compressor: Compressor, nodes: int, algorithm: AlgorithmOption
) -> ChosenAlgorithm:
    dtype = specs[0].dtype
    plans = tuple(plan_tensor(spec, compressor) for spec in specs)
    whole = assemble_buffer(specs, plans)
    dense = assemble_buffer(specs, tuple(dense_plan(plan, dtype) for plan in plans))
    uncut = tuple(
        shard for spec, plan in zip(specs, plans, strict=True) for shard in shard_tensor(spec, plan, 1) if shard
    )
    sent = _sent_bytes(whole, dense, uncut, nodes)
    chosen = _fewest_bytes(whole, sent) if algorithm == "auto" else algorithm
    if chosen not in sent:
        raise InvalidArgumentError(
            f"algorithm {chosen!r} cannot carry this compressor, but {', '.join(sorted(sent))} and auto can: reduce "
            f"needs shared indices and fp32, bf16 or fp16 values, two_phase needs top-k, gather a length known "
            f"beforehand."
        )
    log.info(
        "%d tensors of %s, from %s on, use %s among %d nodes; bytes a node sends: %s",
        len(specs),
        dtype,
        specs[0].name,
        chosen,
        nodes,
        ", ".join(f"{other} {nbytes:.0f}" for other, nbytes in sent.items()),
    )
    return ChosenAlgorithm(chosen, sent)


def _sent_bytes(
    plan: BufferPlan, dense: BufferPlan, shards: tuple[TensorShard, ...], nodes: int
) -> dict[Algorithm, float]:
    """Return what a node sends by each algorithm that can carry this plan. ``dense`` sends everything."""
    others, share = nodes - 1, (nodes - 1) / nodes
    sent: dict[Algorithm, float] = {"dense": 2 * share * dense.nbytes}
    if plan.variable_length:
        return sent | {"gatherv": others * plan.nbytes}
    sent |= {"gather": others * plan.nbytes, "gatherv": others * plan.nbytes}
    if can_reduce(plan, nodes):
        sent["reduce"] = 2 * share * plan.nbytes
    if can_take_two_phases(plan):
        averages = sum(part.averaged.nbytes for part in plan_two_phase(shards, nodes).parts)
        sent["two_phase"] = share * (plan.nbytes + averages)
    return sent


def _fewest_bytes(plan: BufferPlan, sent: dict[Algorithm, float]) -> Algorithm:
    if plan.variable_length:
        return "gatherv"
    # Of equals the first: gathered buffers carry headers and checksums, sums do not.
    order: tuple[Algorithm, ...] = ("gather", "reduce", "two_phase", "dense")
    return min((one for one in order if one in sent), key=lambda one: sent[one])


def fill_buckets(specs: Sequence[TensorSpec], bucket_bytes: int | None) -> list[tuple[int, ...]]:
    """Return the numbers of the tensors of each bucket: of one dtype, and of up to so many dense bytes.

    A tensor larger than that makes a bucket larger. Buckets of less than a sixteenth of it take another tensor all the
    same, because a collective costs more than its bytes; only the last one of a dtype may be small. Buckets come in the
    order in which they are complete, if tensors become ready in the order given.

    Args:
        specs: the tensors, in the order in which they become ready.
        bucket_bytes: dense bytes of a bucket; None: one bucket for each dtype.

    """
    full, buckets = float("inf") if bucket_bytes is None else bucket_bytes, []
    open_buckets: dict[torch.dtype, _OpenBucket] = {}
    for number, spec in enumerate(specs):
        size = torch.Size(spec.shape).numel() * spec.dtype.itemsize
        bucket = open_buckets.setdefault(spec.dtype, _OpenBucket())
        if bucket.nbytes + size > full and bucket.nbytes >= full * _LEAST_SHARE:
            buckets.append(tuple(bucket.numbers))
            bucket = open_buckets[spec.dtype] = _OpenBucket()
        bucket.numbers.append(number)
        bucket.nbytes += size
    buckets += (tuple(bucket.numbers) for bucket in open_buckets.values())
    return sorted(buckets, key=max)


_LEAST_SHARE = 1 / 16
"""The least of ``bucket_bytes`` that a bucket holds: 1 MiB of the default."""


@dataclass
class _OpenBucket:
    numbers: list[int] = field(default_factory=list)
    nbytes: int = 0


def _plan_bucket(
    settings: SyncSettings,
    tensors: tuple[int, ...],
    algorithm: Algorithm,
    sent: dict[Algorithm, float],
    nodes: int,
    ranks: int,
) -> BucketPlan:
    specs = tuple(settings.specs[number] for number in tensors)
    if algorithm == "codec":
        return _plan_codec_bucket(settings.compressor, tensors, specs, ranks)
    plans = [plan_tensor(spec, settings.compressor) for spec in specs]
    if algorithm == "dense":
        plans = [dense_plan(plan, spec.dtype) for spec, plan in zip(specs, plans, strict=True)]
    shards: list[list[TensorShard]] = [[] for _ in range(ranks)]
    numbers: list[list[int]] = [[] for _ in range(ranks)]
    for number, spec, plan in zip(tensors, specs, plans, strict=True):
        summed = spec if ranks == 1 else spec._replace(dtype=sum_dtype(spec.dtype))
        for rank, shard in enumerate(shard_tensor(summed, plan, ranks)):
            if shard is not None:
                shards[rank].append(shard)
                numbers[rank].append(number)
    buffers = tuple(
        assemble_buffer(tuple(shard.spec for shard in one), tuple(shard.plan for shard in one)) for one in shards
    )
    dense_nbytes = max(map(_numel, shards)) * specs[0].dtype.itemsize
    return BucketPlan(
        tensors,
        specs[0].dtype,
        tuple(map(tuple, shards)),
        tuple(map(tuple, numbers)),
        buffers,
        algorithm,
        algorithm == "gather" and nodes * max(plan.nbytes for plan in buffers) < dense_nbytes,
        tuple(sent.items()),
    )


def _plan_codec_bucket(
    compressor: Any, tensors: tuple[int, ...], specs: tuple[TensorSpec, ...], ranks: int
) -> BucketPlan:
    """Return a bucket of whole tensors, each of which one rank of a node works on, by the compressor's own codec."""
    summed = specs if ranks == 1 else tuple(spec._replace(dtype=sum_dtype(spec.dtype)) for spec in specs)
    by_rank = [
        [(number, spec) for number, spec in zip(tensors, summed, strict=True) if rank_of(spec, ranks) == rank]
        for rank in range(ranks)
    ]
    codecs = tuple(compressor.bucket_codec(tuple(spec for _, spec in own)) for own in by_rank)
    return BucketPlan(
        tensors,
        specs[0].dtype,
        tuple(tuple(uncut_shard(spec, codec) for _, spec in own) for own, codec in zip(by_rank, codecs, strict=True)),
        tuple(tuple(number for number, _ in own) for own in by_rank),
        (),
        "codec",
        False,
        (),
        codecs,
    )


def _numel(shards: tuple[TensorShard, ...] | list[TensorShard]) -> int:
    return sum(shard.last - shard.first for shard in shards)
