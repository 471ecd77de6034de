"""Ranges: what is done when, for profilers that are looking."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["profiler_range"]


def profiler_range(name: str) -> AbstractContextManager[object] | None:
    """Return a block that torch's profiler and, on a machine with CUDA, NVTX's tools show as ``flexcomm.name``.

    None where nobody looks: entering and leaving a block that does nothing is not free.
    """
    # Private, and nothing public tells: torch's own range costs 100 times as much as asking. If it is gone, record.
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
        return torch.profiler.record_function(f"flexcomm.{name}")
    if _cuda_is_there():
        return torch.cuda.nvtx.range(f"flexcomm.{name}")
    return None


@lru_cache(maxsize=1)
def _cuda_is_there() -> bool:
    return torch.cuda.is_available()
