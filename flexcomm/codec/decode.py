"""Decoding: the buffers of all senders are checked, then their payloads become averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from torch import Tensor

from flexcomm.codec.encode import check_numbers, check_tensors
from flexcomm.codec.wire import check_region, header_error, payload_error, read_header, to_words
from flexcomm.errors import InvalidArgumentError, InvalidTensorError, NonFiniteError, WireError
from flexcomm.kernels import Average, BufferPlan, Kernels, Problem, Region, Status
from flexcomm.kernels.layout import ALIGNMENT, NONFINITE, WORD_NBYTES


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
        self._plan, self._words, self._regions = plan, to_words(gathered), regions
        for region in regions:
            check_region(plan, self._words, region)
        self._kernel = kernels.decoder(plan, self._words, regions, decoded_as)

    def verify(self, *, step: int, sequence: int) -> list[str]:
        """Check all buffers; return the senders that had nonfinite values and sent nothing.

        Raises:
            WireError: a buffer cannot be used; it names the sender.

        """
        word = int(self._kernel.verify(step=step, sequence=sequence))
        if word == 0:
            return []
        status = Status.of(word)
        region = self._regions[status.sender]
        if status.problem is Problem.HEADER:
            raise header_error(self._words, region, self._plan.header(step, sequence))
        if status.problem is not Problem.NONFINITE:
            raise payload_error(status.problem, self._plan.specs[status.tensor].name, region)
        return [region.sender for region in self._regions if read_header(self._words, region).flags == NONFINITE]

    def decode_(self, outputs: Sequence[Tensor], *, step: int, average: Average) -> None:
        """Fill ``outputs`` with the averages of buffers that were verified."""
        self._kernel.decode_(outputs, step=step, average=average)


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


def check_outputs(plan: BufferPlan, tensors: Sequence[Tensor]) -> None:
    for spec, out in zip(plan.specs, tensors, strict=True):
        if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
            raise InvalidTensorError(f"the output {spec.name} is expanded, elements share memory: give it a clone.")
