"""DecentralizedAdam: Adam on every replica, which mixes its parameters with those of a few other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim import Adam, AdamW

from flexcomm.sync import BUCKET_BYTES
from flexdemo.accumulated import AccumAdam
from flexdemo.decentralized.optimizer import DecentralizedOptimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.optimizer import ParamsT

    from flexcomm import Compressor, World
    from flexcomm.gossip import ScheduleLike
    from flexdemo.decentralized.choices import Order, Overlap
    from flexdemo.decentralized.consensus import ConsensusControl

__all__ = ["DecentralizedAdam"]


class DecentralizedAdam(DecentralizedOptimizer):
    """Decentralized Adam (arXiv 2410.11998): ``x <- W x - lr * Adam(gradient at the unmixed x)``, moments local.

    ``accumulate`` above 1 lets the moments move once in so many steps, by the mean gradient of those: small local
    batches then count like larger ones. Weight decay is AdamW's or, with ``decoupled=False``, added to the gradient.
    All else is as for :class:`DecentralizedOptimizer`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        schedule: ScheduleLike | None = None,
        world: World | None = None,
        accumulate: int = 1,
        decoupled: bool = True,
        order: Order = "mix-then-step",
        overlap: Overlap = "step",
        gamma: float | None = None,
        compressor: Compressor | None = None,
        max_norm: float | None = None,
        control: ConsensusControl | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        adam: Optimizer
        if accumulate == 1:
            kind = AdamW if decoupled else Adam
            adam = kind(params, lr, betas, eps, weight_decay, foreach=foreach, fused=fused)
        else:
            adam = AccumAdam(params, lr, betas, eps, weight_decay, window=accumulate, decoupled=decoupled)
        super().__init__(
            adam,
            schedule,
            world=world,
            order=order,
            overlap=overlap,
            gamma=gamma,
            compressor=compressor,
            max_norm=max_norm,
            control=control,
            bucket_bytes=bucket_bytes,
        )
