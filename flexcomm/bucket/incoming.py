"""Buffers that came: everything in them is checked, then the payloads of all senders become averages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, get_args

from flexcomm.bucket.checks import check_numbers, check_outputs, check_tensors
from flexcomm.bucket.plans import BucketPlan, aligned
from flexcomm.compress import draw_for
from flexcomm.errors import InvalidArgumentError, NonFiniteError, WireError
from flexcomm.kernels import Average, Kernels, Payload, Reader
from flexcomm.wire import (
    ALIGNMENT,
    HEADER_NWORDS,
    NOTHING_FIT,
    SENT_LIKE_THAT,
    WORD_NBYTES,
    Envelope,
    Frame,
    Region,
    check_payload,
    find_payload,
    to_words,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Incoming", "Opened", "decode_bucket_", "decode_payloads_", "regions_of", "unchecked"]


class Opened(NamedTuple):
    """Buffers that have been checked: what reads the payloads of each tensor, and who sent none."""

    readers: Sequence[Reader]
    flagged: list[str]


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


class Incoming:
    """Buffers of several senders, in memory that is filled again and again: where everything lies is found once.

    ``meaning`` is a plan with the same payloads that says what they stand for, if that is not the plan itself.
    """

    def __init__(
        self,
        plan: BucketPlan,
        gathered: Tensor,
        regions: Sequence[Region],
        kernels: Kernels,
        meaning: BucketPlan | None = None,
    ) -> None:
        if not regions:
            raise InvalidArgumentError("there are no buffers to average: give the region of at least one sender.")
        self._plan, self._kernels, self._words = plan, kernels, to_words(gathered)
        self.meaning = meaning or plan
        for region in regions:
            _check_length(plan, self._words, region)
        self._framed = [(region, Frame(self._words[region.start : region.end])) for region in regions]
        self._payloads = [
            [Payload(region.start + begin, layout) for region in regions]
            for begin, layout in zip(plan.positions, plan.layouts, strict=True)
        ]
        self._checkers = [] if plan.varies else self._read(self._payloads, plan)
        self._readers = self._checkers if meaning is None or plan.varies else self._read(self._payloads, meaning)

    def open(self, *, step: int, sequence: int) -> Opened:
        """Check the buffers. Raises ``WireError``, naming the sender, if one cannot be used."""
        expected = Envelope(self._plan.digest, step, sequence, self._plan.count)
        envelopes = [frame.open(region.sender, expected, self._kernels) for region, frame in self._framed]
        flagged = [
            region.sender
            for (region, _), envelope in zip(self._framed, envelopes, strict=True)
            if envelope.flags == NOTHING_FIT
        ]
        if flagged:
            return Opened([], flagged)
        return Opened(self._open_varying(envelopes) if self._plan.varies else self._open_fixed(), [])

    def _open_fixed(self) -> Sequence[Reader]:
        for checker, payloads, one in zip(self._checkers, self._payloads, self._plan.plans, strict=True):
            if checker.find_fault():
                for (region, _), payload in zip(self._framed, payloads, strict=True):
                    check_payload(self._words, region, payload, one, self._kernels)
                everybody = ", ".join(region.sender for region, _ in self._framed)
                raise WireError(everybody, "payload", f"one of them is damaged. {SENT_LIKE_THAT}")
        return self._readers

    def _open_varying(self, envelopes: Sequence[Envelope]) -> Sequence[Reader]:
        found = [
            _find_payloads(self._plan, self._words, region, envelope, self._kernels)
            for (region, _), envelope in zip(self._framed, envelopes, strict=True)
        ]
        return self._read(list(zip(*found, strict=True)), self.meaning)

    def _read(self, payloads: Sequence[Sequence[Payload]], plan: BucketPlan) -> Sequence[Reader]:
        return [
            self._kernels.reader(self._words, of_all, one) for of_all, one in zip(payloads, plan.plans, strict=True)
        ]


def unchecked(plan: BucketPlan, buffer: Tensor, kernels: Kernels) -> Opened:
    """Return what reads one buffer, of a plan whose lengths do not vary, without looking at what it holds."""
    words, placed = to_words(buffer), zip(plan.positions, plan.layouts, plan.plans, strict=True)
    return Opened([kernels.reader(words, [Payload(begin, layout)], one) for begin, layout, one in placed], [])


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
    check_tensors(plan, tensors, gathered.device)
    check_outputs(plan, tensors)
    check_numbers(step, sequence)
    if average not in get_args(Average):
        raise InvalidArgumentError(f"average is {average!r}, but must be one of {', '.join(get_args(Average))}.")
    opened = Incoming(plan, gathered, regions, kernels).open(step=step, sequence=sequence)
    if opened.flagged:
        raise NonFiniteError(f"{', '.join(opened.flagged)} had nothing fit to send: NaN, infinity or 2**100 or more.")
    decode_payloads_(plan, opened, [out.detach() for out in tensors], step=step, average=average)


def decode_payloads_(
    meaning: BucketPlan, opened: Opened, tensors: Sequence[Tensor], *, step: int, average: Average
) -> None:
    """Fill ``tensors`` with the averages of opened buffers, by the plan that says what they stand for."""
    for spec, one, reader, out in zip(meaning.specs, meaning.plans, opened.readers, tensors, strict=True):
        reader.decode_(draw_for(one, step, spec.name), average, out)


def _check_length(plan: BucketPlan, words: Tensor, region: Region) -> None:
    if region.nwords > plan.nwords or (region.nwords < plan.nwords and not plan.exact):
        needed = f"{'at most ' if plan.exact else ''}{plan.nbytes} bytes"
        raise WireError(
            region.sender,
            "length",
            f"it has {region.nwords * WORD_NBYTES} bytes, the plan says {needed}: hand over what was encoded, by the "
            f"plan that all ranks share.",
        )
    if region.end > words.numel():
        raise WireError(
            region.sender,
            "length",
            f"it is said to end at byte {region.end * WORD_NBYTES}, but {words.numel() * WORD_NBYTES} were gathered: "
            f"give regions_of the lengths that were gathered.",
        )


def _find_payloads(
    plan: BucketPlan, words: Tensor, region: Region, envelope: Envelope, kernels: Kernels
) -> list[Payload]:
    """Return where each tensor's payload is in a buffer whose contents vary, once all of them have been checked."""
    payloads, position, count = [], HEADER_NWORDS, 0
    for one, full in zip(plan.plans, plan.layouts, strict=True):
        payload = find_payload(words, region, position, one, full, kernels)
        payloads.append(payload)
        position += payload.layout.nwords
        count += one.entries if payload.counts is None else int(payload.counts.sum())
    if aligned(position) != region.nwords:
        raise WireError(
            region.sender,
            "length",
            f"its tensors end at byte {position * WORD_NBYTES}, the buffer does not. {SENT_LIKE_THAT}",
        )
    if count != envelope.count:
        problem = f"it announces {envelope.count} entries, but holds {count}."
        raise WireError(region.sender, "count", f"{problem} {SENT_LIKE_THAT}")
    return payloads
