"""FlexDeMoAdamW: the exchange of FlexDeMo, and AdamW on what was received."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim import AdamW

from flexcomm import BUCKET_BYTES, demo
from flexdemo.wrapped import DistributedOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from flexcomm import Average, Compressor, NonFinitePolicy, World
    from flexdemo.settings import OuterOptimizer, SyncTarget

__all__ = ["FlexDeMoAdamW"]


class FlexDeMoAdamW(DistributedOptimizer):
    """torch's AdamW on gradients, or of steps, that nodes exchange as far as ``compressor`` sends them.

    ``decay * residual + gradient`` is compressed and, averaged over nodes, taken for the gradient by torch's own AdamW.
    With ``sync="steps"`` every node takes AdamW's step on its own gradients, and how far it moved is compressed and
    averaged instead; with ``sync_every=n`` that of n steps, by ``outer`` if given: DiLoCo (arXiv 2311.08105).

    Args:
        params: parameters, named parameters or parameter groups, as torch's optimizers take them.
        lr: AdamW's learning rate, like the three arguments below.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        compressor: what is sent; ``flexcomm.demo()``, if none is given.
        world: the ranks; those that ``flexcomm.connect()`` finds, if none are given.
        sync: nodes exchange ``"gradients"``, or ``"steps"`` that each took by itself.
        sync_every: take so many local steps between exchanges.
        outer: how nodes move together after local steps; the plain average, if none is given.
        decay: the share of the residual that is left after a step.
        alpha: the share of what was sent that is taken out of the residual.
        average: divide by all ``"nodes"``, or by the ``"contributors"`` of each coefficient.
        overlap: start the exchange of a bucket during backward, as soon as its gradients are ready.
        nonfinite: what NaN or infinity on any rank does: ``"raise"`` on all, ``"skip"`` the step, or be ``"zero"``.
        bucket_bytes: dense bytes of gradients that travel together in one collective.
        node_averaged: whether gradients are averaged inside the node before the optimizer sees them; found out from
            the parameters, if not given.
        foreach: as for torch's AdamW.
        fused: as for torch's AdamW.

    Example:
        >>> import torch, flexcomm, flexdemo
        >>> with flexcomm.connect() as world:
        ...     model = torch.nn.Linear(4, 1)
        ...     optimizer = flexdemo.FlexDeMoAdamW(model.parameters(), lr=1e-3, world=world)
        ...     model(torch.ones(4)).backward()
        ...     optimizer.step()

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
