"""FlexDeMo: nodes exchange the fast-moving part of their momentum, and step by what all of them received."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexcomm import demo
from flexcomm.sync import BUCKET_BYTES
from flexdemo.base import NodeOptimizer
from flexdemo.gradients import CompressionSettings
from flexdemo.parameters import local

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from flexcomm import Compressor, World
    from flexcomm.kernels import Average
    from flexcomm.sync import NonFinitePolicy
    from flexdemo.gradients import BucketResult
    from flexdemo.parameters import Group
    from flexdemo.settings import OuterOptimizer, Update

__all__ = ["FlexDeMo"]


class FlexDeMo(NodeOptimizer):
    """Decoupled momentum between nodes (DeMo, arXiv 2411.19870; FlexDeMo, arXiv 2502.06728).

    Every node keeps ``m = decay * m + lr * gradient``, sends what ``compressor`` picks of it, takes ``alpha`` of that
    out of ``m``, and moves by the average of what all nodes sent: by its sign times ``lr``, or with ``update="plain"``
    by itself. Replicas hold the same bits after every step. Groups may differ in lr, decay, weight_decay, alpha, update
    and compressor. docs/training.md says what fits which model.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        compressor: Compressor | None = None,
        world: World | None = None,
        decay: float = 0.999,
        weight_decay: float = 0.0,
        alpha: float = 1.0,
        update: Update = "sign",
        average: Average = "contributors",
        sync_every: int = 1,
        outer: OuterOptimizer | None = None,
        overlap: bool = False,
        nonfinite: NonFinitePolicy = "raise",
        bucket_bytes: int = BUCKET_BYTES,
        node_averaged: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "decay": decay,
            "weight_decay": weight_decay,
            "alpha": alpha,
            "update": update,
            "compressor": demo() if compressor is None else compressor,
            "node_averaged": node_averaged,
        }
        super().__init__(
            params,
            defaults,
            world,
            average=average,
            nonfinite=nonfinite,
            bucket_bytes=bucket_bytes,
            sync_every=sync_every,
            outer=outer,
            overlap=overlap,
        )

    def _sync_settings(self, group: Group) -> CompressionSettings:
        return CompressionSettings(group["compressor"], group["decay"], float(group["lr"]), group["alpha"])

    def _apply(self, results: list[BucketResult]) -> None:
        for bucket, averages in results:
            group = self.param_groups[bucket.group]
            lr, params = float(group["lr"]), [local(param) for param in bucket.params]
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
            if group["update"] == "sign":
                torch._foreach_sign_(averages)
                torch._foreach_add_(params, averages, alpha=-lr)
            else:
                # The learning rate is in the momentum: once is enough.
                torch._foreach_sub_(params, averages)
