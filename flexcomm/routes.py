"""Routes: everything about a synchronisation that follows from shapes, settings and topology, planned once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_args

import torch

from flexcomm.between import Algorithm, Way, choose_way, densified, sent_bytes
from flexcomm.bucket import BucketPlan, assemble_bucket, plan_tensor
from flexcomm.errors import InvalidArgumentError
from flexcomm.kernels import Average
from flexcomm.pieces import Piece, cut

if TYPE_CHECKING:
    from flexcomm.compress import Compressor, TensorSpec

__all__ = ["NonFinitePolicy", "Request", "Route", "plan_routes", "sum_dtype"]

log = logging.getLogger(__name__)

NonFinitePolicy = Literal["raise", "skip", "zero"]


@dataclass(frozen=True)
class Request:
    """What is asked for; all ranks must ask for the same."""

    specs: tuple[TensorSpec, ...]
    compressor: Compressor
    average: Average
    algorithm: Algorithm
    nonfinite: NonFinitePolicy
    bucket_bytes: int
    keeps_residuals: bool

    def __post_init__(self) -> None:
        choices = {"average": Average, "algorithm": Algorithm, "nonfinite": NonFinitePolicy}
        wrong = [
            f"{name} is {getattr(self, name)!r}, but must be one of {', '.join(get_args(choice))}"
            for name, choice in choices.items()
            if getattr(self, name) not in get_args(choice)
        ]
        nbytes: object = self.bucket_bytes  # callers need not heed types
        if not isinstance(nbytes, int) or nbytes < 1:
            wrong.append(f"bucket_bytes is {nbytes!r}, but must be a whole number, at least 1")
        if wrong:
            raise InvalidArgumentError(f"{'; '.join(wrong)}.")

    def fields(self) -> dict[str, object]:
        """Return all of it by name, for ranks to compare."""
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
            "residuals": "given" if self.keeps_residuals else "none",
        }


@dataclass(frozen=True)
class Route:
    """The way of one bucket: which tensors, which pieces of them each rank of a node works on, and how they travel.

    ``pieces[r]`` are those of local rank r and ``numbers[r]`` the tensors they belong to. Inside a node, ``forwards``
    says whether ranks hand on the payloads they received, or the elements they decoded. ``sent_by_way`` is what a node
    sends of all tensors of this dtype.
    """

    tensors: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Piece, ...], ...]
    numbers: tuple[tuple[int, ...], ...]
    plans: tuple[BucketPlan, ...]
    way: Way
    forwards: bool
    sent_by_way: tuple[tuple[Way, float], ...]

    @property
    def longest(self) -> int:
        """Elements of the rank that has most of them."""
        return max(sum(piece.last - piece.first for piece in pieces) for pieces in self.pieces)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what the ranks of a node add up in: sixteen bits are too few."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@lru_cache(maxsize=256)
def plan_routes(request: Request, nodes: int, ranks: int) -> tuple[Route, ...]:
    """Return the buckets of a request, for nodes of so many ranks."""
    ways = {dtype: _plan_way(request, dtype, nodes) for dtype in {spec.dtype for spec in request.specs}}
    return tuple(
        _plan_route(request, tensors, *ways[request.specs[tensors[0]].dtype], nodes, ranks)
        for tensors in _fill_buckets(request)
    )


def _plan_way(request: Request, dtype: torch.dtype, nodes: int) -> tuple[Way, dict[Way, float]]:
    """Return the way of all tensors of one dtype, and what a node sends by it and by the others.

    Of all, not of each bucket: ways send different things, and the size of buckets must not change the result.
    """
    specs = tuple(spec for spec in request.specs if spec.dtype == dtype)
    plans = tuple(plan_tensor(spec, request.compressor) for spec in specs)
    everything = tuple(densified(plan, dtype) for plan in plans)
    whole = assemble_bucket(specs, plans)
    uncut = tuple(piece for spec, plan in zip(specs, plans, strict=True) for piece in cut(spec, plan, 1) if piece)
    sent = sent_bytes(whole, assemble_bucket(specs, everything), uncut, nodes)
    way = choose_way(request.algorithm, whole, sent)
    log.info(
        "%d tensors of %s, from %s on, go by %s among %d nodes; bytes a node sends: %s",
        len(specs),
        dtype,
        specs[0].name,
        way,
        nodes,
        ", ".join(f"{other} {nbytes:.0f}" for other, nbytes in sent.items()),
    )
    return way, sent


def _fill_buckets(request: Request) -> list[tuple[int, ...]]:
    """Put neighbours of one dtype together until a bucket is full."""
    buckets: list[tuple[int, ...]] = []
    tensors: list[int] = []
    nbytes = 0
    for number, spec in enumerate(request.specs):
        size = _nbytes(spec)
        if tensors and (nbytes + size > request.bucket_bytes or spec.dtype != request.specs[tensors[-1]].dtype):
            buckets.append(tuple(tensors))
            tensors, nbytes = [], 0
        tensors.append(number)
        nbytes += size
    return [*buckets, tuple(tensors)] if tensors else buckets


def _nbytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize


def _plan_route(
    request: Request, tensors: tuple[int, ...], way: Way, sent: dict[Way, float], nodes: int, ranks: int
) -> Route:
    specs = tuple(request.specs[number] for number in tensors)
    plans = [plan_tensor(spec, request.compressor) for spec in specs]
    if way == "dense":
        plans = [densified(plan, spec.dtype) for spec, plan in zip(specs, plans, strict=True)]
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    numbers: list[list[int]] = [[] for _ in range(ranks)]
    for number, spec, plan in zip(tensors, specs, plans, strict=True):
        summed = spec if ranks == 1 else spec._replace(dtype=sum_dtype(spec.dtype))
        for rank, piece in enumerate(cut(summed, plan, ranks)):
            if piece is not None:
                pieces[rank].append(piece)
                numbers[rank].append(number)
    by_rank = tuple(_assemble(of_rank) for of_rank in pieces)
    dense_nbytes = max(sum((piece.last - piece.first) for piece in one) for one in pieces) * specs[0].dtype.itemsize
    return Route(
        tensors,
        specs[0].dtype,
        tuple(map(tuple, pieces)),
        tuple(map(tuple, numbers)),
        by_rank,
        way,
        way == "gather" and nodes * max(plan.nbytes for plan in by_rank) < dense_nbytes,
        tuple(sent.items()),
    )


def _assemble(pieces: list[Piece]) -> BucketPlan:
    return assemble_bucket(tuple(piece.spec for piece in pieces), tuple(piece.plan for piece in pieces))
