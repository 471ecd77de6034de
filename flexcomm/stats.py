"""What a synchronisation costs, and the ranges that profilers show of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from flexcomm.device import accelerator

Phase = Literal["encode", "intra", "inter", "decode", "waiting"]


@dataclass
class SyncRecord:
    """One synchronisation, or the sum of many.

    Bytes are what this rank sends and receives, by the algorithm's own count; ``dense_bytes`` is the length of what it
    works on: the tensors, shared among the ranks of its node. ``intra_s`` and ``inter_s`` reach from the start of a
    collective to the moment its result was taken; ``waiting_s`` is the part for which the caller was blocked.
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
        mine = vars(self)
        for name, number in vars(other).items():
            mine[name] += number

    def add_seconds(self, phase: Phase, seconds: float) -> None:
        vars(self)[f"{phase}_s"] += seconds

    def count(self, level: Literal["intra", "inter"], sent_bytes: int, received_bytes: int) -> None:
        numbers = vars(self)
        numbers[f"{level}_collectives"] += 1
        numbers[f"{level}_sent_bytes"] += sent_bytes
        numbers[f"{level}_received_bytes"] += received_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, for JSON, and how much longer tensors are than their payloads."""
        ratio = self.dense_bytes / self.payload_bytes if self.payload_bytes else 1.0
        return {**vars(self), "compression": ratio}


class Timed:
    """A block whose seconds are added to a phase of a record, and which profilers show as ``flexcomm.phase``.

    Not a generator, which would cost more than a small call; and no range unless a profiler may look at it.
    """

    def __init__(self, record: SyncRecord, phase: Phase) -> None:
        self._record, self._phase = record, phase
        self._range: AbstractContextManager[object] | None = None
        # Private, and nothing public tells: torch's own range costs 100 times as much as asking. If it is gone, record.
        if getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
            self._range = torch.profiler.record_function(f"flexcomm.{phase}")
        elif (vendor_range := _vendor_range()) is not None:
            self._range = vendor_range(f"flexcomm.{phase}")

    def __enter__(self) -> None:
        if self._range is not None:
            self._range.__enter__()
        self._begin_s = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        vars(self._record)[f"{self._phase}_s"] += time.perf_counter() - self._begin_s
        if self._range is not None:
            self._range.__exit__(*error)


@cache
def _vendor_range() -> Callable[[str], AbstractContextManager[object]] | None:
    kind = accelerator()
    return None if kind is None else kind.profiler_range
