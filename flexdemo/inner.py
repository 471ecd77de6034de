"""Inner optimizers: torch's own, stepping on parameters and gradients that another optimizer looks after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from flexcomm import InvalidArgumentError
from flexdemo.gradients import BucketResult
from flexdemo.parameters import local, wrapped_like


class Inner:
    """torch's optimizers inside ``owner``, whose parameter groups and state they use.

    ``counts`` are the numbers of groups that belong to each of them, in order.
    """

    def __init__(self, optimizers: Iterable[Optimizer], counts: Iterable[int]) -> None:
        self._optimizers, self._counts = list(optimizers), list(counts)
        if any(isinstance(one, LBFGS) for one in self._optimizers):
            raise InvalidArgumentError("LBFGS calls a closure several times a step, and cannot be exchanged.")

    def take_over_state(self, owner: Optimizer) -> None:
        """Give the owner the state of steps that the optimizers took before."""
        for optimizer in self._optimizers:
            for param, state in optimizer.state.items():
                owner.state[param] = state

    @torch.no_grad()
    def initial_states(self, owner: Optimizer) -> dict[Tensor, dict[str, Any]]:
        """Return initial states for parameters that have none, so that a checkpoint has all keys.

        They come from a step with zero gradients, after which parameters and states are restored.
        """
        params = [param for group in owner.param_groups for param in group["params"]]
        new = [param for param in params if not owner.state[param]]
        if not new:
            return {}
        kept = [(param, param.grad, local(param).clone(), owner.state[param]) for param in params]
        for param in params:
            param.grad = torch.zeros_like(param) if any(param is one for one in new) else None
        self._step(owner)
        found = {param: owner.state[param] for param in new}
        for param, gradient, value, state in kept:
            param.grad, owner.state[param] = gradient, state
            local(param).copy_(value)
        for state in found.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].zero_()
        return found

    def apply(self, owner: Optimizer, results: list[BucketResult]) -> None:
        """Take a step with the averages as gradients; afterwards ``.grad`` is what it was."""
        own = [(param, param.grad) for group in owner.param_groups for param in group["params"]]
        for param, _ in own:
            param.grad = None
        for bucket, averages in results:
            for param, average in zip(bucket.params, averages, strict=True):
                param.grad = wrapped_like(average, param)
        try:
            self._step(owner)
        finally:
            for param, gradient in own:
                param.grad = gradient

    def _step(self, owner: Optimizer) -> None:
        begin = 0
        for number, (optimizer, count) in enumerate(zip(self._optimizers, self._counts, strict=True)):
            # Groups that were added later belong to the last optimizer.
            end = len(owner.param_groups) if number == len(self._counts) - 1 else begin + count
            # Again each time: torch replaces both when a state is loaded.
            optimizer.param_groups, optimizer.state = owner.param_groups[begin:end], owner.state
            optimizer.step()
            begin = end
