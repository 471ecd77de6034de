"""Any of torch's optimizers over many nodes, which exchange gradients or steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import LBFGS, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from flexcomm import BUCKET_BYTES, Average, Compressor, InvalidArgumentError, NonFinitePolicy, World, demo, dense
from flexdemo.base import NodeOptimizer, SyncTarget
from flexdemo.gradients import Averages, CompressionSettings
from flexdemo.local_steps import OuterOptimizer
from flexdemo.parameters import ABOVE_0_TO_1, AT_LEAST_0, FROM_0_TO_1, Group, local, wrapped_like


class DistributedOptimizer(NodeOptimizer):
    """One of torch's optimizers, or a list of them, on every node; replicas hold the same bits after every exchange.

    ``sync="gradients"``: ``decay * residual + gradient`` is compressed, and what all nodes sent, averaged, is the
    gradient that every node steps on. ``sync="steps"``: every node steps on its own gradients, and how far it moved in
    ``sync_every`` steps is compressed and averaged, by ``outer`` if given. What is not sent waits for the next time.

    Args:
        optimizer: torch's optimizer, or several with different parameters, whose groups are used in order; learning
            rate schedulers want this object. Groups may differ in ``compressor``, ``residual_decay`` and
            ``residual_alpha``.
        compressor: what is sent between nodes.
        world: the ranks; those that ``flexcomm.connect()`` finds, if none are given.
        sync: nodes exchange ``"gradients"``, or ``"steps"`` that each took by itself.
        sync_every: take so many local steps between exchanges.
        outer: how nodes move together after local steps; the plain average, if none is given.
        decay: the share of the residual that is left after a step.
        alpha: the share of what was sent that is taken out of the residual.
        average: divide by all ``"nodes"``, or by the ``"contributors"`` of each coefficient.
        overlap: start the exchange of a bucket during backward, as soon as its gradients are ready.
        nonfinite: NaN or infinity on any rank: ``"raise"`` on all, ``"skip"`` the step, or count as ``"zero"``.
        bucket_bytes: dense bytes of gradients that travel together in one collective.
        node_averaged: whether gradients are averaged inside the node before; if not given, those of FSDP's shards are.

    Example:
        >>> import torch, flexcomm, flexdemo
        >>> with flexcomm.connect() as world:
        ...     model = torch.nn.Linear(4, 1)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     optimizer = flexdemo.DistributedOptimizer(sgd, compressor=flexcomm.dense(values="sign2"), world=world)
        ...     model(torch.ones(4)).backward()
        ...     optimizer.step()

    """

    # "residual_", because torch's optimizers may mean something else by decay and alpha.
    _rules: ClassVar = {
        "lr": AT_LEAST_0,
        "weight_decay": AT_LEAST_0,
        "residual_decay": FROM_0_TO_1,
        "residual_alpha": ABOVE_0_TO_1,
    }
    _local_settings = CompressionSettings(dense())

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        compressor: Compressor,
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
    ) -> None:
        if (sync == "steps" or sync_every > 1) and (decay, alpha, average) != (1.0, 1.0, "nodes"):
            raise InvalidArgumentError(
                "decay, alpha and average are for gradients: where nodes exchange steps, nothing of them may be lost."
            )
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._inner = Inner(optimizers)
        defaults = {"residual_decay": decay, "residual_alpha": alpha, "node_averaged": node_averaged}
        super().__init__(
            [group for one in optimizers for group in one.param_groups],
            {"compressor": compressor, **defaults},
            world,
            average=average,
            nonfinite=nonfinite,
            bucket_bytes=bucket_bytes,
            sync_every=sync_every,
            sync=sync,
            outer=outer,
            overlap=overlap,
        )
        for one in optimizers:
            self.state.update(one.state)
        self.defaults |= optimizers[-1].defaults

    def state_dict(self) -> dict[str, Any]:
        initial = self._inner.initial_states(self)
        # A checkpoint needs all keys; only while it is saved: at the first step the inner optimizer makes its own.
        self.state.update(initial)
        saved = super().state_dict()
        self.state.update({param: {} for param in initial})
        return saved

    def _sync_settings(self, group: Group) -> CompressionSettings:
        return CompressionSettings(group["compressor"], group["residual_decay"], 1.0, group["residual_alpha"])

    def _apply(self, averages: Averages) -> None:
        """Take the inner step with the averages as gradients; they may stand in ``.grad`` afterwards."""
        own = [(param, param.grad) for group in self.param_groups for param in group["params"]]
        for param, _ in own:
            param.grad = None
        for bucket, tensors in averages.items():
            for param, average in zip(bucket.params, tensors, strict=True):
                param.grad = wrapped_like(average, param)
        try:
            self._inner.step(self)
        finally:
            for param, gradient in own:
                param.grad = gradient


class FlexDeMoAdamW(DistributedOptimizer):
    """:class:`DistributedOptimizer` of torch's AdamW; with ``sync_every`` and ``outer``, DiLoCo (arXiv 2311.08105).

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
        nonfinite: NaN or infinity on any rank: ``"raise"`` on all, ``"skip"`` the step, or count as ``"zero"``.
        bucket_bytes: dense bytes of gradients that travel together in one collective.
        node_averaged: whether gradients are averaged inside the node before; if not given, those of FSDP's shards are.
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
            adamw,
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


class Inner:
    """torch's optimizers inside ``owner``, whose parameter groups and state they use."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        # Groups that are added later belong to the last optimizer.
        self._counts = [*(len(one.param_groups) for one in optimizers[:-1]), None]
        if any(isinstance(one, LBFGS) for one in optimizers):
            raise InvalidArgumentError("LBFGS calls a closure several times a step, and cannot be exchanged.")

    @torch.no_grad()
    def initial_states(self, owner: Optimizer) -> dict[Tensor, dict[str, Any]]:
        """Return states for parameters that have none, as a step with zero gradients makes them; it is taken back."""
        params = [param for group in owner.param_groups for param in group["params"]]
        new = {param for param in params if not owner.state[param]}
        if not new:
            return {}
        before = [(param, param.grad, local(param).clone(), owner.state[param]) for param in params]
        for param in params:
            param.grad = torch.zeros_like(param) if param in new else None
        self.step(owner)
        found = {param: owner.state[param] for param in params if param in new}
        for param, gradient, value, state in before:
            param.grad, owner.state[param] = gradient, state
            local(param).copy_(value)
        for state in found.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].zero_()
        return found

    def step(self, owner: Optimizer) -> None:
        groups = owner.param_groups
        for optimizer, count in zip(self._optimizers, self._counts, strict=True):
            # Again each time: torch replaces both when a state is loaded.
            optimizer.param_groups, optimizer.state = groups[:count], owner.state
            optimizer.step()
            groups = groups[count:]
