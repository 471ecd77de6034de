"""Where things lie in a bucket's buffer: the header, and the sections of each tensor's payload.

Everything here is plain numbers. ``docs/wire.md`` is the specification of the format.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcomm.kernels.plan import SampleKey, TensorPlan, TensorSpec

VERSION = 2
MAGIC = b"FLXC"
WORD_NBYTES = 4
ALIGNMENT = 16
"""A buffer's bytes are a multiple of this, so that rows of gathered buffers stay aligned."""
NONFINITE = 1
"""The flag of a buffer without payloads: its sender had NaN, infinity or a value too large."""

_HEADER = struct.Struct("<4sHHQQQQQI12s")
_SPARE = bytes(12)
HEADER_NBYTES = _HEADER.size
HEADER_NWORDS = HEADER_NBYTES // WORD_NBYTES
PAYLOAD_NBYTES_AT = 40
"""The byte of a header at which the length of what follows it begins."""
CHECKSUM_WORD = 12
_WORD_BITS = 8 * WORD_NBYTES
_SCALE_BITS = 16
_MOST_PADDING = 64
"""The padding of a section is at most this part of a payload's bits."""


class Header(NamedTuple):
    """The fields of a header. ``entries`` is -1 where it depends on the data."""

    plan: int
    step: int
    sequence: int
    entries: int
    flags: int = 0
    payload_nbytes: int = 0
    checksum: int = 0
    magic: bytes = MAGIC
    version: int = VERSION
    spare: bytes = _SPARE

    @classmethod
    def unpack(cls, octets: bytes) -> Header:
        magic, version, flags, plan, step, sequence, entries, nbytes, checksum, spare = _HEADER.unpack(octets)
        return cls(plan, step, sequence, entries, flags, nbytes, checksum, magic, version, spare)

    def pack(self, payload_nbytes: int, checksum: int = 0) -> bytes:
        """Return the bytes of the header of a payload of such a length and checksum."""
        compared = (self.flags, self.plan, self.step, self.sequence, self.entries)
        return _HEADER.pack(self.magic, self.version, *compared, payload_nbytes, checksum, self.spare)

    def matching(self, received: Header) -> Header:
        """Return the header that a sound buffer has whose flags and number of entries are the received ones."""
        if received.flags == NONFINITE:
            return self._replace(entries=0, flags=NONFINITE)
        return self if self.entries >= 0 else self._replace(entries=received.entries)


def checksum_of(words: NDArray[np.int32]) -> int:
    """Return the checksum of a buffer: the sum, modulo 2**32, of all its other words, each hashed with its place.

    It adds up in any order, on any device.
    """
    hashed = words.astype(np.uint32) ^ (np.arange(words.size, dtype=np.uint32) * np.uint32(0x9E3779B9))
    hashed = (hashed ^ hashed >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    hashed = (hashed ^ hashed >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    hashed ^= hashed >> np.uint32(16)
    hashed[CHECKSUM_WORD : CHECKSUM_WORD + 1] = 0
    return int(hashed.sum(dtype=np.uint64)) % (1 << _WORD_BITS)


class IndexCode(IntEnum):
    """How the indices of a chunk are written."""

    NONE = 0
    """not at all: they follow from the plan and the step"""
    PACKED = 1
    ELIAS_FANO = 2
    BITMAP = 3


@dataclass(frozen=True)
class Layout:
    """Where the sections of a payload begin, in 32-bit words from its start, and how its indices are written.

    Counts, if any, come first. The indices of a chunk begin at bit ``before * entry_bits + chunk * chunk_bits`` of
    their section, where ``before`` is the number of entries in the chunks before it; its values begin at bit
    ``before * values.format.bits + chunk * value_padding`` of theirs. ``chunk_bits`` holds the padding of indices.
    """

    code: IndexCode
    low_bits: int
    entry_bits: int
    chunk_bits: int
    value_padding: int
    indices: int
    scales: int
    values: int
    nwords: int

    @property
    def coding(self) -> tuple[int, int, int, int, int]:
        """How entries are written, as plain numbers."""
        return int(self.code), self.low_bits, self.entry_bits, self.chunk_bits, self.value_padding


def plan_layout(plan: TensorPlan, entries: int, code: IndexCode | None = None) -> Layout:
    """Return where the sections of a payload with so many entries are; with the shortest index code, or a given one."""
    code, low_bits, entry_bits, chunk_bits = _choose_index_code(plan, entries, code)
    form, value_padding = plan.values.format, 0
    if not plan.variable_count:
        # Threads of a GPU that have a chunk each then write whole words, and share none.
        index_bits, value_bits = plan.k * entry_bits + chunk_bits, plan.k * form.bits
        most = (index_bits + form.scales * _SCALE_BITS + value_bits) // _MOST_PADDING
        chunk_bits += _padding(index_bits, most)
        value_padding = _padding(value_bits, most)
    indices = _words(plan.chunks * plan.chunk_numel.bit_length() if plan.variable_count else 0)
    scales = indices + _words(entries * entry_bits + plan.chunks * chunk_bits)
    values = scales + _words(plan.chunks * form.scales * _SCALE_BITS)
    nwords = values + _words(entries * form.bits + plan.chunks * value_padding)
    return Layout(code, low_bits, entry_bits, chunk_bits, value_padding, indices, scales, values, nwords)


def _padding(bits: int, most: int) -> int:
    """Return what so many bits lack of whole words; 0 if that is more than may be added."""
    lacking = -bits % _WORD_BITS
    return lacking if lacking <= most else 0


def _choose_index_code(plan: TensorPlan, entries: int, code: IndexCode | None) -> tuple[IndexCode, int, int, int]:
    """Return the shortest code for the indices; every one is as long for any indices, given how many there are."""
    length = plan.chunk_numel
    if not plan.sends_indices:
        return IndexCode.NONE, 0, 0, 0
    width = max(1, (length - 1).bit_length())
    codings = [
        (IndexCode.PACKED, 0, width, 0),
        *((IndexCode.ELIAS_FANO, low, low + 1, (length - 1) >> low) for low in range(width)),
        (IndexCode.BITMAP, 0, 0, length),
    ]
    allowed = (coding for coding in codings if code in (None, coding[0]))
    return min(allowed, key=lambda coding: entries * coding[2] + plan.chunks * coding[3])


def _words(bits: int) -> int:
    return -(-bits // _WORD_BITS)


def aligned(nwords: int) -> int:
    """Return the length of a buffer that holds so many words."""
    step = ALIGNMENT // WORD_NBYTES
    return -(-nwords // step) * step


@dataclass(frozen=True)
class BufferPlan:
    """A bucket's buffer, as it follows from names, shapes, dtypes and compressor.

    ``nbytes`` is the length of every buffer or, of a plan of variable length, the greatest; ``layouts`` are those of
    payloads that are as long as they may get. Ranks with different plans have different digests.
    """

    specs: tuple[TensorSpec, ...]
    plans: tuple[TensorPlan, ...]
    layouts: tuple[Layout, ...]
    nbytes: int
    digest: int

    @classmethod
    def of(cls, specs: tuple[TensorSpec, ...], plans: tuple[TensorPlan, ...], digest: int) -> BufferPlan:
        """Return how tensors with these plans share a buffer."""
        layouts = tuple(plan_layout(plan, plan.entries) for plan in plans)
        nwords = HEADER_NWORDS + sum(layout.nwords for layout in layouts)
        return cls(specs, plans, layouts, aligned(nwords) * WORD_NBYTES, digest)

    @cached_property
    def variable_length(self) -> bool:
        """Whether buffers are as long as what they hold, so that lengths must be exchanged."""
        return any(plan.variable_length for plan in self.plans)

    @cached_property
    def nwords(self) -> int:
        """The same length in words."""
        return self.nbytes // WORD_NBYTES

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Where each payload begins, in words, in a buffer that is as long as it may get."""
        ends = accumulate((layout.nwords for layout in self.layouts), initial=HEADER_NWORDS)
        return tuple(ends)[:-1]

    @cached_property
    def variable_count(self) -> bool:
        """Whether the number of entries depends on the data."""
        return any(plan.variable_count for plan in self.plans)

    @cached_property
    def entries(self) -> int:
        """Entries in a buffer; -1 if it depends on the data."""
        return -1 if self.variable_count else sum(plan.entries for plan in self.plans)

    def header(self, step: int, sequence: int) -> Header:
        """Return the header of a buffer that holds payloads."""
        return Header(self.digest, step, sequence, self.entries)

    def sample_keys(self, step: int) -> list[SampleKey]:
        """Return each tensor's key of a step; those of the last one are kept."""
        keys = self._keys.get(step)
        if keys is None:
            keys = [plan.sample_key(step, spec.name) for plan, spec in zip(self.plans, self.specs, strict=True)]
            self._keys.clear()
            self._keys[step] = keys
        return keys

    @cached_property
    def _keys(self) -> dict[int, list[SampleKey]]:
        return {}

    @cached_property
    def drawn(self) -> dict[int, tuple[int, NDArray[np.int32]]]:
        """What encoders drew of shared selections, by the first tensor of those drawn together: the step, and indices.

        Decoders of the same step need not draw again. What is in here is never changed, but replaced.
        """
        return {}

    @cached_property
    def has_keys(self) -> bool:
        """Whether a selection depends on the step."""
        return any(plan.selection.rule.sample_key is not None for plan in self.plans)


class Region(NamedTuple):
    """One sender's buffer inside a tensor of words that holds those of many: where it begins and how long it is."""

    sender: str
    start: int
    nwords: int

    @property
    def end(self) -> int:
        return self.start + self.nwords
