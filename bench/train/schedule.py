"""The learning rate of every method of ``bench train`` alike: a linear warm-up, then a cosine."""

import math
from collections.abc import Callable
from dataclasses import dataclass

_WARM_UP = 0.2
_LAST = 0.1


def warm_up_then_cosine(steps: int) -> Callable[[int], float]:
    """Return the factor for each step: rising to 1 in a fifth of them, then falling to a tenth at the last."""
    warm = max(1, round(_WARM_UP * steps))

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm + 1) / max(1, steps - warm))
        return _LAST + (1 - _LAST) * (1 + math.cos(math.pi * done)) / 2

    return factor


@dataclass
class Forecast:
    """When the steps of a run that lasts ``seconds`` end, reckoned alike on all ranks from what they agreed on.

    After ``step`` steps, ``train_s`` had passed, of which the last ones took ``step_s`` each.
    """

    seconds: float
    step_s: float
    step: int = 0
    train_s: float = 0.0

    def update(self, step: int, train_s: float) -> None:
        """Take note that ``step`` steps took ``train_s``."""
        self.step_s = (train_s - self.train_s) / (step - self.step)
        self.step, self.train_s = step, train_s

    def steps_left(self, within_s: float) -> float:
        """Return how many steps fit into the next ``within_s``, and into the run."""
        return min(within_s, self.seconds - self.train_s) / self.step_s

    def warm_up_then_cosine(self, step: int) -> float:
        """Return the factor of a step by the share of the run that is over when it ends."""
        done = (self.train_s + (step + 1 - self.step) * self.step_s) / self.seconds
        return _BY_SHARE(max(0, math.ceil(_FINE * done) - 1))


_FINE = 10_000
_BY_SHARE = warm_up_then_cosine(_FINE)
