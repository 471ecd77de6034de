"""The base of the optimizers: parameters with a replica on every node, which step on what nodes exchanged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, get_args

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from flexcomm import Average, FlexcommError, InvalidArgumentError, NonFinitePolicy, TransportError, World, default_world
from flexdemo.checkpoint.node_axis import FromOtherNodes, OtherNodes
from flexdemo.checkpoint.node_state import NodeState
from flexdemo.gradients import BucketResult, CompressionSettings, GradientExchange
from flexdemo.local_steps import LocalSteps, OuterOptimizer
from flexdemo.parameters import Group, broadcast_parameters_, check_parameter, names_of

Rule = tuple[Callable[[Any], bool], str]

SyncTarget = Literal["gradients", "steps"]
"""Nodes exchange gradients, and all take the same step; or each takes a step of its own, and they exchange those."""

AT_LEAST_0: Rule = (lambda value: value >= 0, "at least 0")
FROM_0_TO_1: Rule = (lambda value: 0 <= value <= 1, "from 0 to 1")
ABOVE_0_TO_1: Rule = (lambda value: 0 < value <= 1, "above 0, at most 1")


class NodeOptimizer(FromOtherNodes, Optimizer, ABC):
    """An optimizer whose parameters have a replica on every node; at the start, all become those of node 0.

    A subclass says what is sent of the gradients (``_sync_settings``) and how parameters move by the averages
    (``_apply``).
    """

    # torch's GradScaler leaves inf and scale to optimizers that say so. Were it to decide alone, on each rank, some
    # ranks would skip a step in which others wait for them.
    _step_supports_amp_scaling = True

    _rules: ClassVar[dict[str, Rule]]
    """The allowed values of a parameter group's settings: a test of each, and its words for the error."""

    _has_local_residuals = True
    """Whether a node that takes local steps keeps what it does not apply."""

    def __init__(
        self,
        params: ParamsT,
        defaults: Group,
        world: World | None,
        *,
        average: Average,
        nonfinite: NonFinitePolicy,
        bucket_bytes: int,
        sync_every: int,
        sync: SyncTarget = "gradients",
        outer: OuterOptimizer | None,
        overlap: bool,
    ) -> None:
        _check_arguments(sync_every, sync, outer)
        self._world = default_world() if world is None else world
        self._is_ready = False
        super().__init__(params, {**defaults, "step": 0})
        local = sync_every > 1 or sync == "steps"
        self._gradients = GradientExchange(
            self.param_groups,
            self._world.node_only() if local else self._world,
            self._local_settings if local else self._sync_settings,
            average=average,
            nonfinite=nonfinite,
            bucket_bytes=bucket_bytes,
            has_residuals=not local or self._has_local_residuals,
            overlap=overlap,
        )
        self._local_steps = (
            LocalSteps(self.param_groups, self._world, sync_every, outer, nonfinite, bucket_bytes) if local else None
        )
        self._node_state = NodeState(self._world, self._gradients, self._local_steps)
        self._is_ready = True
        self._refresh()

    @abstractmethod
    def _sync_settings(self, group: Group) -> CompressionSettings:
        """Return the compressor of a group's gradients, and the decay, gain and alpha of its momentum."""

    def _local_settings(self, group: Group) -> CompressionSettings:
        """Return the same for the steps that a node takes alone, with ``sync_every`` above 1 or ``sync="steps"``."""
        return self._sync_settings(group)

    @abstractmethod
    def _apply(self, results: list[BucketResult]) -> None:
        """Change the parameters by averages that are equal on all nodes."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Exchange all gradients and change all parameters; if this raises, neither they nor momenta have changed.

        With local steps, a step that a node took alone stays.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._gradients.refresh():
            self._refresh()
        try:
            # torch's GradScaler sets both for the time of the step.
            scale, skips = getattr(self, "grad_scale", None), hasattr(self, "found_inf")
            results = self._gradients.exchange(scale, "skip" if skips else None)
            if results is not None:
                self._apply(results)
        except FlexcommError as error:
            # With local steps the other nodes did not fail, and wait for this one in the outer step.
            if self._local_steps is not None and not isinstance(error, TransportError):
                self._finish_step()
            raise
        self._finish_step()
        return loss

    def _finish_step(self) -> None:
        for group in self.param_groups:
            group["step"] += 1
        if self._local_steps is not None:
            self._local_steps.outer_step_if_due(self.param_groups[0]["step"])

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for backward passes that only accumulate: with ``overlap``, nothing leaves during them."""
        return self._gradients.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and cancel the exchange of those that were sent without a step."""
        if self._is_ready:
            self._gradients.cancel()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, on all ranks alike; they become those of node 0."""
        if self._is_ready:
            param_group.setdefault("step", self.param_groups[0]["step"])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._check_group(group)
        for param, name in zip(group["params"], names_of(self.param_groups)[-1], strict=True):
            check_parameter(param, name, self._world.topology)
            # Present before the first step: torch's checkpoints take that for granted.
            self.state[param] = {}
        broadcast_parameters_(group["params"], self._world, are_shards=group["node_averaged"])
        if self._is_ready:
            self._refresh()

    def _check_group(self, group: Group) -> None:
        wrong = [
            f"{name} is {group[name]!r}, but must be {needed}"
            for name, (allows, needed) in self._rules.items()
            if name in group and not allows(group[name])
        ]
        if not hasattr(group["compressor"], "plan"):
            wrong.append(f"compressor is {group['compressor']!r}, but must be one, such as flexcomm.demo()")
        if wrong:
            raise InvalidArgumentError(f"{'; '.join(wrong)}.")

    def state_dict(self) -> dict[str, Any]:
        """Return torch's own format, with a node axis where nodes differ; see docs/training.md."""
        return self._node_state.added_to(super().state_dict(), self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any], other_nodes: OtherNodes | None = None) -> None:
        """Go on from a state, bit for bit.

        Args:
            state_dict: as :meth:`state_dict` returned it.
            other_nodes: for a state of another number of nodes: an ``"error"`` (the default), the ``"mean"`` of all
                nodes, or ``"reset"`` to zero.

        """
        self._gradients.cancel()
        self._refresh()
        rest = self._node_state.taken_from(state_dict, self.param_groups, other_nodes or self._other_nodes)
        groups = self.param_groups
        super().load_state_dict(rest)
        # torch makes a new list; the exchange looks at this one.
        groups[:] = self.param_groups
        self.param_groups = groups

    def _refresh(self) -> None:
        """Plan buckets and saved state anew where other parameters are trained than before."""
        self._gradients.refresh()
        if self._local_steps is not None:
            self._local_steps.refresh()
        self._node_state.measure()


def _check_arguments(sync_every: object, sync: SyncTarget, outer: OuterOptimizer | None) -> None:
    if not isinstance(sync_every, int) or sync_every < 1:
        raise InvalidArgumentError(f"sync_every is {sync_every!r}, but must be a whole number, at least 1.")
    if sync not in get_args(SyncTarget):
        raise InvalidArgumentError(f"sync is {sync!r}, but must be one of {', '.join(get_args(SyncTarget))}.")
    if outer is not None and sync_every == 1 and sync == "gradients":
        raise InvalidArgumentError("outer moves nodes that took local steps: pass sync_every= above 1, too.")
