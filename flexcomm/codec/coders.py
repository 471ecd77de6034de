"""Encoder and Decoder: one bucket to one buffer, and the buffers of all senders to averages.

A buffer is a header, and what a plan sends of each tensor, one payload behind the other; ``docs/wire.md`` specifies it.
A receiver trusts nothing: what it expects follows from its own plan, and no size is ever taken from the wire. Kernels
find what is wrong (``verify``), and here it becomes a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import get_args

import torch
from torch import Tensor

from flexcomm.errors import InvalidArgumentError, InvalidTensorError, NonFiniteError, WireError
from flexcomm.kernels import (
    LARGEST_MAGNITUDE,
    STORE,
    Average,
    BufferPlan,
    Epilogue,
    Kernels,
    Problem,
    Region,
    StateUpdate,
    Status,
)
from flexcomm.kernels.layout import (
    ALIGNMENT,
    HEADER_NBYTES,
    HEADER_NWORDS,
    MAGIC,
    NONFINITE,
    VERSION,
    WORD_NBYTES,
    Header,
    checksum_of,
)

_PLAIN = StateUpdate()
_ENCODED_WRONG = (
    "The checksum fits, so it was sent like that: run flexcomm.testing.check_kernels there, or look at its memory."
)
_PAYLOAD_PROBLEMS = {
    Problem.COUNTS: ("counts", "a chunk of {name} is said to hold more entries than it can, or all of them too many"),
    Problem.LENGTH: ("length", "its payloads do not end where the buffer does"),
    Problem.INDEX: ("indices", "of {name}: they leave the chunk, repeat, do not increase, or are not all there"),
    Problem.SCALE: ("scales", "of {name}: one is negative or not finite"),
    Problem.VALUE: ("values", "of {name}: one is not finite"),
    Problem.ENTRIES: ("count", "it does not hold as many entries as it announces"),
}


class Encoder:
    """Fills one buffer again and again; it is checked and sliced once."""

    def __init__(self, plan: BufferPlan, buffer: Tensor, kernels: Kernels) -> None:
        self.buffer = buffer
        self._plan, self._words = plan, to_words(buffer)
        # Kernels write where the plan says, without looking: too short a buffer would be written past its end.
        if self._words.numel() < plan.nwords:
            raise InvalidTensorError(
                f"the buffer has {buffer.numel()} bytes, but the plan needs {plan.nbytes}: allocate plan.nbytes."
            )
        self._kernel = kernels.encoder(plan, self._words[: plan.nwords])
        self.mark_nonfinite_, self.rollback_ = self._kernel.mark_nonfinite_, self._kernel.rollback_

    def encode_(
        self,
        tensors: Sequence[Tensor],
        states: Sequence[Tensor] | None = None,
        states_out: Sequence[Tensor] | None = None,
        update: StateUpdate = _PLAIN,
        *,
        step: int,
        sequence: int,
    ) -> str:
        """Do as :func:`encode_bucket_` does, with tensors and states known to be the plan's.

        Returns what is wrong with them, if anything is: then the buffer says that this sender has nothing to send.
        """
        word = int(self._kernel.encode_(tensors, states, states_out, update, step=step, sequence=sequence))
        if word == 0:
            return ""
        status = Status.of(word)
        if status.problem is Problem.STATE:
            return (
                f"the state kept for {self._plan.specs[status.tensor].name} holds NaN or infinity: zero all states, or "
                f"load them from a checkpoint."
            )
        named = zip(self._plan.specs, tensors, strict=True)
        names = [spec.name for spec, x in named if not bool((x.abs() < LARGEST_MAGNITUDE).all())]
        return (
            f"NaN, infinity or a magnitude of 2**100 or more in {', '.join(names)}; nothing was changed. Skip this "
            f"step on every rank; if that happens often, lower the learning rate or the loss scale, or clip."
        )

    @property
    def nbytes(self) -> int:
        """How many bytes of the buffer are filled."""
        if not self._plan.variable_length:
            return self._plan.nbytes
        header = Header.unpack(self._words[:HEADER_NWORDS].cpu().numpy().tobytes())
        return HEADER_NBYTES + header.payload_nbytes


def encode_bucket_(
    plan: BufferPlan,
    tensors: Sequence[Tensor],
    buffer: Tensor,
    *,
    step: int,
    sequence: int,
    kernels: Kernels,
    states: Sequence[Tensor] | None = None,
    update: StateUpdate = _PLAIN,
) -> int:
    """Fill ``buffer`` and move what it holds out of the states; return how many of its bytes are used.

    Whatever is wrong with the arguments raises before any state is touched: ``NonFiniteError``, naming the tensors, if
    one holds NaN. Only a state that holds NaN itself is found later.
    """
    check_tensors(plan, tensors, buffer.device, states)
    check_numbers(step, sequence)
    encoder = Encoder(plan, buffer, kernels)
    problem = encoder.encode_(tensors, states, states, update, step=step, sequence=sequence)
    if problem:
        raise NonFiniteError(problem)
    return encoder.nbytes


def regions_of(senders: Sequence[str], nbytes: Sequence[int]) -> list[Region]:
    """Return where buffers are that lie one behind the other; lengths may come from the senders."""
    regions, start = [], 0
    for sender, length in zip(senders, nbytes, strict=True):
        if length < 0 or length % ALIGNMENT:
            needed = f"buffers are multiples of {ALIGNMENT}: send as many as were encoded."
            raise WireError(sender, "length", f"it has {length} bytes, but {needed}")
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
        summed: of how many nodes each buffer is the sum.

    """

    def __init__(
        self,
        plan: BufferPlan,
        gathered: Tensor,
        regions: Sequence[Region],
        kernels: Kernels,
        decoded_as: BufferPlan | None = None,
        summed: int = 1,
    ) -> None:
        if not regions:
            raise InvalidArgumentError("there are no buffers to average: give the region of at least one sender.")
        self._plan, self._words, self._regions = plan, to_words(gathered), regions
        for region in regions:
            _check_region(plan, self._words, region)
        self._kernel = kernels.decoder(plan, self._words, regions, decoded_as, summed)

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
            field, text = _PAYLOAD_PROBLEMS[status.problem]
            text = text.format(name=self._plan.specs[status.tensor].name)
            raise WireError(region.sender, field, f"{text}. {_ENCODED_WRONG}")
        return [region.sender for region in self._regions if read_header(self._words, region).flags == NONFINITE]

    def decode_(self, outputs: Sequence[Tensor], *, step: int, average: Average, epilogue: Epilogue = STORE) -> None:
        """Do with ``outputs`` and the averages of buffers that were verified what the epilogue says."""
        self._kernel.decode_(outputs, step=step, average=average, epilogue=epilogue)


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
    for spec, out in zip(plan.specs, tensors, strict=True):
        if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
            raise InvalidTensorError(f"the output {spec.name} is expanded, elements share memory: give it a clone.")
    check_numbers(step, sequence)
    if average not in get_args(Average):
        raise InvalidArgumentError(f"average is {average!r}, but must be one of {', '.join(get_args(Average))}.")
    decoder = Decoder(plan, gathered, regions, kernels)
    nonfinite = decoder.verify(step=step, sequence=sequence)
    if nonfinite:
        raise NonFiniteError(f"{', '.join(nonfinite)} had NaN, infinity or a magnitude of 2**100 or more to send.")
    decoder.decode_([out.detach() for out in tensors], step=step, average=average)


def _check_region(plan: BufferPlan, words: Tensor, region: Region) -> None:
    """Raise unless a sender's buffer is as long as the plan says, and inside of ``words``."""
    nbytes, end = region.nwords * WORD_NBYTES, region.end * WORD_NBYTES
    problem = ""
    if nbytes > plan.nbytes or (nbytes < plan.nbytes and not plan.variable_length):
        needed = f"{'at most ' if plan.variable_length else ''}{plan.nbytes} bytes"
        problem = f"it has {nbytes} bytes, the plan says {needed}: hand over what was encoded, by the plan all share."
    elif nbytes < HEADER_NBYTES:
        problem = f"{nbytes} bytes hold no header of {HEADER_NBYTES}: hand over all bytes it sent."
    elif region.end > words.numel():
        gathered = words.numel() * WORD_NBYTES
        problem = f"it ends at byte {end}, but {gathered} were gathered: give regions_of the gathered lengths."
    if problem:
        raise WireError(region.sender, "length", problem)


def read_header(words: Tensor, region: Region) -> Header:
    """Return the fields of a sender's header, whatever they are."""
    return Header.unpack(words[region.start : region.start + HEADER_NWORDS].cpu().numpy().tobytes())


def header_error(words: Tensor, region: Region, expected: Header) -> WireError:
    """Return the error of a sender whose header is not the expected one, or whose checksum does not fit."""
    got, checksum = read_header(words, region), checksum_of(words[region.start : region.end].cpu().numpy())
    ours, nbytes = expected.matching(got), region.nwords * WORD_NBYTES - HEADER_NBYTES
    one_release = "install one release on every rank."
    fields = {
        "magic": (got.magic, MAGIC, "this is no buffer of ours. Hand over what was encoded, from its first byte on."),
        "version": (got.version, VERSION, one_release),
        "payload bytes": (got.payload_nbytes, nbytes, "so many are here. Hand over as many as were encoded."),
        "checksum": (
            f"{got.checksum:08x}",
            f"{checksum:08x}",
            "bytes were damaged on the way. If that happens again, look at that node's memory and link.",
        ),
        "spare bytes": (got.spare.hex(" ", 4) if any(got.spare) else "zero", "zero", one_release),
        "plan hash": (
            f"{got.plan:016x}",
            f"{ours.plan:016x}",
            "tensors, names, order or compressor differ. Compare what both ranks give to plan_buffer.",
        ),
        "step": (got.step, ours.step, "a rank skipped or repeated one. After a restart, load one checkpoint on all."),
        "sequence": (got.sequence, ours.sequence, "make the same calls, in the same order, on every rank."),
        "flags": (got.flags, ours.flags, one_release),
        "count": (got.entries, ours.entries, _ENCODED_WRONG),
    }
    field = next((name for name, (theirs, needed, _) in fields.items() if theirs != needed), "count")
    theirs, needed, advice = fields[field]
    return WireError(region.sender, field, f"it is {theirs}, but must be {needed}: {advice}")


def to_words(buffer: Tensor) -> Tensor:
    """Return a uint8 buffer, of whatever shape, as the int32 words kernels work on; the same memory."""
    if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
        gaps = "" if buffer.is_contiguous() else " with gaps"
        raise InvalidTensorError(
            f"a buffer is {buffer.dtype}{gaps}, but must be contiguous torch.uint8: allocate it as such, and pass "
            f"slices of its first dim only."
        )
    if buffer.numel() % WORD_NBYTES or buffer.storage_offset() % WORD_NBYTES:
        raise InvalidTensorError(
            f"a buffer has {buffer.numel()} bytes and begins {buffer.storage_offset()} bytes into its memory, but both "
            f"must be multiples of {WORD_NBYTES}: cut it at multiples of {ALIGNMENT}, where buffers end."
        )
    return buffer.view(-1).view(torch.int32)


def check_tensors(
    plan: BufferPlan, tensors: Sequence[Tensor], device: torch.device, states: Sequence[Tensor] | None = None
) -> None:
    for what, given in (("tensors", tensors), ("states", states)):
        if given is not None and len(given) != len(plan.specs):
            count = f"the plan is for {len(plan.specs)} tensors"
            raise InvalidTensorError(f"{count}, but {len(given)} {what} were given: pass one for each of its specs.")
    for spec, x in zip(plan.specs, tensors, strict=True):
        if tuple(x.shape) != spec.shape or x.dtype != spec.dtype:
            raise InvalidTensorError(
                f"{spec.name} is {x.dtype} {list(x.shape)}, but the plan is for {spec.dtype} {list(spec.shape)}: pass "
                f"tensors in the plan's order, and plan anew for one that has changed."
            )
    for spec, one, state in zip(plan.specs, plan.plans, states or (), strict=False):
        if state.dtype != torch.float32 or tuple(state.shape) != one.state_shape or not state.is_contiguous():
            raise InvalidTensorError(
                f"the state of {spec.name} is {state.dtype} {list(state.shape)}, but must be contiguous torch.float32 "
                f"{list(one.state_shape)}: make it from the bucket's plan, and reset one that was made for another."
            )
    names = [spec.name for spec in plan.specs]
    names += [f"the state of {name}" for name in names]
    for what, x in zip(names, [*tensors, *(states or ())], strict=False):
        if x.device != device:
            raise InvalidTensorError(f"{what} is on {x.device}, but the buffer is on {device}: move one of them.")


def check_numbers(step: int, sequence: int) -> None:
    for name, number in (("step", step), ("sequence", sequence)):
        is_whole = type(number) is int or (type(number) is not bool and isinstance(number, Integral))
        if not is_whole or not 0 <= number < 1 << 64:
            raise InvalidArgumentError(f"{name} is {number!r}, but must be a whole number from 0 to 2**64 - 1.")
