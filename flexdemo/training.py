"""What the optimizers have in common: parameters with a replica on every node, fed with what nodes exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from flexcomm import FlexcommError, InvalidArgumentError, TransportError
from flexcomm.world import default_world
from flexdemo.checkpoint import FromOtherNodes
from flexdemo.feed import Feed
from flexdemo.local_steps import LocalSteps
from flexdemo.memory import NodeMemory
from flexdemo.parameters import check_parameter, names_of
from flexdemo.replicas import equalise_
from flexdemo.settings import check_group, check_sync_every, check_sync_target

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch.optim.optimizer import ParamsT

    from flexcomm import World
    from flexcomm.kernels import Average
    from flexcomm.sync import NonFinitePolicy
    from flexdemo.checkpoint import OtherNodes
    from flexdemo.exchange import Received, Terms
    from flexdemo.parameters import Group
    from flexdemo.settings import OuterOptimizer, SyncTarget

__all__ = ["NodeOptimizer"]


class NodeOptimizer(FromOtherNodes, Optimizer, ABC):
    """An optimizer whose parameters have a replica on every node; at the start, all become those of node 0."""

    # torch's GradScaler leaves inf and scale to optimizers that say so. Were it to decide alone, on each rank, some
    # ranks would skip a step in which others wait for them.
    _step_supports_amp_scaling = True

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
        check_sync_every(sync_every)
        check_sync_target(sync)
        if outer is not None and sync_every == 1 and sync == "gradients":
            raise InvalidArgumentError("outer moves nodes that stepped alone: pass sync_every= above 1, too.")
        self._world = default_world() if world is None else world
        self._is_ready = False
        super().__init__(params, {**defaults, "step": 0})
        alone = sync_every > 1 or sync == "steps"
        self._feed = Feed(
            self.param_groups,
            self._world.node_only() if alone else self._world,
            self._alone_terms if alone else self._terms,
            {"average": average, "nonfinite": nonfinite},
            bucket_bytes=bucket_bytes,
            remembers=not alone or self._remembers_alone,
            overlap=overlap,
        )
        self._local_steps = (
            LocalSteps(self.param_groups, self._world, sync_every, outer, {"nonfinite": nonfinite}, bucket_bytes)
            if alone
            else None
        )
        self._memory = NodeMemory(self._world, self._feed, self._local_steps)
        self._is_ready = True
        self._refresh()

    _remembers_alone = True
    """Whether a node that steps alone keeps what it does not apply."""

    @abstractmethod
    def _terms(self, group: Group) -> Terms:
        """Return what is sent of a group's gradients."""

    def _alone_terms(self, group: Group) -> Terms:
        """Return what a node that steps alone applies of its gradients."""
        return self._terms(group)

    @abstractmethod
    def _apply(self, received: list[Received]) -> None:
        """Change the parameters by what was received."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Exchange all gradients and change all parameters; if this raises, neither they nor momenta have changed.

        Unless nodes step alone: then what a node did by itself stays.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._local_steps is None:
            self._take_step()
        else:
            self._take_step_alone(self._local_steps)
        return loss

    def _take_step(self) -> None:
        received = self._take()
        if received is not None:
            self._apply(received)
        self._count()

    def _take_step_alone(self, local_steps: LocalSteps) -> None:
        """Take a step, and meet the others if it is time: also if this node's step failed, for they are waiting."""
        try:
            self._take_step()
        except TransportError:
            raise
        except FlexcommError:
            self._count()
            local_steps.meet_if_due(self.param_groups[0]["step"])
            raise
        local_steps.meet_if_due(self.param_groups[0]["step"])

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for backward passes that only accumulate: with ``overlap``, nothing leaves during them."""
        return self._feed.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and take back those that left without a step."""
        if self._is_ready:
            self._feed.abandon()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, on all ranks alike; they become those of node 0."""
        if self._is_ready:
            param_group.setdefault("step", self.param_groups[0]["step"])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_group(group)
        for param, name in zip(group["params"], names_of(self.param_groups)[-1], strict=True):
            check_parameter(param, name, self._world.topology)
            # Present before the first step: torch's checkpoints take that for granted.
            self.state[param] = {}
        equalise_(group["params"], self._world, are_shards=group["node_averaged"])
        if self._is_ready:
            self._refresh()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's own format. What is a node's own has a node axis; see docs/training.md."""
        return self._memory.added_to(super().state_dict(), self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any], other_nodes: OtherNodes | None = None) -> None:
        """Go on from a state, bit for bit. ``other_nodes`` says what to do if it is of another number of nodes.

        That is an error, if nothing is said.
        """
        self._feed.abandon()
        self._refresh()
        rest = self._memory.taken_from(state_dict, self.param_groups, other_nodes or self._other_nodes)
        groups = self.param_groups
        super().load_state_dict(rest)
        # torch makes a new list; the feed looks at this one.
        groups[:] = self.param_groups
        self.param_groups = groups

    def _take(self) -> list[Received] | None:
        if self._feed.refresh():
            self._refresh()
        # Set by torch's GradScaler for the time of the step.
        return self._feed.take(getattr(self, "grad_scale", None), skips=hasattr(self, "found_inf"))

    def _refresh(self) -> None:
        self._feed.refresh()
        if self._local_steps is not None:
            self._local_steps.refresh()
        self._memory.measure()

    def _count(self) -> None:
        for group in self.param_groups:
            group["step"] += 1
