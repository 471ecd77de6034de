"""Ranges that profilers show: torch's, and NVTX's on a machine with CUDA."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["profiler_range", "somebody_profiles"]


@lru_cache(maxsize=2)
def _may_be_profiled(torch_profiles: bool) -> bool:
    return torch_profiles or torch.cuda.is_available()


def somebody_profiles() -> bool:
    """Return whether a range would be shown: entering one that is not shown costs more than a small call does."""
    # Private, and nothing public tells: torch's own range costs 100 times as much as asking. If it is gone, record.
    return _may_be_profiled(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Return a block that torch's profiler, if it records, or else NVTX's tools show as ``flexcomm.name``."""
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
        return torch.profiler.record_function(f"flexcomm.{name}")
    return torch.cuda.nvtx.range(f"flexcomm.{name}")
