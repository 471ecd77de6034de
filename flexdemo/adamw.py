"""FlexDeMoAdamW: the exchange of FlexDeMo, and AdamW on what was received."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.optim import AdamW

from flexcomm import demo, dense
from flexcomm.sync import BUCKET_BYTES
from flexdemo.exchange import Terms
from flexdemo.inner import Inner
from flexdemo.training import NodeOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from flexcomm import Compressor, World
    from flexcomm.kernels import Average
    from flexcomm.routes import NonFinitePolicy
    from flexdemo.exchange import Received
    from flexdemo.parameters import Group
    from flexdemo.settings import Outer, Sent

__all__ = ["FlexDeMoAdamW"]


class FlexDeMoAdamW(NodeOptimizer):
    """AdamW whose gradients are exchanged between nodes as far as ``compressor`` sends them.

    ``decay * residual + gradient`` is compressed and, averaged over nodes, taken for the gradient by torch's own AdamW;
    ``foreach`` and ``fused`` are its. With ``exchange="steps"`` every node takes AdamW's step on its own gradients, and
    what it moved is compressed and averaged instead; with ``exchange_every=n`` that of n steps, by ``outer`` if given:
    DiLoCo (arXiv 2311.08105).
    """

    _remembers_alone = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        compressor: Compressor | None = None,
        world: World | None = None,
        decay: float = 1.0,
        alpha: float = 1.0,
        average: Average = "nodes",
        exchange_every: int = 1,
        exchange: Sent = "gradients",
        outer: Outer | None = None,
        overlap: bool = False,
        nonfinite: NonFinitePolicy = "raise",
        bucket_bytes: int = BUCKET_BYTES,
        node_averaged: bool | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        # Of a parameter of its own: torch's AdamW checks its settings here, and gives the defaults of its groups.
        adamw = AdamW(
            [torch.zeros(1, requires_grad=True)],
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            foreach=foreach,
            fused=fused,
        )
        self._inner = Inner([adamw], [1])
        own = {"decay": decay, "alpha": alpha, "compressor": compressor or demo(), "node_averaged": node_averaged}
        super().__init__(
            params,
            {**adamw.defaults, **own},
            world,
            average=average,
            nonfinite=nonfinite,
            bucket_bytes=bucket_bytes,
            exchange_every=exchange_every,
            exchange=exchange,
            outer=outer,
            overlap=overlap,
        )
        self._inner.begin(self)

    def _terms(self, group: Group) -> Terms:
        return Terms(group["compressor"], group["decay"], 1.0, group["alpha"])

    def _alone_terms(self, group: Group) -> Terms:
        del group
        return Terms(dense())

    def _apply(self, received: list[Received]) -> None:
        self._inner.apply(self, received)
