"""Shares: how loops are cut up among threads, and done."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["cut_up", "run"]

_SMALLEST_SHARE = 1 << 16
"""Elements below which a second thread costs more than it saves."""


def cut_up(count: int, work: int, threads: int | None, multiple: int = 1) -> list[tuple[int, int]]:
    """Cut ``range(count)`` into one part per thread, each a multiple long and worth a thread's while.

    ``work`` is the number of elements behind it; ``threads`` is torch's number unless given.
    """
    if work < 2 * _SMALLEST_SHARE:
        return [(0, count)]
    parts = min(torch.get_num_threads() if threads is None else threads, work // _SMALLEST_SHARE)
    length = max(1, -(-count // (max(1, parts) * multiple))) * multiple
    return [(first, min(first + length, count)) for first in range(0, count, length)]


def run(shares: list[tuple[int, int]], work: Callable[[int, int], Any]) -> list[Any]:
    """Do the shares, the first one here; the answers in order."""
    if len(shares) == 1:
        return [work(*shares[0])]
    others = [_pool(os.getpid()).submit(work, first, last) for first, last in shares[1:]]
    return [*(work(*share) for share in shares[:1]), *(other.result() for other in others)]


@lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:  # noqa: ARG001  (a forked child has the object but not its threads)
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="flexcomm-kernels")
