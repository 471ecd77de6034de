"""FlexDeMoAdamW: the exchange of FlexDeMo, and AdamW on what was received."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim import AdamW

from flexcomm import demo
from flexcomm.sync import BUCKET_BYTES
from flexdemo.wrapped import DistributedOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from flexcomm import Compressor, World
    from flexcomm.kernels import Average
    from flexcomm.sync import NonFinitePolicy
    from flexdemo.settings import OuterOptimizer, SyncTarget

__all__ = ["FlexDeMoAdamW"]


class FlexDeMoAdamW(DistributedOptimizer):
    """AdamW whose gradients are exchanged between nodes as far as ``compressor`` sends them.

    ``decay * residual + gradient`` is compressed and, averaged over nodes, taken for the gradient by torch's own AdamW;
    ``foreach`` and ``fused`` are its. With ``sync="steps"`` every node takes AdamW's step on its own gradients, and
    what it moved is compressed and averaged instead; with ``sync_every=n`` that of n steps, by ``outer`` if given:
    DiLoCo (arXiv 2311.08105).
    """

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
        sync: SyncTarget = "gradients",
        sync_every: int = 1,
        outer: OuterOptimizer | None = None,
        decay: float = 1.0,
        alpha: float = 1.0,
        average: Average = "nodes",
        overlap: bool = False,
        nonfinite: NonFinitePolicy = "raise",
        bucket_bytes: int = BUCKET_BYTES,
        node_averaged: bool | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        adamw = AdamW(params, lr, betas, eps, weight_decay, foreach=foreach, fused=fused)
        super().__init__(
            [adamw],
            compressor=demo() if compressor is None else compressor,
            world=world,
            sync=sync,
            sync_every=sync_every,
            outer=outer,
            decay=decay,
            alpha=alpha,
            average=average,
            overlap=overlap,
            nonfinite=nonfinite,
            bucket_bytes=bucket_bytes,
            node_averaged=node_averaged,
        )
