"""FlexDeMo: nodes exchange the fast-moving part of their momentum, and step by what all of them received."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal, get_args

from torch import Tensor
from torch.optim.optimizer import ParamsT

from flexcomm import BUCKET_BYTES, Average, Compressor, Epilogue, NonFinitePolicy, World, apply_epilogue_, demo
from flexdemo.base import NodeOptimizer
from flexdemo.gradients import Averages, Bucket, CompressionSettings, FusedStep
from flexdemo.local_steps import OuterOptimizer
from flexdemo.parameters import ABOVE_0_TO_1, AT_LEAST_0, FROM_0_TO_1, Group, local, one_of

Update = Literal["sign", "plain"]


class FlexDeMo(NodeOptimizer):
    """Decoupled momentum between nodes (DeMo, arXiv 2411.19870; FlexDeMo, arXiv 2502.06728).

    Every node keeps ``m = decay * m + lr * gradient``, sends what ``compressor`` selects of it, takes ``alpha`` of that
    out of ``m``, and moves by the average of what all nodes sent, or by its sign times ``lr``. Replicas hold the same
    bits after every step. docs/training.md says what fits which model.

    Args:
        params: parameters, named parameters or parameter groups, which may differ in ``lr``, ``decay``,
            ``weight_decay``, ``alpha``, ``update`` and ``compressor``.
        lr: the learning rate.
        compressor: what is sent of the momentum; ``flexcomm.demo()``, if none is given.
        world: the ranks; those that ``flexcomm.connect()`` finds, if none are given.
        decay: the share of the momentum that is left after a step.
        weight_decay: decoupled, as AdamW's: parameters shrink by ``lr * weight_decay`` in every step.
        alpha: the share of what was sent that is taken out of the momentum; less than 1 sends it again, fading.
        update: ``"sign"`` moves by the sign of the average times ``lr``, ``"plain"`` by the average itself.
        average: divide by the ``"contributors"`` of each coefficient, or by all ``"nodes"``.
        sync_every: take so many local steps between exchanges; above 1, nodes exchange how far they moved.
        outer: how nodes move together after local steps; the plain average, if none is given.
        overlap: start the exchange of a bucket during backward, as soon as its gradients are ready.
        nonfinite: NaN or infinity on any rank: ``"raise"`` on all, ``"skip"`` the step, or count as ``"zero"``.
        bucket_bytes: dense bytes of gradients that travel together in one collective.
        node_averaged: whether gradients are averaged inside the node before; if not given, those of FSDP's shards are.
        exact_rollback: keep a second copy of the momentum, as ``overlap`` does, so that a step that fails leaves it bit
            for bit; else it is restored to rounding, see :class:`flexcomm.Residuals`.

    Raises:
        InvalidArgumentError: a setting makes no sense; it says which, and what it must be.
        ConfigMismatchError: ranks have other parameters or settings than each other.

    Example:
        >>> import torch, flexcomm, flexdemo
        >>> param = torch.nn.Parameter(torch.zeros(2))
        >>> with flexcomm.connect() as world:
        ...     optimizer = flexdemo.FlexDeMo([param], lr=0.5, compressor=flexcomm.dense(), world=world)
        ...     param.sum().backward()
        ...     optimizer.step()
        >>> param.data
        tensor([-0.5000, -0.5000])

    """

    _rules: ClassVar = {
        "lr": AT_LEAST_0,
        "decay": FROM_0_TO_1,
        "weight_decay": AT_LEAST_0,
        "alpha": ABOVE_0_TO_1,
        "update": one_of(get_args(Update)),
    }

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
        exact_rollback: bool = False,
    ) -> None:
        defaults = {"lr": lr, "decay": decay, "weight_decay": weight_decay, "alpha": alpha, "update": update}
        compressor = demo() if compressor is None else compressor
        super().__init__(
            params,
            {**defaults, "compressor": compressor, "node_averaged": node_averaged},
            world,
            average=average,
            nonfinite=nonfinite,
            bucket_bytes=bucket_bytes,
            sync_every=sync_every,
            outer=outer,
            overlap=overlap,
            exact_rollback=exact_rollback,
        )

    def _sync_settings(self, group: Group) -> CompressionSettings:
        return CompressionSettings(group["compressor"], group["decay"], float(group["lr"]), group["alpha"])

    def _fused_step(self, bucket: Bucket, gradients: list[Tensor]) -> FusedStep | None:
        params = [local(param) for param in bucket.params]
        fits = [x.is_contiguous() and x.dtype == g.dtype for x, g in zip(params, gradients, strict=True)]
        # Overlapped, parameters may change until they step.
        if self._overlap or False in fits:
            return None
        spans = sorted((x.data_ptr(), x.nbytes) for x in params if x.numel())
        if any(begin + nbytes > after for (begin, nbytes), (after, _) in pairwise(spans)):
            return None  # parameters that share memory
        return params, self._epilogue_of(bucket)

    def _apply(self, averages: Averages) -> None:
        for bucket, tensors in averages.items():
            for param, average in zip(bucket.params, tensors, strict=True):
                apply_epilogue_(local(param), average, self._epilogue_of(bucket))

    def _epilogue_of(self, bucket: Bucket) -> Epilogue:
        group = self.param_groups[bucket.group]
        lr, keep = float(group["lr"]), 1.0 - float(group["lr"]) * group["weight_decay"]
        # The learning rate is in the momentum: in a plain step, once is enough.
        return Epilogue("sign_step" if group["update"] == "sign" else "plain_step", lr, keep)
