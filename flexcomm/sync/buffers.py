"""The buffer pool: memory of buckets, used again by later calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

MOST_SPARE = 8
"""Buffers that a pool keeps for calls under way at once; a burst of more calls frees its own."""

T = TypeVar("T")


class Buffers:
    """The memory one call uses for one bucket: tensors, views of them, encoders and decoders on them.

    All of it follows from the plan and the world, so it is made on first use and never changes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[str, object] = {}

    def get(self, name: str, make: Callable[[], T]) -> T:
        """Return what was made under that name, making it on first use."""
        if name not in self._made:
            # Not as inference tensors, which no later call could write.
            with torch.inference_mode(False):
                self._made[name] = make()
        made: Any = self._made[name]  # a name stands for one type
        return made  # type: ignore[no-any-return]

    def allocate(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return an uninitialised tensor on the pool's device."""
        return torch.empty(shape, dtype=dtype, device=self._device)


class BufferPool:
    """Buffers of one bucket that no call uses at the moment."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.spare: list[Buffers] = []

    def take(self) -> Buffers:
        return self.spare.pop() if self.spare else Buffers(self._device)

    def give_back(self, buffers: Buffers) -> None:
        if len(self.spare) < MOST_SPARE:
            self.spare.append(buffers)
