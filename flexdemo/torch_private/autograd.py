"""Autograd: callbacks at the end of a backward pass, version counters, hooks of a parameter."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from flexcomm.torch_versions import private

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["has_post_accumulate_grad_hooks", "queue_callback", "version_of"]


def queue_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that is running ends without an error."""
    _find_queue_callback()(callback)


@cache
def _find_queue_callback() -> Callable[[Callable[[], None]], None]:
    # Public since torch 2.15.
    public: Callable[[Callable[[], None]], None] | None = getattr(torch.autograd.graph, "queue_callback", None)
    return public or private(Variable, "_execution_engine", "queue_callback")


def version_of(tensor: Tensor) -> int:
    """Return how often ``tensor`` was changed in place, as autograd counts it."""
    return int(private(tensor, "_version"))


def has_post_accumulate_grad_hooks(param: Tensor) -> bool:
    return bool(private(param, "_post_accumulate_grad_hooks"))
