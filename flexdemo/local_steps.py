"""Local steps: nodes go on alone for some steps, then meet where they are on average."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flexdemo.exchange import Exchange, Terms
from flexdemo.lots import plan_lots
from flexdemo.parameters import local

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from flexcomm import World
    from flexdemo.exchange import Received
    from flexdemo.lots import Lot
    from flexdemo.parameters import Group
    from flexdemo.settings import OuterOptimizer

__all__ = ["LocalSteps"]


class LocalSteps:
    """Where all nodes were together last (``anchors``), and how they meet again.

    The difference each node went since is compressed, what is not sent of it waits for the next time, and all nodes
    stand at the anchor plus the average of what was sent: with the same bits.
    """

    def __init__(
        self,
        groups: list[Group],
        world: World,
        every: int,
        outer: OuterOptimizer | None,
        options: dict[str, Any],
        bucket_bytes: int,
    ) -> None:
        self.every = every
        self.exchange = Exchange(world, {**options, "average": "nodes"}, remembers=True)
        self.anchors: dict[Parameter, Tensor] = {}
        self.velocities: dict[Parameter, Tensor] = {}
        self._groups, self._outer, self._bucket_bytes = groups, outer, bucket_bytes

    def refresh(self) -> None:
        """Take in parameters that were not trained before: they are alike on all nodes."""
        for group in self._groups:
            for param in group["params"]:
                if param.requires_grad and param not in self.anchors:
                    self.anchors[param] = local(param).clone(memory_format=torch.contiguous_format)
                    if self._outer is not None:
                        self.velocities[param] = torch.zeros_like(self.anchors[param])
        self.exchange.forget_outputs()
        # Also what is frozen by now: nodes may have gone apart on it before.
        self.lots = plan_lots(self._groups, self._bucket_bytes, self.anchors.__contains__)

    def meet_if_due(self, step: int) -> None:
        """Bring all nodes together if this was the last of their local steps."""
        if step % self.every:
            return
        for lot in self.lots:
            gone = torch._foreach_sub([self.anchors[param] for param in lot.params], [local(p) for p in lot.params])
            self.exchange.start(lot, list(gone), self.terms_of(lot), step // self.every)
        received = self.exchange.finish()
        for one in received or []:
            self._move(one)

    def terms_of(self, lot: Lot) -> Terms:
        return Terms(self._groups[lot.group]["compressor"])

    def _move(self, received: Received) -> None:
        params = received.lot.params
        anchors, averages = [self.anchors[param] for param in params], received.averages
        if self._outer is None:
            torch._foreach_sub_(anchors, averages)
        else:
            torch._foreach_sub_(anchors, self._steps(params, averages, self._outer), alpha=self._outer.lr)
        torch._foreach_copy_([local(param) for param in params], anchors)

    def _steps(self, params: tuple[Parameter, ...], averages: list[Tensor], outer: OuterOptimizer) -> list[Tensor]:
        velocities = [self.velocities[param] for param in params]
        torch._foreach_mul_(velocities, outer.momentum)
        torch._foreach_add_(velocities, averages)
        if not outer.nesterov:
            return velocities
        return list(torch._foreach_add(averages, velocities, alpha=outer.momentum))
