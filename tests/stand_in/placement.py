"""Puts on devices what laws make that were written for hosts. What the library makes stays where it puts it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import DeviceContext

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from flexcomm import World

_TORCH = str(Path(torch.__file__).parent)
_LAWS = tuple(str(Path(__file__).parents[2] / folder) + "/" for folder in ("tests", "bench"))


class MadeByLaws(DeviceContext):
    """As ``with device:``, for what is called from tests and benchmarks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__, "<")):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith(_LAWS):
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Placed:
    """A law that does not say where its tensors are: on the device of each rank."""

    law: Callable[[World], object]

    @property
    def __name__(self) -> str:
        return getattr(self.law, "__name__", str(self.law))

    def __call__(self, world: World) -> None:
        with MadeByLaws(world.device):
            self.law(world)
