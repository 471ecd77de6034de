"""Encoder and Decoder: one bucket to one buffer, and the buffers of all senders to averages.

``docs/wire.md`` specifies the buffer. A receiver trusts nothing: what it expects follows from its own plan. Kernels
find what is wrong (``verify``), and here it becomes a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from flexcomm.errors import InvalidArgumentError, InvalidTensorError, WireError
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
_PROBLEMS = {
    Problem.HEADER: ("header", "it is not the expected one"),
    Problem.COUNTS: ("counts", "a chunk of {name} is said to hold more entries than it can, or all of them too many"),
    Problem.LENGTH: ("length", "its payloads do not end where the buffer does"),
    Problem.INDEX: ("indices", "of {name}: they leave the chunk, repeat, do not increase, or are not all there"),
    Problem.SCALE: ("scales", "of {name}: one is negative or not finite"),
    Problem.VALUE: ("values", "of {name}: one is not finite"),
    Problem.ENTRIES: ("count", "it does not hold as many entries as it announces"),
}


class Encoder:
    """Fills one buffer of at least ``plan.nbytes`` again and again; it is checked and sliced once."""

    def __init__(self, plan: BufferPlan, buffer: Tensor, kernels: Kernels) -> None:
        self.buffer = buffer
        self._plan, self._words = plan, to_words(buffer)
        # Kernels write where the plan says, without looking: too short a buffer would be written past its end.
        if self._words.numel() < plan.nwords:
            raise InvalidTensorError(f"the buffer has {buffer.numel()} bytes, but the plan needs {plan.nbytes}.")
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
        """Fill the buffer and move what it holds out of the states. Tensors and states must be the plan's.

        Returns what is wrong with them, if anything is: then the buffer says that this sender has nothing to send.
        """
        word = int(self._kernel.encode_(tensors, states, states_out, update, step=step, sequence=sequence))
        if word == 0:
            return ""
        status = Status.of(word)
        if status.problem is Problem.STATE:
            name = self._plan.specs[status.tensor].name
            return f"NaN or infinity in the state kept for {name}: zero all states, or load them from a checkpoint"
        named = zip(self._plan.specs, tensors, strict=True)
        names = [spec.name for spec, x in named if not bool((x.abs() < LARGEST_MAGNITUDE).all())]
        return f"NaN, infinity or a magnitude of 2**100 or more in {', '.join(names)}"

    @property
    def nbytes(self) -> int:
        """How many bytes of the buffer are filled."""
        if not self._plan.variable_length:
            return self._plan.nbytes
        header = Header.unpack(self._words[:HEADER_NWORDS].cpu().numpy().tobytes())
        return HEADER_NBYTES + header.payload_nbytes


class Decoder:
    """Checks and decodes the buffers of several senders, in memory that is filled again and again.

    Buffers are added in the order they lie in ``gathered``. ``nbytes`` are their lengths as the senders say, if not the
    plan's; a ``WireError`` refuses one that cannot be. ``decoded_as`` is a plan with the same payloads that says what
    to decode them to, if not ``plan`` itself; each buffer is the sum of those of ``summed`` nodes.
    """

    def __init__(
        self,
        plan: BufferPlan,
        gathered: Tensor,
        senders: Sequence[str],
        kernels: Kernels,
        nbytes: Sequence[int] | None = None,
        decoded_as: BufferPlan | None = None,
        summed: int = 1,
    ) -> None:
        self._regions: list[Region] = []
        start, least = 0, HEADER_NBYTES if plan.variable_length else plan.nbytes
        for sender, length in zip(senders, nbytes or [plan.nbytes] * len(senders), strict=True):
            if not least <= length <= plan.nbytes or length % ALIGNMENT:
                needed = f"from {least} to {plan.nbytes}, in steps of {ALIGNMENT}: install one release on every rank."
                raise WireError(sender, "length", f"it has {length} bytes, but the plan says {needed}")
            self._regions.append(Region(sender, start, length // WORD_NBYTES))
            start += length // WORD_NBYTES
        self._plan, self._words = plan, to_words(gathered)
        self._kernel = kernels.decoder(plan, self._words, self._regions, decoded_as, summed)

    def verify(self, *, step: int, sequence: int) -> list[str]:
        """Check all buffers, or raise ``WireError``; return the senders that had nonfinite values and sent nothing."""
        word = int(self._kernel.verify(step=step, sequence=sequence))
        if word == 0:
            return []
        status = Status.of(word)
        region = self._regions[status.sender]
        if status.problem is Problem.HEADER:
            check_header(self._words, region, self._plan.header(step, sequence))
        if status.problem is not Problem.NONFINITE:
            field, text = _PROBLEMS[status.problem]
            text = text.format(name=self._plan.specs[status.tensor].name)
            raise WireError(region.sender, field, f"{text}. {_ENCODED_WRONG}")
        return [region.sender for region in self._regions if read_header(self._words, region).flags == NONFINITE]

    def decode_(self, outputs: Sequence[Tensor], *, step: int, average: Average, epilogue: Epilogue = STORE) -> None:
        """Do with ``outputs`` and the averages of buffers that were verified what the epilogue says."""
        self._kernel.decode_(outputs, step=step, average=average, epilogue=epilogue)


def read_header(words: Tensor, region: Region) -> Header:
    return Header.unpack(words[region.start : region.start + HEADER_NWORDS].cpu().numpy().tobytes())


def check_header(words: Tensor, region: Region, expected: Header) -> Header:
    """Return a sender's header; raise if it is not the expected one, or if the checksum does not fit."""
    got, checksum = read_header(words, region), checksum_of(words[region.start : region.end].cpu().numpy())
    ours, nbytes = expected.matching(got), region.nwords * WORD_NBYTES - HEADER_NBYTES
    one_release = "install one release on every rank."
    fields = {
        "magic": (got.magic, MAGIC, "this is no buffer of ours. Hand over what was encoded, from its first byte on."),
        "version": (got.version, VERSION, one_release),
        "payload bytes": (got.payload_nbytes, nbytes, "so many are here. Hand over as many as were encoded."),
        "checksum": (f"{got.checksum:08x}", f"{checksum:08x}", "it was damaged: check that node's memory and link."),
        "spare bytes": (got.spare.hex(" ", 4) if any(got.spare) else "zero", "zero", one_release),
        "plan hash": (f"{got.plan:016x}", f"{ours.plan:016x}", "tensors, names, order or compressor differ."),
        "step": (got.step, ours.step, "a rank skipped or repeated one. After a restart, load one checkpoint on all."),
        "sequence": (got.sequence, ours.sequence, "make the same calls, in the same order, on every rank."),
        "flags": (got.flags, ours.flags, one_release),
        "count": (got.entries, ours.entries, _ENCODED_WRONG),
    }
    for field, (theirs, needed, advice) in fields.items():
        if theirs != needed:
            raise WireError(region.sender, field, f"it is {theirs}, but must be {needed}: {advice}")
    return got


def to_words(buffer: Tensor) -> Tensor:
    """Return a uint8 buffer, of whatever shape, as the int32 words kernels work on; the same memory."""
    is_cut = buffer.numel() % WORD_NBYTES or buffer.storage_offset() % WORD_NBYTES
    if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or is_cut:
        raise InvalidTensorError(
            f"a buffer is {buffer.dtype} with strides {buffer.stride()}, {buffer.numel()} bytes from byte "
            f"{buffer.storage_offset()} on, but must be contiguous torch.uint8, cut at multiples of {ALIGNMENT} bytes."
        )
    return buffer.view(-1).view(torch.int32)


def check_numbers(step: int, sequence: int) -> None:
    for name, number in (("step", step), ("sequence", sequence)):
        is_whole = type(number) is int or (type(number) is not bool and isinstance(number, Integral))
        if not is_whole or not 0 <= number < 1 << 64:
            raise InvalidArgumentError(f"{name} is {number!r}, but must be a whole number from 0 to 2**64 - 1.")
