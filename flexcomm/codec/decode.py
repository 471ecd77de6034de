"""Decoding: the buffers of all senders are checked, then their payloads become averages."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from flexcomm.codec.checks import check_numbers, check_outputs, check_tensors
from flexcomm.codec.plan import BufferPlan, aligned
from flexcomm.codec.wire import (
    ALIGNMENT,
    ENCODED_WRONG,
    HEADER_NWORDS,
    NONFINITE,
    WORD_NBYTES,
    BufferHeader,
    Header,
    Region,
    check_payload,
    find_payload,
    to_words,
)
from flexcomm.compress import sample_key_for
from flexcomm.errors import InvalidArgumentError, NonFiniteError, WireError
from flexcomm.kernels import Average, Kernels, Payload, Reader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Decoder", "decode_bucket_", "regions_of"]


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


class Decoder:
    """Checks and decodes the buffers of several senders, in memory that is filled again and again.

    Args:
        plan: what every sender encoded by.
        gathered: the buffers of all senders, uint8.
        regions: where each sender's buffer is in ``gathered``; payloads are added in this order.
        kernels: the kernel set of the device.
        decoded_as: a plan with the same payloads that says what to decode them to, if not ``plan`` itself.

    """

    def __init__(
        self,
        plan: BufferPlan,
        gathered: Tensor,
        regions: Sequence[Region],
        kernels: Kernels,
        decoded_as: BufferPlan | None = None,
    ) -> None:
        if not regions:
            raise InvalidArgumentError("there are no buffers to average: give the region of at least one sender.")
        self._plan, self._kernels, self._words = plan, kernels, to_words(gathered)
        self._decoded_as = decoded_as or plan
        for region in regions:
            _check_length(plan, self._words, region)
        self._regions = list(regions)
        self._headers = [BufferHeader(self._words[region.start : region.end]) for region in regions]
        self._payloads = [
            [Payload(region.start + begin, layout) for region in regions]
            for begin, layout in zip(plan.positions, plan.layouts, strict=True)
        ]
        self._checkers = [] if plan.is_variable else self._readers_of(self._payloads, plan)
        self._readers = (
            self._checkers if decoded_as is None or plan.is_variable else self._readers_of(self._payloads, decoded_as)
        )

    def verify(self, *, step: int, sequence: int) -> list[str]:
        """Check all buffers; return the senders that had nonfinite values and sent nothing.

        Raises:
            WireError: a buffer cannot be used; it names the sender.

        """
        expected = Header(self._plan.digest, step, sequence, self._plan.count)
        headers = [
            header.check(region.sender, expected, self._kernels)
            for region, header in zip(self._regions, self._headers, strict=True)
        ]
        nonfinite = [
            region.sender for region, header in zip(self._regions, headers, strict=True) if header.flags == NONFINITE
        ]
        if nonfinite:
            return nonfinite
        if self._plan.is_variable:
            found = [
                _find_payloads(self._plan, self._words, region, header, self._kernels)
                for region, header in zip(self._regions, headers, strict=True)
            ]
            self._readers = self._readers_of(list(zip(*found, strict=True)), self._decoded_as)
        else:
            self._check_payloads()
        return []

    def decode_(self, outputs: Sequence[Tensor], *, step: int, average: Average) -> None:
        """Fill ``outputs`` with the averages of buffers that were verified."""
        plan = self._decoded_as
        for spec, one, reader, out in zip(plan.specs, plan.plans, self._readers, outputs, strict=True):
            reader.decode_(sample_key_for(one, step, spec.name), average, out)

    def _check_payloads(self) -> None:
        for checker, payloads, one in zip(self._checkers, self._payloads, self._plan.plans, strict=True):
            if checker.find_error():
                for region, payload in zip(self._regions, payloads, strict=True):
                    check_payload(self._words, region, payload, one, self._kernels)
                senders = ", ".join(region.sender for region in self._regions)
                raise WireError(senders, "payload", f"one of them is damaged. {ENCODED_WRONG}")

    def _readers_of(self, payloads: Sequence[Sequence[Payload]], plan: BufferPlan) -> list[Reader]:
        return [
            self._kernels.reader(self._words, of_all, one) for of_all, one in zip(payloads, plan.plans, strict=True)
        ]


def decode_bucket_(
    plan: BufferPlan,
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
    does a ``NonFiniteError`` that names those who had nonfinite values.
    """
    check_tensors(plan, tensors, gathered.device)
    check_outputs(plan, tensors)
    check_numbers(step, sequence)
    if average not in get_args(Average):
        raise InvalidArgumentError(f"average is {average!r}, but must be one of {', '.join(get_args(Average))}.")
    decoder = Decoder(plan, gathered, regions, kernels)
    nonfinite = decoder.verify(step=step, sequence=sequence)
    if nonfinite:
        raise NonFiniteError(f"{', '.join(nonfinite)} had NaN, infinity or a magnitude of 2**100 or more to send.")
    decoder.decode_([out.detach() for out in tensors], step=step, average=average)


def _check_length(plan: BufferPlan, words: Tensor, region: Region) -> None:
    if region.nwords > plan.nwords or (region.nwords < plan.nwords and not plan.variable_length):
        needed = f"{'at most ' if plan.variable_length else ''}{plan.nbytes} bytes"
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


def _find_payloads(plan: BufferPlan, words: Tensor, region: Region, header: Header, kernels: Kernels) -> list[Payload]:
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
            f"its tensors end at byte {position * WORD_NBYTES}, the buffer does not. {ENCODED_WRONG}",
        )
    if count != header.count:
        problem = f"it announces {header.count} entries, but holds {count}."
        raise WireError(region.sender, "count", f"{problem} {ENCODED_WRONG}")
    return payloads
