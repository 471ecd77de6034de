"""Buckets: several tensors in one buffer, so that one collective carries them all.

``plan_bucket`` computes everything that follows from shapes, once; ``encode_bucket_`` fills a buffer and
``decode_bucket_`` turns the buffers of all nodes into averages. Chunks never straddle tensors, so how tensors are
put into buckets changes no bit of the result.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple, get_args

import torch

from flexcomm.compress import Compressor, TensorSpec, dense, draw_for
from flexcomm.errors import CompressorError, InvalidArgumentError, InvalidTensorError, NonFiniteError, WireError
from flexcomm.kernels import Average, Kernels, Layout, Momentum, Payload, Selection, TensorPlan
from flexcomm.wire import (
    ALIGNMENT,
    HEADER_NWORDS,
    NOTHING_FIT,
    SENT_LIKE_THAT,
    VERSION,
    WORD_NBYTES,
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

__all__ = [
    "BucketPlan",
    "Opened",
    "assemble_bucket",
    "decode_bucket_",
    "decode_payloads_",
    "encode_bucket_",
    "flag_bucket_",
    "is_dense",
    "open_bucket",
    "plan_bucket",
    "plan_tensor",
    "regions_of",
    "unchecked_bucket",
]

_TINY_NUMEL = 64
_NUMBERS = 1 << 64
_NO_MOMENTUM = Momentum()


@dataclass(frozen=True)
class BucketPlan:
    """What follows from names, shapes, dtypes and compressor: equal on every rank, or ``digest`` tells.

    ``nbytes`` is the length of every buffer or, of an ``exact`` plan, the greatest length of one; ``layouts`` are those
    of payloads that are as long as they may get.
    """

    specs: tuple[TensorSpec, ...]
    plans: tuple[TensorPlan, ...]
    layouts: tuple[Layout, ...]
    nbytes: int
    digest: int

    @cached_property
    def exact(self) -> bool:
        """Whether buffers are as long as what they hold, so that lengths must be exchanged."""
        return any(plan.exact for plan in self.plans)

    @cached_property
    def count(self) -> int:
        """Entries in a buffer; -1 if it depends on the data."""
        return -1 if any(plan.is_variable for plan in self.plans) else sum(plan.entries for plan in self.plans)


def plan_bucket(specs: Sequence[TensorSpec], compressor: Compressor) -> BucketPlan:
    """Return how these tensors share a buffer. A tensor that would be longer than if sent whole is sent whole."""
    try:
        hash(compressor)
    except TypeError as error:
        raise CompressorError(
            f"{compressor} cannot be hashed ({error}), but plans are kept by the settings they follow from: make "
            f"{type(compressor).__name__} a dataclass(frozen=True) of settings that can be."
        ) from error
    plain = tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in specs)
    return _plan_bucket(plain, compressor)


@lru_cache(maxsize=1024)
def _plan_bucket(specs: tuple[TensorSpec, ...], compressor: Compressor) -> BucketPlan:
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CompressorError(f"several tensors of one bucket are called {', '.join(twice)}: give each its own name.")
    return assemble_bucket(specs, tuple(plan_tensor(spec, compressor) for spec in specs))


def assemble_bucket(specs: tuple[TensorSpec, ...], plans: tuple[TensorPlan, ...]) -> BucketPlan:
    """Return how tensors with these plans share a buffer."""
    layouts = tuple(plan_layout(plan, plan.entries) for plan in plans)
    nwords = HEADER_NWORDS + sum(layout.nwords for layout in layouts)
    return BucketPlan(specs, plans, layouts, _aligned(nwords) * WORD_NBYTES, _digest(specs, plans))


def plan_tensor(spec: TensorSpec, compressor: Compressor) -> TensorPlan:
    """Return what is sent of a tensor: what the compressor plans, or all of it where that is shorter."""
    plan, whole = compressor.plan(spec), dense().plan(spec)
    if plan.rows * plan.cols != math.prod(spec.shape):
        raise CompressorError(
            f"{compressor} plans {plan.rows} x {plan.cols} elements for {spec.name} of {list(spec.shape)}: its "
            f"plan must cover the tensor exactly."
        )
    if is_dense(plan):
        return plan
    # How long an exact payload gets is known only afterwards; a tiny tensor's is judged by its greatest length.
    entries = 0 if plan.exact and plan.cols * plan.rows > _TINY_NUMEL else plan.entries
    return plan if plan_layout(plan, entries).nwords <= plan_layout(whole, whole.entries).nwords else whole


def is_dense(plan: TensorPlan) -> bool:
    """Return whether a plan sends every element as a float: in a dtype that was asked for, so none replaces it."""
    return plan.selection is Selection.EVERYTHING and not plan.transformed and not plan.values.scales


def _digest(specs: tuple[TensorSpec, ...], plans: tuple[TensorPlan, ...]) -> int:
    text = repr((VERSION, [(spec.name, spec.shape, str(spec.dtype)) for spec in specs], plans))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _aligned(nwords: int) -> int:
    step = ALIGNMENT // WORD_NBYTES
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

    Whatever is wrong with the arguments raises before any state is touched: ``NonFiniteError``, naming the tensors, if
    one holds NaN. Only a state that holds NaN itself is found later.
    """
    momenta = [_NO_MOMENTUM] * len(tensors) if momenta is None else momenta
    words = _words_to_fill(plan, buffer)
    _check_tensors(plan, tensors, buffer.device)
    _check_momenta(plan, momenta, buffer.device)
    _check_numbers(step=step, sequence=sequence)
    unfit = [spec.name for spec, x in zip(plan.specs, tensors, strict=True) if not kernels.is_fit(x)]
    if unfit:
        raise NonFiniteError(
            f"NaN, infinity or a magnitude of 2**100 or more in {', '.join(unfit)}; nothing was changed. Skip this "
            f"step on every rank; if that happens often, lower the learning rate or the loss scale, or clip."
        )
    position, count = HEADER_NWORDS, 0
    for spec, one, full, x, momentum in zip(plan.specs, plan.plans, plan.layouts, tensors, momenta, strict=True):
        survey = kernels.survey(x, one, momentum) if one.is_variable else None
        entries = one.entries if survey is None else int(survey.counts.sum())
        layout = plan_layout(one, entries) if one.exact else full
        payload = words[position : position + layout.nwords]
        if not kernels.encode_(x, payload, one, layout, draw_for(one, step, spec.name), momentum, survey):
            raise NonFiniteError(
                f"the state kept for {spec.name} holds NaN or infinity, and states of this bucket have changed: zero "
                f"them all, or load them from a checkpoint."
            )
        position, count = position + layout.nwords, count + entries
    end = _aligned(position)
    words[position:end] = 0
    seal_(words[:end], Envelope(plan.digest, step, sequence, count), kernels)
    return end * WORD_NBYTES


def flag_bucket_(plan: BucketPlan, buffer: Tensor, *, step: int, sequence: int, kernels: Kernels) -> int:
    """Fill ``buffer`` with word that there is nothing fit to be sent; return how many of its bytes are used."""
    words = _words_to_fill(plan, buffer)
    _check_numbers(step=step, sequence=sequence)
    end = HEADER_NWORDS if plan.exact else plan.nbytes // WORD_NBYTES
    words[:end] = 0
    seal_(words[:end], Envelope(plan.digest, step, sequence, 0, NOTHING_FIT), kernels)
    return end * WORD_NBYTES


def _words_to_fill(plan: BucketPlan, buffer: Tensor) -> Tensor:
    # Kernels write where the plan says, without looking: too short a buffer would be written past its end.
    words = to_words(buffer)
    if words.numel() * WORD_NBYTES < plan.nbytes:
        raise InvalidTensorError(
            f"the buffer has {buffer.numel()} bytes, but the plan needs {plan.nbytes}: allocate plan.nbytes."
        )
    return words


def _check_tensors(plan: BucketPlan, tensors: Sequence[Tensor], device: torch.device) -> None:
    _check_number_of("tensors", len(tensors), plan)
    for spec, x in zip(plan.specs, tensors, strict=True):
        if tuple(x.shape) != spec.shape or x.dtype != spec.dtype:
            raise InvalidTensorError(
                f"{spec.name} is {x.dtype} {list(x.shape)}, but the plan is for {spec.dtype} {list(spec.shape)}: pass "
                f"tensors in the plan's order, and plan anew for one that has changed."
            )
        _check_device(spec.name, x, device)


def _check_momenta(plan: BucketPlan, momenta: Sequence[Momentum], device: torch.device) -> None:
    _check_number_of("momenta", len(momenta), plan)
    for spec, one, momentum in zip(plan.specs, plan.plans, momenta, strict=True):
        for state in (momentum.state, momentum.next_state):
            if state is None:
                continue
            if state.dtype != torch.float32 or tuple(state.shape) != one.state_shape or not state.is_contiguous():
                raise InvalidTensorError(
                    f"the state of {spec.name} is {state.dtype} {list(state.shape)}, but must be contiguous "
                    f"torch.float32 {list(one.state_shape)}: make it from the bucket's plan, and reset one that was "
                    f"made for another."
                )
            _check_device(f"the state of {spec.name}", state, device)


def _check_number_of(what: str, count: int, plan: BucketPlan) -> None:
    if count != len(plan.specs):
        raise InvalidTensorError(
            f"the plan is for {len(plan.specs)} tensors, but {count} {what} were given: pass one for each of its specs."
        )


def _check_device(what: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise InvalidTensorError(
            f"{what} is on {x.device}, but the buffer is on {device}: move one of them, a bucket is on one device."
        )


def _check_numbers(**numbers: int) -> None:
    wrong = [f"{name} is {number!r}" for name, number in numbers.items() if not _is_countable(number)]
    if wrong:
        raise InvalidArgumentError(f"{' and '.join(wrong)}, but must be a whole number from 0 to 2**64 - 1.")


def _is_countable(number: object) -> bool:
    return not isinstance(number, bool) and isinstance(number, Integral) and 0 <= int(number) < _NUMBERS


def regions_of(senders: Sequence[str], nbytes: Sequence[int]) -> list[Region]:
    """Return where buffers are that lie one behind the other; lengths may come from the senders."""
    regions, start = [], 0
    for sender, length in zip(senders, nbytes, strict=True):
        if length < 0 or length % ALIGNMENT:
            raise WireError(
                sender,
                "length",
                f"it has {length} bytes, but buffers are multiples of {ALIGNMENT}: send as many as were encoded.",
            )
        regions.append(Region(sender, start, length // WORD_NBYTES))
        start += length // WORD_NBYTES
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

    Everything is checked before anything is written: a ``WireError`` names the sender and leaves all as it was, and so
    does a ``NonFiniteError`` that names those who had nothing fit to send.
    """
    _check_tensors(plan, tensors, gathered.device)
    _check_outputs(plan, tensors)
    if average not in get_args(Average):
        raise InvalidArgumentError(f"average is {average!r}, but must be one of {', '.join(get_args(Average))}.")
    opened = open_bucket(plan, gathered, regions, step=step, sequence=sequence, kernels=kernels)
    if opened.flagged:
        raise NonFiniteError(f"{', '.join(opened.flagged)} had nothing fit to send: NaN, infinity or 2**100 or more.")
    decode_payloads_(plan, opened, tensors, step=step, kernels=kernels, average=average)


class Opened(NamedTuple):
    """Buffers that have been checked: their words, where each sender's payloads are, and who sent none."""

    words: Tensor
    payloads: list[list[Payload]]
    flagged: list[str]


def open_bucket(
    plan: BucketPlan, gathered: Tensor, regions: Sequence[Region], *, step: int, sequence: int, kernels: Kernels
) -> Opened:
    """Check the buffers in ``gathered``. Raises ``WireError``, naming the sender, if one cannot be used."""
    words = to_words(gathered)
    _check_numbers(step=step, sequence=sequence)
    if not regions:
        raise InvalidArgumentError("there are no buffers to average: give the region of at least one sender.")
    payloads, flagged = [], []
    for region in regions:
        found = _check_buffer(plan, words, region, step, sequence, kernels)
        if found is None:
            flagged.append(region.sender)
        else:
            payloads.append(found)
    return Opened(words, payloads, flagged)


def unchecked_bucket(plan: BucketPlan, buffer: Tensor) -> Opened:
    """Return where the payloads of one buffer are, of a plan whose lengths do not vary, without looking at them."""
    payloads, position = [], HEADER_NWORDS
    for layout in plan.layouts:
        payloads.append(Payload(position, layout))
        position += layout.nwords
    return Opened(to_words(buffer), [payloads], [])


def decode_payloads_(
    plan: BucketPlan, opened: Opened, tensors: Sequence[Tensor], *, step: int, kernels: Kernels, average: Average
) -> None:
    """Fill ``tensors`` with the averages of opened buffers, of a plan with the same payloads."""
    for number, (spec, one, out) in enumerate(zip(plan.specs, plan.plans, tensors, strict=True)):
        draw = draw_for(one, step, spec.name)
        kernels.decode_(opened.words, [found[number] for found in opened.payloads], one, draw, average, out.detach())


def _check_outputs(plan: BucketPlan, tensors: Sequence[Tensor]) -> None:
    for spec, out in zip(plan.specs, tensors, strict=True):
        if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
            raise InvalidTensorError(f"the output {spec.name} is expanded, elements share memory: give it a clone.")


def _check_buffer(
    plan: BucketPlan, words: Tensor, region: Region, step: int, sequence: int, kernels: Kernels
) -> list[Payload] | None:
    """Return where each tensor's payload is, once the whole buffer has been checked; None if it is flagged."""
    nwords = plan.nbytes // WORD_NBYTES
    if region.nwords > nwords or (region.nwords < nwords and not plan.exact):
        needed = f"{'at most ' if plan.exact else ''}{plan.nbytes} bytes"
        raise WireError(
            region.sender,
            "length",
            f"it has {region.nwords * WORD_NBYTES} bytes, the plan says {needed}: hand over what was encoded, by the "
            f"plan that all ranks share.",
        )
    if region.start + region.nwords > words.numel():
        raise WireError(
            region.sender,
            "length",
            f"it is said to end at byte {(region.start + region.nwords) * WORD_NBYTES}, but "
            f"{words.numel() * WORD_NBYTES} were gathered: give regions_of the lengths that were gathered.",
        )
    envelope = open_envelope(words, region, Envelope(plan.digest, step, sequence, plan.count), kernels)
    if envelope.flags == NOTHING_FIT:
        return None
    payloads, position, count = [], HEADER_NWORDS, 0
    for one, full in zip(plan.plans, plan.layouts, strict=True):
        payload = find_payload(words, region, position, one, full, kernels)
        payloads.append(payload)
        position += payload.layout.nwords
        count += one.entries if payload.counts is None else int(payload.counts.sum())
    if _aligned(position) != region.nwords:
        raise WireError(
            region.sender,
            "length",
            f"its tensors end at byte {position * WORD_NBYTES}, the buffer does not. {SENT_LIKE_THAT}",
        )
    if count != envelope.count:
        problem = f"it announces {envelope.count} entries, but holds {count}."
        raise WireError(region.sender, "count", f"{problem} {SENT_LIKE_THAT}")
    return payloads
