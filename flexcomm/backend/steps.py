"""Which all-reduce of a step is which: torch gives them no names, but calls them in one order, step by step.

[Note: steps] A call is known by its number: within the backward pass that makes it, or, made outside of any, since the
last step of an optimizer. A pass of a checkpointed block, which runs backward inside of backward, belongs to the pass
around it; an optimizer that steps inside a pass ends nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple
from weakref import WeakSet

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from flexcomm.torch_private import NO_PASS, backward_pass, code_of_backward, queue_callback


class Call(NamedTuple):
    """A call's place in its step."""

    made: Literal["in backward", "outside"]
    number: int


class StepCounter:
    """Counts calls within a step, and steps. ``on_end`` is called after each step that made calls."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.step = 0
        self._on_end = on_end
        self._pass, self._in_backward, self._outside = NO_PASS, 0, 0
        self._has_passed = False  # a backward pass ended since the last step of an optimizer
        _counters.add(self)
        _hook_optimizers()

    def next_call(self) -> Call:
        """Return the place of the next call."""
        running = backward_pass()
        if running == NO_PASS:
            self._outside += 1
            return Call("outside", self._outside - 1)
        if running != self._pass and not _is_nested():
            if self._pass != NO_PASS:
                self._in_backward = 0  # That pass failed, and torch dropped its callbacks.
            self._pass = running
            queue_callback(self._end_pass)
        self._in_backward += 1
        return Call("in backward", self._in_backward - 1)

    def optimizer_stepped(self) -> None:
        """End what a step made outside of backward passes, or in passes of checkpointed blocks alone."""
        if self._in_backward:
            self._end_pass()
        if self._outside:
            self._outside = 0
            if not self._has_passed:
                self._end_step()
        self._has_passed = False

    def _end_pass(self) -> None:
        self._pass, self._in_backward, self._has_passed = NO_PASS, 0, True
        self._end_step()

    def _end_step(self) -> None:
        self.step += 1
        self._on_end()


_counters: WeakSet[StepCounter] = WeakSet()


@cache
def _hook_optimizers() -> None:
    """Hear of the steps of all optimizers; for good: a hook cannot be removed while optimizers go through them."""

    def stepped(optimizer: Optimizer, args: object, kwargs: object) -> None:
        del optimizer, args, kwargs
        if backward_pass() == NO_PASS:
            for counter in list(_counters):
                counter.optimizer_stepped()

    register_optimizer_step_post_hook(stepped)


def _is_nested() -> bool:
    """Return whether this backward pass was started by a function that another one runs."""
    run_backward, apply = code_of_backward()
    frame, has_pass = inspect.currentframe(), False
    while frame is not None:
        if frame.f_code is run_backward:
            has_pass = True
        elif has_pass and frame.f_code is apply:
            return True
        frame = frame.f_back
    return False
