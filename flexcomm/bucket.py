"""Buckets: several tensors in one buffer, so that one collective carries them all.

``plan_bucket`` computes everything that follows from shapes, once; ``encode_bucket_`` fills a buffer and
``decode_bucket_`` turns the buffers of all nodes into averages. Chunks never straddle tensors, so how tensors are
put into buckets changes no bit of the result.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from flexcomm.compress import Compressor, TensorSpec, dense, draw_for
from flexcomm.errors import CompressorError, InvalidTensorError, NonFiniteError, WireError
from flexcomm.kernels import Average, Kernels, Momentum, Payload, TensorPlan
from flexcomm.wire import (
    ALIGNMENT,
    HEADER_NBYTES,
    VERSION,
    Envelope,
    Region,
    find_payload,
    open_envelope,
    plan_layout,
    seal_,
    to_words,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["BucketPlan", "decode_bucket_", "encode_bucket_", "plan_bucket", "regions_of"]

_WORD_NBYTES = 4
_HEADER_NWORDS = HEADER_NBYTES // _WORD_NBYTES
_TINY_NUMEL = 64
_NO_MOMENTUM = Momentum()


@dataclass(frozen=True)
class BucketPlan:
    """What follows from names, shapes, dtypes and compressor: equal on every rank, or ``digest`` tells.

    ``nbytes`` is the length of every buffer or, of an ``exact`` plan, the greatest length of one.
    """

    specs: tuple[TensorSpec, ...]
    plans: tuple[TensorPlan, ...]
    nbytes: int
    digest: int

    @property
    def exact(self) -> bool:
        """Whether buffers are as long as what they hold, so that lengths must be exchanged."""
        return any(plan.exact for plan in self.plans)

    @property
    def count(self) -> int:
        """Entries in a buffer; -1 if it depends on the data."""
        return -1 if any(plan.is_variable for plan in self.plans) else sum(plan.entries for plan in self.plans)


@lru_cache(maxsize=1024)
def plan_bucket(specs: tuple[TensorSpec, ...], compressor: Compressor) -> BucketPlan:
    """Return how these tensors share a buffer. A tensor that would be longer than if sent whole is sent whole."""
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CompressorError(f"several tensors of one bucket are called {', '.join(twice)}: give each its own name.")
    plans = tuple(_plan_tensor(spec, compressor) for spec in specs)
    nwords = _HEADER_NWORDS + sum(plan_layout(plan, plan.entries).nwords for plan in plans)
    return BucketPlan(specs, plans, _aligned(nwords) * _WORD_NBYTES, _digest(specs, plans))


def _plan_tensor(spec: TensorSpec, compressor: Compressor) -> TensorPlan:
    plan, whole = compressor.plan(spec), dense().plan(spec)
    # How long an exact payload gets is known only afterwards; a tiny tensor's is judged by its greatest length.
    entries = 0 if plan.exact and plan.cols * plan.rows > _TINY_NUMEL else plan.entries
    return plan if plan_layout(plan, entries).nwords <= plan_layout(whole, whole.entries).nwords else whole


def _digest(specs: tuple[TensorSpec, ...], plans: tuple[TensorPlan, ...]) -> int:
    text = repr((VERSION, [(spec.name, tuple(spec.shape), str(spec.dtype)) for spec in specs], plans))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _aligned(nwords: int) -> int:
    step = ALIGNMENT // _WORD_NBYTES
    return -(-nwords // step) * step


def encode_bucket_(
    plan: BucketPlan,
    tensors: Sequence[Tensor],
    buffer: Tensor,
    *,
    step: int,
    sequence: int,
    kernels: Kernels,
    momenta: Sequence[Momentum] | None = None,
) -> int:
    """Fill ``buffer`` and move what it holds out of the states; return how many of its bytes are used.

    Raises ``NonFiniteError``, naming the tensors, before any state is touched.
    """
    _check_tensors(plan, tensors)
    momenta = momenta or [_NO_MOMENTUM] * len(tensors)
    unfit = [spec.name for spec, x in zip(plan.specs, tensors, strict=True) if not kernels.is_fit(x)]
    if unfit:
        raise NonFiniteError(
            f"NaN, infinity or a magnitude of 2**100 or more in {', '.join(unfit)}; nothing was changed."
        )
    words, position, count = to_words(buffer), _HEADER_NWORDS, 0
    for spec, one, x, momentum in zip(plan.specs, plan.plans, tensors, momenta, strict=True):
        survey = kernels.survey(x, one, momentum) if one.is_variable else None
        entries = one.entries if survey is None else int(survey.counts.sum())
        layout = plan_layout(one, entries if one.exact else one.entries)
        payload = words[position : position + layout.nwords]
        if not kernels.encode_(x, payload, one, layout, draw_for(one, step, spec.name), momentum, survey):
            raise NonFiniteError(f"the state kept for {spec.name} holds NaN or infinity; clear or reload it.")
        position, count = position + layout.nwords, count + entries
    end = _aligned(position)
    words[position:end] = 0
    seal_(words[:end], Envelope(plan.digest, step, sequence, count), kernels)
    return end * _WORD_NBYTES


def _check_tensors(plan: BucketPlan, tensors: Sequence[Tensor]) -> None:
    if len(tensors) != len(plan.specs):
        raise InvalidTensorError(f"the plan is for {len(plan.specs)} tensors, but {len(tensors)} were given.")
    for spec, x in zip(plan.specs, tensors, strict=True):
        if tuple(x.shape) != tuple(spec.shape) or x.dtype != spec.dtype:
            raise InvalidTensorError(
                f"{spec.name} is {x.dtype} {list(x.shape)}, but the plan is for {spec.dtype} {list(spec.shape)}."
            )


def regions_of(senders: Sequence[str], nbytes: Sequence[int]) -> list[Region]:
    """Return where buffers are that lie one behind the other."""
    regions, start = [], 0
    for sender, length in zip(senders, nbytes, strict=True):
        regions.append(Region(sender, start, length // _WORD_NBYTES))
        start += length // _WORD_NBYTES
    return regions


def decode_bucket_(
    plan: BucketPlan,
    gathered: Tensor,
    regions: Sequence[Region],
    tensors: Sequence[Tensor],
    *,
    step: int,
    sequence: int,
    kernels: Kernels,
    average: Average = "nodes",
) -> None:
    """Fill ``tensors`` with the averages of the buffers in ``gathered``, added in the order of ``regions``.

    Everything is checked before anything is written: a ``WireError`` names the sender and leaves all as it was.
    """
    _check_tensors(plan, tensors)
    words = to_words(gathered)
    payloads = [_check_buffer(plan, words, region, step, sequence, kernels) for region in regions]
    for number, (spec, one, out) in enumerate(zip(plan.specs, plan.plans, tensors, strict=True)):
        draw = draw_for(one, step, spec.name)
        kernels.decode_(words, [found[number] for found in payloads], one, draw, average, out)


def _check_buffer(
    plan: BucketPlan, words: Tensor, region: Region, step: int, sequence: int, kernels: Kernels
) -> list[Payload]:
    """Return where each tensor's payload is, once the whole buffer has been checked."""
    nwords = plan.nbytes // _WORD_NBYTES
    if region.nwords > nwords or (region.nwords < nwords and not plan.exact):
        needed = f"{'at most ' if plan.exact else ''}{plan.nbytes} bytes"
        raise WireError(
            region.sender, "length", f"it has {region.nwords * _WORD_NBYTES} bytes, the plan says {needed}."
        )
    if region.start + region.nwords > words.numel():
        raise WireError(
            region.sender,
            "length",
            f"it is said to end at byte {(region.start + region.nwords) * _WORD_NBYTES}, but "
            f"{words.numel() * _WORD_NBYTES} were gathered.",
        )
    announced = open_envelope(words, region, Envelope(plan.digest, step, sequence, plan.count), kernels)
    payloads, position, count = [], _HEADER_NWORDS, 0
    for one in plan.plans:
        payload = find_payload(words, region, position, one, kernels)
        payloads.append(payload)
        position += payload.layout.nwords
        count += one.entries if payload.counts is None else int(payload.counts.sum())
    if _aligned(position) != region.nwords:
        raise WireError(
            region.sender, "length", f"its tensors end at byte {position * _WORD_NBYTES}, the buffer does not."
        )
    if count != announced:
        raise WireError(region.sender, "count", f"it announces {announced} entries, but holds {count}.")
    return payloads
