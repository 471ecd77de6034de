"""Ranges that profilers show: torch's, and the vendor's (NVTX) on a machine with an accelerator."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from flexcomm.device import accelerator

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["profiler_range"]


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
