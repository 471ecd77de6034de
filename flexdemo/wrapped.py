"""Any of torch's optimizers over many nodes, which exchange gradients or steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from flexcomm import BUCKET_BYTES, InvalidArgumentError, dense
from flexdemo.base import NodeOptimizer
from flexdemo.gradients import CompressionSettings
from flexdemo.inner import Inner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flexcomm import Average, Compressor, NonFinitePolicy, World
    from flexdemo.gradients import BucketResult
    from flexdemo.parameters import Group
    from flexdemo.settings import OuterOptimizer, SyncTarget

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(NodeOptimizer):
    """One of torch's optimizers, or a list of them, on every node; replicas hold the same bits after every exchange.

    ``sync="gradients"``: ``decay * residual + gradient`` is compressed, and what all nodes sent, averaged, is the
    gradient that every node steps on. ``sync="steps"``: every node steps on its own gradients, and how far it moved in
    ``sync_every`` steps is compressed and averaged, by ``outer`` if given. What is not sent waits for the next time.

    Args:
        optimizer: torch's optimizer, or several with different parameters. Groups and learning rates are theirs, in
            order; learning rate schedulers want this object. Groups may differ in ``compressor``, ``residual_decay``
            and ``residual_alpha``.
        compressor: what is sent between nodes.
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

    Example:
        >>> import torch, flexcomm, flexdemo
        >>> with flexcomm.connect() as world:
        ...     model = torch.nn.Linear(4, 1)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     optimizer = flexdemo.DistributedOptimizer(sgd, compressor=flexcomm.dense(values="sign2"), world=world)
        ...     model(torch.ones(4)).backward()
        ...     optimizer.step()

    """

    _has_local_residuals = False

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
        self._inner = Inner(optimizers, [len(one.param_groups) for one in optimizers])
        super().__init__(
            [group for one in optimizers for group in one.param_groups],
            {
                "compressor": compressor,
                # Not by the names that torch's optimizers have for settings of theirs.
                "residual_decay": decay,
                "residual_alpha": alpha,
                "node_averaged": node_averaged,
            },
            world,
            average=average,
            nonfinite=nonfinite,
            bucket_bytes=bucket_bytes,
            sync_every=sync_every,
            sync=sync,
            outer=outer,
            overlap=overlap,
        )
        self._inner.take_over_state(self)
        self.defaults |= optimizers[-1].defaults

    def state_dict(self) -> dict[str, Any]:
        """Return torch's own format. What is a node's own has a node axis; see docs/training.md."""
        initial = self._inner.initial_states(self)
        # For this moment: a first step begins them as its optimizer wants them.
        self.state.update(initial)
        saved = super().state_dict()
        self.state.update({param: {} for param in initial})
        return saved

    def _sync_settings(self, group: Group) -> CompressionSettings:
        return CompressionSettings(group["compressor"], group["residual_decay"], 1.0, group["residual_alpha"])

    def _local_settings(self, group: Group) -> CompressionSettings:
        del group
        return CompressionSettings(dense())

    def _apply(self, results: list[BucketResult]) -> None:
        self._inner.apply(self, results)
