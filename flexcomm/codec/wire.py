"""What is wrong with a buffer, in words: kernels find it (``verify``), and here it becomes a message.

A receiver trusts nothing: what it expects follows from its own plan, and no size is ever taken from the wire.
``docs/wire.md`` is the format's specification.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexcomm.errors import InvalidTensorError, WireError
from flexcomm.kernels import BufferPlan, Problem, Region
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


def check_region(plan: BufferPlan, words: Tensor, region: Region) -> None:
    """Raise unless a sender's buffer is as long as the plan says, and inside of ``words``."""
    if region.nwords > plan.nwords or (region.nwords < plan.nwords and not plan.variable_length):
        needed = f"{'at most ' if plan.variable_length else ''}{plan.nbytes} bytes"
        raise WireError(
            region.sender,
            "length",
            f"it has {region.nwords * WORD_NBYTES} bytes, the plan says {needed}: hand over what was encoded, by the "
            f"plan that all ranks share.",
        )
    if region.nwords < HEADER_NWORDS:
        problem = f"{region.nwords * WORD_NBYTES} bytes hold no header of {HEADER_NBYTES}: hand over all bytes it sent."
        raise WireError(region.sender, "length", problem)
    if region.end > words.numel():
        raise WireError(
            region.sender,
            "length",
            f"it is said to end at byte {region.end * WORD_NBYTES}, but {words.numel() * WORD_NBYTES} were gathered: "
            f"give regions_of the lengths that were gathered.",
        )


def read_header(words: Tensor, region: Region) -> Header:
    """Return the fields of a sender's header, whatever they are."""
    return Header.unpack(words[region.start : region.start + HEADER_NWORDS].cpu().numpy().tobytes())


def payload_error(problem: Problem, name: str, region: Region) -> WireError:
    """Return the error of a problem that ``verify`` found in a sender's payload of a tensor."""
    field, text = _PAYLOAD_PROBLEMS[problem]
    return WireError(region.sender, field, f"{text.format(name=name)}. {_ENCODED_WRONG}")


def header_error(words: Tensor, region: Region, expected: Header) -> WireError:
    """Return the error of a sender whose header is not the expected one, or whose checksum does not fit."""
    received = read_header(words, region)
    checksum = checksum_of(words[region.start : region.end].cpu().numpy())
    field, problem = next(_header_problems(received, expected, region.nwords * WORD_NBYTES - HEADER_NBYTES, checksum))
    return WireError(region.sender, field, problem)


def _header_problems(got: Header, expected: Header, nbytes: int, checksum: int) -> Iterator[tuple[str, str]]:
    """Yield the fields of a header that are not as expected, and what is wrong with them."""
    if got.magic != MAGIC:
        yield (
            "magic",
            (
                f"it begins with {got.magic!r}, not {MAGIC!r}: this is no buffer of ours, or it does not begin here. "
                f"Hand over what was encoded, in the order of the senders."
            ),
        )
    if got.version != VERSION:
        yield "version", f"it is {got.version}, ours is {VERSION}: install one release on every rank."
    if got.payload_nbytes != nbytes:
        yield (
            "payload bytes",
            (f"it announces {got.payload_nbytes}, but {nbytes} are here: hand over as many as were encoded."),
        )
    if got.checksum != checksum:
        yield (
            "checksum",
            (
                f"it is {got.checksum:08x}, but the bytes give {checksum:08x}: they were damaged on the way. If that "
                f"happens again, look at that node's memory and link."
            ),
        )
    if any(got.spare):
        yield (
            "spare bytes",
            (
                f"they are {got.spare.hex(' ', 4)}, but must be zero: another program wrote them. Install one release "
                f"on every rank."
            ),
        )
    if got.plan != expected.plan:
        yield (
            "plan hash",
            (
                f"it is {got.plan:016x}, ours is {expected.plan:016x}: its tensors, their names or order, or its "
                f"compressor differ from ours. Compare what both ranks give to plan_buffer."
            ),
        )
    if got.step != expected.step:
        yield (
            "step",
            (
                f"it is {got.step}, ours is {expected.step}: a rank skipped or repeated one. After a restart, load the "
                f"same checkpoint on every rank."
            ),
        )
    if got.sequence != expected.sequence:
        yield (
            "sequence",
            (
                f"it is {got.sequence}, ours is {expected.sequence}: make the same calls, in the same order, on "
                f"every rank."
            ),
        )
    if got.flags not in (0, NONFINITE):
        yield (
            "flags",
            (f"they are {got.flags:#06x}, where 0 and {NONFINITE} have a meaning: install one release on every rank."),
        )
    entries = expected.matching(got).entries
    yield "count", f"it announces {got.entries} entries, the plan has {entries}. {_ENCODED_WRONG}"
