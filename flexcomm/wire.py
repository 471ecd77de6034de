"""The bytes of a bucket: a fixed header, then each tensor's sections. ``docs/wire.md`` is the format's specification.

A sender calls ``seal_``, a receiver ``open_envelope`` and ``find_payload``, which believe nothing: what is expected
follows from the receiver's own plan, and no size is ever taken from the wire. This file knows neither ranks nor
mathematics.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from flexcomm.errors import WireError
from flexcomm.kernels import Fault, IndexCode, Kernels, Layout, Payload, Selection, TensorPlan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ALIGNMENT",
    "HEADER_NBYTES",
    "VERSION",
    "Envelope",
    "Region",
    "find_payload",
    "open_envelope",
    "plan_layout",
    "seal_",
    "to_words",
]

VERSION = 1
_MAGIC = b"FLXC"
_HEADER = struct.Struct("<4sHHQQQQQI12x")
HEADER_NBYTES = _HEADER.size
ALIGNMENT = 16
"""A buffer's bytes are a multiple of this, so that rows of gathered buffers stay aligned."""

_WORD_NBYTES = 4
_WORD_BITS = 32
_SCALE_BITS = 16
_CHECKSUM_WORD = 12
_FAULTS = {
    Fault.INDEX: ("indices", "they leave the chunk, repeat, do not increase, or are not as many as announced"),
    Fault.SCALE: ("scales", "one is negative or not finite"),
    Fault.VALUE: ("values", "one is not finite"),
}


@dataclass(frozen=True)
class Envelope:
    """What sender and receiver must agree on, or know, about a buffer: its header without the checksum."""

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


def plan_layout(plan: TensorPlan, entries: int) -> Layout:
    """Return where the sections of a payload with so many entries are. Moves no data."""
    code, low_bits, entry_bits, chunk_bits = _choose_index_code(plan, entries)
    counts_bits = plan.chunks * plan.chunk_numel.bit_length() if plan.is_variable else 0
    indices = _words(counts_bits)
    scales = indices + _words(entries * entry_bits + plan.chunks * chunk_bits)
    values = scales + _words(plan.chunks * plan.values.scales * _SCALE_BITS)
    nwords = values + _words(entries * plan.values.bits)
    return Layout(code, low_bits, entry_bits, chunk_bits, 0, indices, scales, values, nwords)


class _IndexCoding(NamedTuple):
    code: IndexCode
    low_bits: int
    entry_bits: int
    chunk_bits: int


def _choose_index_code(plan: TensorPlan, entries: int) -> _IndexCoding:
    """Return the shortest code for the indices; every one is as long for any indices, given how many there are."""
    length = plan.chunk_numel
    sent = plan.selection in (Selection.LARGEST, Selection.ABOVE)
    if not sent or (plan.keep == length and not plan.is_variable):
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
    """Return a uint8 buffer as the int32 words kernels work on; the same memory."""
    return buffer.view(torch.int32)


def seal_(words: Tensor, envelope: Envelope, kernels: Kernels) -> None:
    """Write the header of a buffer whose sections are in place."""
    payload_nbytes = words.numel() * _WORD_NBYTES - HEADER_NBYTES
    words[:_HEADER_NWORDS] = _header_words(envelope, payload_nbytes, 0).to(words.device)
    checksum = _checksum(words, kernels)
    words[:_HEADER_NWORDS] = _header_words(envelope, payload_nbytes, checksum).to(words.device)


_HEADER_NWORDS = HEADER_NBYTES // _WORD_NBYTES


def _header_words(envelope: Envelope, payload_nbytes: int, checksum: int) -> Tensor:
    header = _HEADER.pack(
        _MAGIC,
        VERSION,
        envelope.flags,
        envelope.plan,
        envelope.step,
        envelope.sequence,
        envelope.count,
        payload_nbytes,
        checksum,
    )
    return torch.frombuffer(bytearray(header), dtype=torch.int32)


def _checksum(words: Tensor, kernels: Kernels) -> int:
    """Return the checksum of everything but itself."""
    after = _CHECKSUM_WORD + 1
    return (kernels.checksum(words[:_CHECKSUM_WORD], 0) + kernels.checksum(words[after:], after)) % (1 << 32)


def open_envelope(words: Tensor, region: Region, expected: Envelope, kernels: Kernels) -> int:
    """Check a buffer's header and checksum; return the number of entries it announces, which is still to be proven.

    ``expected.count`` is the number of entries of a plan that fixes it, else -1.
    """
    sender = region.sender
    if region.nwords < _HEADER_NWORDS:
        raise WireError(sender, "length", f"{region.nwords * _WORD_NBYTES} bytes hold no header of {HEADER_NBYTES}.")
    buffer = words[region.start : region.start + region.nwords]
    raw = buffer[:_HEADER_NWORDS].cpu().numpy().tobytes()
    magic, version, flags, plan, step, sequence, count, payload_nbytes, checksum = _HEADER.unpack(raw)
    if magic != _MAGIC:
        raise WireError(sender, "magic", f"it begins with {magic!r}, not {_MAGIC!r}: this is no buffer of ours.")
    if version != VERSION:
        raise WireError(sender, "version", f"it is {version}, ours is {VERSION}: install one release on every rank.")
    received_nbytes = region.nwords * _WORD_NBYTES - HEADER_NBYTES
    if payload_nbytes != received_nbytes:
        raise WireError(sender, "payload bytes", f"it announces {payload_nbytes}, but {received_nbytes} are here.")
    actual = _checksum(buffer, kernels)
    if checksum != actual or any(raw[_HEADER.size - 12 :]):
        raise WireError(
            sender,
            "checksum",
            f"it is {checksum:08x}, but the bytes give {actual:08x}: they were damaged on the way. If that "
            f"happens again, look at that node's memory and link.",
        )
    _check_agreement(sender, Envelope(plan, step, sequence, count, flags), expected)
    return int(count)


def _check_agreement(sender: str, got: Envelope, expected: Envelope) -> None:
    if got.plan != expected.plan:
        raise WireError(
            sender,
            "plan hash",
            f"it is {got.plan:016x}, ours is {expected.plan:016x}: its tensors, their names or order, or its "
            f"compressor differ from ours.",
        )
    if got.step != expected.step:
        raise WireError(sender, "step", f"it is {got.step}, ours is {expected.step}: a rank skipped or repeated one.")
    if got.sequence != expected.sequence:
        raise WireError(
            sender, "sequence", f"it is {got.sequence}, ours is {expected.sequence}: calls are not in the same order."
        )
    if got.flags != expected.flags:
        raise WireError(sender, "flags", f"they are {got.flags:#06x}, expected were {expected.flags:#06x}.")
    if expected.count not in (-1, got.count):
        raise WireError(sender, "count", f"it announces {got.count} entries, the plan has {expected.count}.")


def find_payload(words: Tensor, region: Region, start: int, plan: TensorPlan, kernels: Kernels) -> Payload:
    """Return where a tensor's payload is, once everything in it has been checked. ``start`` counts from the region."""
    sender, here = region.sender, region.start + start
    smallest = plan_layout(plan, 0 if plan.exact else plan.entries)
    _check_room(region, start, smallest.nwords)
    counts, layout = None, smallest
    if plan.is_variable:
        counts = kernels.read_counts(words, plan, here)
        if counts is None:
            raise WireError(sender, "counts", f"a chunk of {plan.chunk_numel} is said to hold more entries than that.")
        entries = int(counts.sum())
        if entries > plan.keep:
            raise WireError(sender, "counts", f"they add up to {entries} entries, but at most {plan.keep} can be sent.")
        layout = plan_layout(plan, entries if plan.exact else plan.entries)
        _check_room(region, start, layout.nwords)
    payload = Payload(here, layout, counts)
    fault = kernels.find_fault(words, payload, plan)
    if fault:
        raise WireError(sender, *_FAULTS[fault])
    return payload


def _check_room(region: Region, start: int, nwords: int) -> None:
    if start + nwords > region.nwords:
        raise WireError(
            region.sender,
            "length",
            f"a payload of {nwords * _WORD_NBYTES} bytes does not fit into what is left of it, "
            f"{max(0, region.nwords - start) * _WORD_NBYTES}.",
        )
