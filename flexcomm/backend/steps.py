"""Which all-reduce of a step is which: torch gives them no names, but calls them in one order, step by step.

[Note: steps] A call is known by its number within a step. A step ends with the backward pass in which it made calls, or
with an optimizer's step. Not with the pass of a checkpointed block, which runs backward inside of backward: such calls
belong to the pass around them. Nor with an optimizer that steps inside a backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from weakref import WeakMethod

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from flexcomm.torch_private import NO_PASS, backward_pass, code_of_backward, queue_callback


class StepCounter:
    """Counts calls within a step, and steps. ``on_end`` is called after each step that made calls."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.step = 0
        self._calls, self._pass, self._on_end = 0, NO_PASS, on_end
        end = WeakMethod(self._end_outside)

        def ended(optimizer: Optimizer, args: object, kwargs: object) -> None:
            del optimizer, args, kwargs
            if (method := end()) is None:
                hook.remove()
            else:
                method()

        hook = register_optimizer_step_post_hook(ended)

    def next_call(self) -> int:
        """Return the number of the next call in its step."""
        running = backward_pass()
        if running not in (NO_PASS, self._pass) and not _is_nested():
            if self._pass != NO_PASS:
                self._calls = 0  # That pass failed, and torch dropped its callbacks.
            self._pass = running
            queue_callback(self._end)
        self._calls += 1
        return self._calls - 1

    def _end_outside(self) -> None:
        if backward_pass() == NO_PASS:
            self._end()

    def _end(self) -> None:
        self._pass = NO_PASS
        if self._calls:
            self._calls = 0
            self.step += 1
            self._on_end()


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
