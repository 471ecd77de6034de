"""Puts on a device what laws make without saying where. What the library makes stays where it puts it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import DeviceContext

if TYPE_CHECKING:
    from types import FrameType

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
