"""The bytes of a bucket: a fixed header, then each tensor's sections. ``docs/wire.md`` is the format's specification.

A sender writes a ``BufferHeader``; a receiver checks it and calls ``find_payload`` or ``check_payload``. A receiver
trusts nothing: what it expects follows from its own plan, and no size is ever taken from the wire. This file knows
neither ranks nor mathematics.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from flexcomm.errors import InvalidTensorError, WireError
from flexcomm.kernels import IndexCode, Kernels, Layout, Payload, PayloadError, TensorPlan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ALIGNMENT",
    "ENCODED_WRONG",
    "HEADER_NBYTES",
    "HEADER_NWORDS",
    "NONFINITE",
    "VERSION",
    "WORD_NBYTES",
    "BufferHeader",
    "Header",
    "Region",
    "check_payload",
    "find_payload",
    "plan_layout",
    "to_words",
]

VERSION = 1
_MAGIC = b"FLXC"
_HEADER = struct.Struct("<4sHHQQQQQI12s")
_SPARE = bytes(12)
WORD_NBYTES = 4
HEADER_NBYTES = _HEADER.size
HEADER_NWORDS = HEADER_NBYTES // WORD_NBYTES
ALIGNMENT = 16
"""A buffer's bytes are a multiple of this, so that rows of gathered buffers stay aligned."""

NONFINITE = 1
"""The flag of a buffer without payloads: its sender had NaN, infinity or a value too large."""

_WORD_BITS = 8 * WORD_NBYTES
_SCALE_BITS = 16
_CHECKSUM_WORD = 12
_LOW32 = (1 << 32) - 1
_ERRORS = {
    PayloadError.INDEX: ("indices", "they leave the chunk, repeat, do not increase, or are not as many as announced"),
    PayloadError.SCALE: ("scales", "one is negative or not finite"),
    PayloadError.VALUE: ("values", "one is not finite"),
}
ENCODED_WRONG = (
    "The checksum fits, so it was sent like that: run flexcomm.testing.check_kernels there, or look at its memory."
)
"""What to do about a payload that contradicts itself."""


@dataclass(frozen=True)
class Header:
    """The fields of a buffer's header that sender and receiver compare."""

    plan: int
    step: int
    sequence: int
    count: int
    flags: int = 0


class Region(NamedTuple):
    """One sender's buffer inside a tensor of words that holds those of many: where it begins and how long it is."""

    sender: str
    start: int
    nwords: int

    @property
    def end(self) -> int:
        return self.start + self.nwords


def plan_layout(plan: TensorPlan, entries: int) -> Layout:
    """Return where the sections of a payload with so many entries are. Moves no data."""
    code, low_bits, entry_bits, chunk_bits = _choose_index_code(plan, entries)
    counts_bits = plan.chunks * plan.chunk_numel.bit_length() if plan.is_variable else 0
    indices = _words(counts_bits)
    scales = indices + _words(entries * entry_bits + plan.chunks * chunk_bits)
    values = scales + _words(plan.chunks * plan.values.format.scales * _SCALE_BITS)
    nwords = values + _words(entries * plan.values.format.bits)
    return Layout(code, low_bits, entry_bits, chunk_bits, indices, scales, values, nwords)


class _IndexCoding(NamedTuple):
    code: IndexCode
    low_bits: int
    entry_bits: int
    chunk_bits: int


def _choose_index_code(plan: TensorPlan, entries: int) -> _IndexCoding:
    """Return the shortest code for the indices; every one is as long for any indices, given how many there are."""
    length = plan.chunk_numel
    if not plan.sends_indices:
        return _IndexCoding(IndexCode.NONE, 0, 0, 0)
    width = max(1, (length - 1).bit_length())
    codings = [
        _IndexCoding(IndexCode.PACKED, 0, width, 0),
        *(_IndexCoding(IndexCode.ELIAS_FANO, low, low + 1, (length - 1) >> low) for low in range(width)),
        _IndexCoding(IndexCode.BITMAP, 0, 0, length),
    ]
    return min(codings, key=lambda coding: entries * coding.entry_bits + plan.chunks * coding.chunk_bits)


def _words(bits: int) -> int:
    return -(-bits // _WORD_BITS)


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


class BufferHeader:
    """A buffer's header: views made once, to write and to check it again and again.

    Headers are written and read on the host: in the buffer itself, if it is there.
    """

    def __init__(self, words: Tensor) -> None:
        self._words = words
        self._nbytes = words.numel() * WORD_NBYTES
        self._header = words[:HEADER_NWORDS]
        self._host = self._header.cpu()
        self._octets = self._host.numpy().view(np.uint8)

    def write_(self, header: Header, kernels: Kernels) -> None:
        """Write the header of a buffer whose sections are in place."""
        payload_nbytes = self._nbytes - HEADER_NBYTES
        self._write(_header_bytes(header, payload_nbytes))
        self._write(_header_bytes(header, payload_nbytes, _checksum(self._words, 0, kernels)))

    def check(self, sender: str, expected: Header, kernels: Kernels) -> Header:
        """Check header and checksum and return the header; its count of entries is still to be compared.

        ``expected.count`` is the number of entries of a plan that fixes it, else -1. A nonfinite buffer has none.
        """
        if self._nbytes < HEADER_NBYTES:
            problem = f"{self._nbytes} bytes hold no header of {HEADER_NBYTES}: hand over all bytes it sent."
            raise WireError(sender, "length", problem)
        raw = self._read()
        raw_header = _RawHeader._make(_HEADER.unpack(raw))
        received = expected if expected.count >= 0 else replace(expected, count=raw_header.entries)
        checksum = _checksum(self._words, raw_header.checksum, kernels)
        # One comparison instead of one for every field: what is wrong is looked for only where something is.
        if raw != _header_bytes(received, self._nbytes - HEADER_NBYTES, checksum):
            _check_header(sender, raw_header, self._nbytes, checksum)
            received = Header(
                raw_header.plan, raw_header.step, raw_header.sequence, raw_header.entries, raw_header.flags
            )
            _check_agreement(sender, received, expected)
        return received

    def _write(self, header: bytes) -> None:
        self._octets[:] = np.frombuffer(header, np.uint8)
        if self._host is not self._header:
            self._header.copy_(self._host)

    def _read(self) -> bytes:
        if self._host is not self._header:
            self._host.copy_(self._header)
        return self._octets.tobytes()


class _RawHeader(NamedTuple):
    magic: bytes
    version: int
    flags: int
    plan: int
    step: int
    sequence: int
    entries: int
    payload_nbytes: int
    checksum: int
    spare: bytes


def _header_bytes(header: Header, payload_nbytes: int, checksum: int = 0) -> bytes:
    return _HEADER.pack(
        _MAGIC,
        VERSION,
        header.flags,
        header.plan,
        header.step,
        header.sequence,
        header.count,
        payload_nbytes,
        checksum,
        _SPARE,
    )


def _checksum(words: Tensor, itself: int, kernels: Kernels) -> int:
    """Return the checksum of everything but itself, which is part of the sum: one look at the words is enough."""
    return (kernels.checksum(words, 0) - _scattered(itself, _CHECKSUM_WORD)) % (1 << 32)


def _scattered(word: int, place: int) -> int:
    """Return what a word adds to :meth:`Kernels.checksum`."""
    word ^= place * 0x9E3779B9 & _LOW32
    word = (word ^ word >> 16) * 0x85EBCA6B & _LOW32
    word = (word ^ word >> 13) * 0xC2B2AE35 & _LOW32
    return word ^ word >> 16


def _check_header(sender: str, header: _RawHeader, nbytes: int, checksum: int) -> None:
    """Raise unless this is a whole and undamaged buffer of this release."""
    _require(
        header.magic == _MAGIC,
        sender,
        "magic",
        f"it begins with {header.magic!r}, not {_MAGIC!r}: this is no buffer of ours, or it does not begin here. Hand "
        f"over what was encoded, in the order of the senders.",
    )
    _require(
        header.version == VERSION,
        sender,
        "version",
        f"it is {header.version}, ours is {VERSION}: install one release on every rank.",
    )
    _require(
        header.payload_nbytes == nbytes - HEADER_NBYTES,
        sender,
        "payload bytes",
        f"it announces {header.payload_nbytes}, but {nbytes - HEADER_NBYTES} are here: hand over as many as were "
        f"encoded.",
    )
    _require(
        header.checksum == checksum,
        sender,
        "checksum",
        f"it is {header.checksum:08x}, but the bytes give {checksum:08x}: they were damaged on the way. If that "
        f"happens again, look at that node's memory and link.",
    )
    _require(
        header.spare == _SPARE,
        sender,
        "spare bytes",
        f"they are {header.spare.hex(' ', 4)}, but must be zero: another program wrote them. Install one release on "
        f"every rank.",
    )


def _check_agreement(sender: str, got: Header, expected: Header) -> None:
    _require(
        got.plan == expected.plan,
        sender,
        "plan hash",
        f"it is {got.plan:016x}, ours is {expected.plan:016x}: its tensors, their names or order, or its compressor "
        f"differ from ours. Compare what both ranks give to plan_buffer.",
    )
    _require(
        got.step == expected.step,
        sender,
        "step",
        f"it is {got.step}, ours is {expected.step}: a rank skipped or repeated one. After a restart, load the same "
        f"checkpoint on every rank.",
    )
    _require(
        got.sequence == expected.sequence,
        sender,
        "sequence",
        f"it is {got.sequence}, ours is {expected.sequence}: make the same calls in the same order on every rank.",
    )
    _require(
        got.flags in (0, NONFINITE),
        sender,
        "flags",
        f"they are {got.flags:#06x}, where 0 and {NONFINITE} have a meaning: install one release on every rank.",
    )
    count = 0 if got.flags == NONFINITE else expected.count
    _require(
        count in (-1, got.count),
        sender,
        "count",
        f"it announces {got.count} entries, the plan has {count}. {ENCODED_WRONG}",
    )


def find_payload(
    words: Tensor, region: Region, start: int, plan: TensorPlan, full: Layout, kernels: Kernels
) -> Payload:
    """Return where a tensor's payload is, once everything in it has been checked.

    ``start`` counts from the region; ``full`` is the layout of a payload as long as it may get.
    """
    here, counts = region.start + start, None
    layout = plan_layout(plan, 0) if plan.variable_length else full
    _check_room(region, start, layout.nwords)
    if plan.is_variable:
        counts = _read_counts(words, region, here, plan, kernels)
        layout = plan_layout(plan, int(counts.sum())) if plan.variable_length else full
        _check_room(region, start, layout.nwords)
    payload = Payload(here, layout, counts)
    check_payload(words, region, payload, plan, kernels)
    return payload


def check_payload(words: Tensor, region: Region, payload: Payload, plan: TensorPlan, kernels: Kernels) -> None:
    """Raise if something in a payload, whose place is known, cannot be."""
    error = kernels.find_error(words, payload, plan)
    if error:
        field, problem = _ERRORS[error]
        raise WireError(region.sender, field, f"{problem}. {ENCODED_WRONG}")


def _read_counts(words: Tensor, region: Region, start: int, plan: TensorPlan, kernels: Kernels) -> Tensor:
    counts = kernels.read_counts(words, plan, start)
    if counts is None:
        problem = f"a chunk of {plan.chunk_numel} is said to hold more entries than that."
        raise WireError(region.sender, "counts", f"{problem} {ENCODED_WRONG}")
    entries = int(counts.sum())
    _require(
        entries <= plan.k,
        region.sender,
        "counts",
        f"they add up to {entries} entries, but at most {plan.k} can be sent. {ENCODED_WRONG}",
    )
    return counts


def _check_room(region: Region, start: int, nwords: int) -> None:
    _require(
        start + nwords <= region.nwords,
        region.sender,
        "length",
        f"a payload of {nwords * WORD_NBYTES} bytes does not fit into what is left of it, "
        f"{max(0, region.nwords - start) * WORD_NBYTES}. {ENCODED_WRONG}",
    )


def _require(holds: bool, sender: str, field: str, problem: str) -> None:
    if not holds:
        raise WireError(sender, field, problem)
