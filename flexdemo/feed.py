"""The feed of an optimizer: gradients in, what all nodes agree on out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flexdemo.exchange import Exchange
from flexdemo.lots import plan_lots
from flexdemo.parameters import gradient_of
from flexdemo.readiness import Readiness

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from flexcomm import World
    from flexdemo.exchange import Received, Terms
    from flexdemo.lots import Lot
    from flexdemo.parameters import Group

__all__ = ["Feed"]


class Feed:
    """The exchange of the gradients of an optimizer's parameters.

    ``groups`` are the optimizer's own, looked at again for every step: parameters may be frozen or join late.
    ``terms`` says what is sent of a group's gradients.
    """

    def __init__(
        self,
        groups: list[Group],
        world: World,
        terms: Callable[[Group], Terms],
        options: dict[str, Any],
        *,
        bucket_bytes: int,
        remembers: bool = True,
        overlap: bool = False,
    ) -> None:
        self.exchange = Exchange(world, options, remembers=remembers)
        self.lots: list[Lot] = []
        self._groups, self._terms = groups, terms
        self._bucket_bytes, self._overlap = bucket_bytes, overlap
        self._trainable: list[Tensor] = []
        self._readiness = Readiness(self._launch)
        self._scale: Tensor | None = None

    def refresh(self) -> bool:
        """Plan lots anew if other parameters want gradients than before; return whether they do."""
        trainable = [param for group in self._groups for param in group["params"] if param.requires_grad]
        if len(trainable) == len(self._trainable) and all(map(_is_same, trainable, self._trainable)):
            return False
        # What is on its way is of the lots before.
        self.abandon()
        self._trainable = trainable
        self.exchange.forget_outputs()
        self.lots = plan_lots(self._groups, self._bucket_bytes, lambda param: param.requires_grad)
        self._readiness.watch(self.lots, early=self._overlap)
        return True

    def take(self, scale: Tensor | None = None, *, skips: bool = False) -> list[Received] | None:
        """Return the averages of all gradients, divided by ``scale``, as far as they were sent; None to skip a step.

        ``skips`` overrules what the options say of NaN and infinity: all ranks skip the step.
        """
        self._scale = scale
        asked = self.exchange.nonfinite
        self.exchange.nonfinite = "skip" if skips else asked
        try:
            self._readiness.check_unchanged()
            self._readiness.launch_rest()
        except BaseException:
            self.abandon()
            raise
        finally:
            self._readiness.reset()
            self.exchange.nonfinite = asked
        return self.exchange.finish()

    def abandon(self) -> None:
        """End what is under way as if it had not begun."""
        self.exchange.abandon()
        self._readiness.reset()

    def no_sync(self) -> AbstractContextManager[None]:
        """Send nothing during backward passes."""
        return self._readiness.paused()

    def terms_of(self, lot: Lot) -> Terms:
        return self._terms(self._groups[lot.group])

    def _launch(self, lot: Lot) -> None:
        gradients = [gradient_of(param) for param in lot.params]
        if self._scale is not None:
            gradients = list(torch._foreach_div(gradients, self._scale))
        step = self._groups[lot.group]["step"]
        self.exchange.start(lot, gradients, self.terms_of(lot), step)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other
