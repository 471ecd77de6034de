"""The learning rate of every method of ``bench train`` alike: a linear warm-up, then a cosine."""

import math
from collections.abc import Callable

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
