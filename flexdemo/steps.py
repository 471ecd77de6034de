"""StepExchange: any of torch's optimizers on every node; what they moved is compressed and averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexcomm import dense
from flexcomm.sync import BUCKET_BYTES
from flexdemo.exchange import Terms
from flexdemo.inner import Inner
from flexdemo.training import NodeOptimizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from flexcomm import Compressor, World
    from flexcomm.routes import NonFinitePolicy
    from flexdemo.exchange import Received
    from flexdemo.parameters import Group
    from flexdemo.settings import Outer

__all__ = ["StepExchange"]


class StepExchange(NodeOptimizer):
    """Every node steps on its own gradients by ``optimizers``, then nodes meet where they are on average.

    After ``exchange_every`` steps the way each node went is compressed, what is not sent of it waits for the next time,
    and ``outer``, if given, moves all of them by the average. Replicas hold the same bits then. Groups and learning
    rates are those of ``optimizers``, in order; hand this one to schedulers. Groups may have a ``compressor`` each.
    """

    _remembers_alone = False

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        compressor: Compressor,
        world: World | None = None,
        exchange_every: int = 1,
        outer: Outer | None = None,
        overlap: bool = False,
        nonfinite: NonFinitePolicy = "raise",
        bucket_bytes: int = BUCKET_BYTES,
        node_averaged: bool | None = None,
    ) -> None:
        self._inner = Inner(optimizers, [len(one.param_groups) for one in optimizers])
        super().__init__(
            [group for one in optimizers for group in one.param_groups],
            {"compressor": compressor, "node_averaged": node_averaged},
            world,
            average="nodes",
            nonfinite=nonfinite,
            bucket_bytes=bucket_bytes,
            exchange_every=exchange_every,
            exchange="steps",
            outer=outer,
            overlap=overlap,
        )
        self._inner.begin(self)

    def _terms(self, group: Group) -> Terms:
        return Terms(group["compressor"])

    def _alone_terms(self, group: Group) -> Terms:
        del group
        return Terms(dense())

    def _apply(self, received: list[Received]) -> None:
        self._inner.apply(self, received)
