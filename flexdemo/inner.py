"""Inner optimizers: torch's own, stepping on parameters and gradients that another optimizer looks after."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexdemo.parameters import wrapped_like

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim import Optimizer

    from flexdemo.exchange import Received

__all__ = ["Inner"]


class Inner:
    """Optimizers that share the groups and the state of the one around them, ``outer``.

    ``counts`` says how many of its groups, in order, are each one's.
    """

    def __init__(self, optimizers: Iterable[Optimizer], counts: Iterable[int]) -> None:
        self._optimizers, self._counts = list(optimizers), list(counts)

    @torch.no_grad()
    def begin(self, outer: Optimizer) -> None:
        """Make the state of a first step, all zero: torch's checkpoints take it for granted."""
        params = [param for group in outer.param_groups for param in group["params"]]
        gradients, rates = [param.grad for param in params], [group["lr"] for group in outer.param_groups]
        for param in params:
            param.grad = torch.zeros_like(param)
        for group in outer.param_groups:
            group["lr"] = 0.0
        self._step(outer)
        for group, rate in zip(outer.param_groups, rates, strict=True):
            group["lr"] = rate
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
            for value in outer.state[param].values():
                if isinstance(value, Tensor):
                    value.zero_()

    def apply(self, outer: Optimizer, received: list[Received]) -> None:
        """Take a step on what was received; gradients are what they were afterwards."""
        own = [(param, param.grad) for group in outer.param_groups for param in group["params"]]
        for param, _ in own:
            param.grad = None
        for lot, averages in received:
            for param, average in zip(lot.params, averages, strict=True):
                param.grad = wrapped_like(average, param)
        try:
            self._step(outer)
        finally:
            for param, gradient in own:
                param.grad = gradient

    def _step(self, outer: Optimizer) -> None:
        begin = 0
        for number, (optimizer, count) in enumerate(zip(self._optimizers, self._counts, strict=True)):
            # What is added later belongs to the last one.
            end = len(outer.param_groups) if number == len(self._counts) - 1 else begin + count
            # Again each time: torch replaces both when a state is loaded.
            optimizer.param_groups, optimizer.state = outer.param_groups[begin:end], outer.state
            optimizer.step()
            begin = end
