"""Statistics of synchronisations, one by one and in total, and the ranges that profilers show of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, Literal

import torch

from flexcomm.device import accelerator

Phase = Literal["encode", "intra", "inter", "decode", "waiting"]

_REMEMBERED = 256


@dataclass
class SyncRecord:
    """One synchronisation, or the sum of many.

    Bytes are what this rank's calls send and receive, by the algorithm's own count; ``dense_bytes`` is the length of
    what this rank works on: the tensors, shared among the ranks of its node. ``intra_s`` and ``inter_s`` reach from
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

    def add(self, other: SyncRecord) -> None:
        """Add another record to this one."""
        mine = vars(self)
        for name, number in vars(other).items():
            mine[name] += number

    def add_seconds(self, phase: Phase, seconds: float) -> None:
        vars(self)[f"{phase}_s"] += seconds

    def count(self, level: Literal["intra", "inter"], sent_bytes: int, received_bytes: int) -> None:
        """Count a collective and what it moves."""
        numbers = vars(self)
        numbers[f"{level}_collectives"] += 1
        numbers[f"{level}_sent_bytes"] += sent_bytes
        numbers[f"{level}_received_bytes"] += received_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, for JSON, and how much longer tensors are than their payloads."""
        ratio = self.dense_bytes / self.payload_bytes if self.payload_bytes else 1.0
        return {**vars(self), "compression": ratio}


class Timed:
    """A block whose seconds are added to a phase of a record, and which profilers show.

    Not a generator: those cost more than what a small call does.
    """

    def __init__(self, record: SyncRecord, phase: Phase) -> None:
        self._record, self._phase = record, phase
        is_watched = _vendor_range() is not None or getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
        self._range = profiler_range(phase) if is_watched else None

    def __enter__(self) -> None:
        if self._range is not None:
            self._range.__enter__()
        self._begin_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        vars(self._record)[f"{self._phase}_s"] += time.perf_counter() - self._begin_s
        if self._range is not None:
            self._range.__exit__(kind, error, trace)


@dataclass
class StatsHistory:
    """The sum of all synchronisations of a world, and the last ones one by one."""

    total: SyncRecord = field(default_factory=SyncRecord)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def add(self, record: SyncRecord, **remarks: Any) -> None:
        """Add a synchronisation; ``remarks`` are remembered with it, not added."""
        self.total.add(record)
        self.recent.append({**remarks, **record.as_dict()})


def profiler_range(name: str) -> AbstractContextManager[object] | None:
    """Return a block that torch's profiler or, with a GPU, its vendor's tools show as ``flexcomm.name``.

    None where nobody looks: entering and leaving a block that does nothing is not free.
    """
    # Private, and nothing public tells: torch's own range costs 100 times as much as asking. If it is gone, record.
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
        return torch.profiler.record_function(f"flexcomm.{name}")
    vendor_range = _vendor_range()
    return None if vendor_range is None else vendor_range(f"flexcomm.{name}")


@lru_cache(maxsize=1)
def _vendor_range() -> Callable[[str], AbstractContextManager[object]] | None:
    kind = accelerator()
    return None if kind is None else kind.profiler_range
