"""Statistics: what synchronisations cost, one by one and in all."""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from flexcomm.ranges import shown_as

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Ledger", "Phase", "SyncRecord"]

Phase = Literal["encode", "intra", "inter", "decode", "waiting"]

_REMEMBERED = 256


@dataclass
class SyncRecord:
    """One synchronisation, or the sum of many.

    Bytes are what this rank's calls carry over its cables, by the algorithm's own count; ``dense_bytes`` is the length
    of what this rank works on: the tensors, shared among the ranks of its node. ``intra_s`` and ``inter_s`` reach from
    the start of a collective to the moment its result was taken, so they overlap with everything else; ``waiting_s``
    is the part of them for which the caller was blocked.
    """

    syncs: int = 0
    intra_collectives: int = 0
    inter_collectives: int = 0
    dense_bytes: int = 0
    intra_sent_bytes: int = 0
    intra_received_bytes: int = 0
    inter_sent_bytes: int = 0
    inter_received_bytes: int = 0
    payload_bytes: int = 0
    encode_s: float = 0.0
    intra_s: float = 0.0
    inter_s: float = 0.0
    decode_s: float = 0.0
    waiting_s: float = 0.0
    skipped: int = 0

    @property
    def compression(self) -> float:
        """How many times longer tensors are than what is sent of them."""
        return self.dense_bytes / self.payload_bytes if self.payload_bytes else 1.0

    def add(self, other: SyncRecord) -> None:
        """Add another record to this one."""
        for name in _FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @contextmanager
    def time(self, phase: Phase) -> Iterator[None]:
        """Add the seconds the block takes to a phase."""
        begin_s = time.perf_counter()
        try:
            with shown_as(phase):
                yield
        finally:
            self.add_seconds(phase, time.perf_counter() - begin_s)

    def add_seconds(self, phase: Phase, seconds: float) -> None:
        name = f"{phase}_s"
        setattr(self, name, getattr(self, name) + seconds)

    def count(self, level: Literal["intra", "inter"], sent_bytes: int, received_bytes: int) -> None:
        """Count a collective and what it moves."""
        for name, number in (("collectives", 1), ("sent_bytes", sent_bytes), ("received_bytes", received_bytes)):
            field_name = f"{level}_{name}"
            setattr(self, field_name, getattr(self, field_name) + number)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, for JSON."""
        return {name: getattr(self, name) for name in _FIELDS} | {"compression": self.compression}


_FIELDS = tuple(one.name for one in fields(SyncRecord))


@dataclass
class Ledger:
    """The sum of all synchronisations of a world, and the last ones one by one."""

    total: SyncRecord = field(default_factory=SyncRecord)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def enter(self, record: SyncRecord, **remarks: Any) -> None:
        """Add what a synchronisation came to; ``remarks`` are remembered with it, not added."""
        self.total.add(record)
        self.recent.append({**remarks, **record.as_dict()})
