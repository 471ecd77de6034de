"""The base of the optimizers: parameters with a replica on every node, which step on what nodes exchanged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from flexcomm import Average, FlexcommError, InvalidArgumentError, NonFinitePolicy, TransportError, World, default_world
from flexdemo.checkpoint import (
    DEFAULT_OTHER_NODES,
    NodeAxis,
    OtherNodes,
    ResidualShard,
    check_sizes,
    load_residuals,
    longest_on_node,
    required,
    residual_shards,
)
from flexdemo.gradients import (
    Averages,
    Bucket,
    CompressionSettings,
    FusedStep,
    GradientSync,
    ReadyBuckets,
    bucket_parameters,
    check_same_buckets,
)
from flexdemo.local_steps import LocalSteps, OuterOptimizer
from flexdemo.parameters import (
    COUNT,
    Group,
    Rule,
    broadcast_parameters_,
    check_parameter,
    check_settings,
    gradient_of,
    local,
    move_steps_to_host_,
    names_of,
    one_of,
    wrapped_like,
)

SyncTarget = Literal["gradients", "steps"]
"""Nodes exchange gradients, and all take the same step; or each takes a step of its own, and they exchange those."""

MOMENTUM, UNSENT, OWNER = "momentum", "unsent", "owner"
"""The keys of the residuals of gradients, of the residuals of local steps, and of the rank that saved them."""
ANCHOR, VELOCITY, HERE = "anchor", "velocity", "here"
"""The keys of the parameters and the velocity after the last outer step, and of this node's parameters now."""

_IS_COMPRESSOR: Rule = (lambda value: hasattr(value, "plan"), "one, such as flexcomm.demo()")


class NodeOptimizer(Optimizer, ABC):
    """An optimizer whose parameters have a replica on every node; at the start, all become those of node 0.

    A subclass says what is sent of the gradients (``_sync_settings``) and how parameters move by the averages: after
    they are written (``_apply``), or while they are decoded (``_fused_step``).
    """

    # torch's GradScaler leaves inf and scale to optimizers that say so: rank by rank, some would skip, others wait.
    _step_supports_amp_scaling = True
    _rules: ClassVar[dict[str, Rule]]
    """The allowed values of a parameter group's settings."""
    _local_settings: ClassVar[CompressionSettings | None] = None
    """The settings of steps that a node takes alone, without residuals; None: those between nodes, with residuals."""
    _is_ready = False

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
        exact_rollback: bool = False,
    ) -> None:
        rules = {"sync_every": COUNT, "sync": one_of(get_args(SyncTarget))}
        check_settings({"sync_every": sync_every, "sync": sync}, rules)
        is_local = sync_every > 1 or sync == "steps"
        if outer is not None and not is_local:
            raise InvalidArgumentError("outer moves nodes that took local steps: pass sync_every= above 1, too.")
        self._world = default_world() if world is None else world
        self._sync_every, self._bucket_bytes, self._overlap = sync_every, bucket_bytes, overlap
        super().__init__(params, {**defaults, "step": 0})
        self._sync = GradientSync(
            self._world.node_only() if is_local else self._world,
            average=average,
            nonfinite=nonfinite,
            has_residuals=not is_local or self._local_settings is None,
            in_background=overlap,
            exact_rollback=exact_rollback,
        )
        self._local_steps = LocalSteps(self._world, outer, nonfinite, exact_rollback) if is_local else None
        self._ready = ReadyBuckets(self._start_bucket)
        self._axis = NodeAxis(self._world)
        self._residual_shards: dict[Parameter, dict[str, ResidualShard]] = {}
        self._lengths: dict[Parameter, int] = {}
        self._is_ready = True
        self._refresh()

    @abstractmethod
    def _sync_settings(self, group: Group) -> CompressionSettings:
        """Return the compressor of a group's gradients, and the decay, gain and alpha of its momentum."""

    @abstractmethod
    def _apply(self, averages: Averages) -> None:
        """Change the parameters of buckets without a fused step by averages, which are equal on all nodes."""

    def _fused_step(self, bucket: Bucket, gradients: list[Tensor]) -> FusedStep | None:
        """Return what kernels step while they decode averages, and how; None: :meth:`_apply` does it afterwards."""
        del bucket, gradients
        return None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Exchange all gradients and change all parameters; if this raises, this node's parameters and momenta stay.

        With local steps, a step that a node took alone stays, too. If only this node received damaged data, others may
        have taken the step; the next one then raises on all of them.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        if self._find_trainable() != self._trainable:
            self._refresh()
        try:
            try:
                self._check_scaler()
                self._ready.launch_rest()
            except BaseException:
                self._cancel()
                raise
            averages = self._sync.finish()
            if averages is not None:
                self._apply(averages)
        except FlexcommError as error:
            # With local steps the other nodes did not fail, and wait for this one in the outer step.
            if self._local_steps is not None and not isinstance(error, TransportError):
                self._finish_step()
            raise
        self._finish_step()
        return loss

    def _check_scaler(self) -> None:
        if self._overlap and getattr(self, "grad_scale", None) is not None:
            raise InvalidArgumentError(
                "GradScaler unscales gradients after the backward pass, but overlap=True sends them before: use "
                "overlap=False, or bfloat16, which needs no scaler."
            )

    def _start_bucket(self, bucket: Bucket) -> None:
        group, settings = self.param_groups[bucket.group], self._local_settings
        if self._local_steps is None or settings is None:
            settings = self._sync_settings(group)
        gradients = [gradient_of(param) for param in bucket.params]
        # torch's GradScaler sets both for the time of the step.
        scale: Tensor | None = getattr(self, "grad_scale", None)
        nonfinite: NonFinitePolicy | None = "skip" if hasattr(self, "found_inf") else None
        if scale is not None:
            gradients = list(torch._foreach_div(gradients, scale))
        fused_step = self._fused_step(bucket, gradients)
        self._sync.start(bucket, gradients, settings, group["step"], nonfinite=nonfinite, fused_step=fused_step)

    def _finish_step(self) -> None:
        for group in self.param_groups:
            group["step"] += 1
        outer_steps, local_steps = divmod(self.param_groups[0]["step"], self._sync_every)
        if self._local_steps is not None and local_steps == 0:
            self._local_steps.outer_step(self.param_groups, outer_steps)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for backward passes that only accumulate: with ``overlap``, nothing leaves during them."""
        return self._ready.paused()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and cancel the exchange of those that were sent without a step."""
        self._cancel()
        super().zero_grad(set_to_none)

    def _cancel(self) -> None:
        self._sync.cancel()
        self._ready.reset()

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, on all ranks alike; they become those of node 0."""
        if self._is_ready:
            param_group.setdefault("step", self.param_groups[0]["step"])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_settings(group, self._rules | {"compressor": _IS_COMPRESSOR})
        for param, name in zip(group["params"], names_of(self.param_groups)[-1], strict=True):
            check_parameter(param, name, self._world.topology)
            # Present before the first step: torch's checkpoints take that for granted.
            self.state[param] = {}
        broadcast_parameters_(group["params"], self._world, are_shards=group["node_averaged"])
        if self._is_ready:
            self._refresh()

    def _find_trainable(self) -> list[int]:
        return [id(param) for group in self.param_groups for param in group["params"] if param.requires_grad]

    def _refresh(self) -> None:
        """Plan buckets and saved state for the parameters that want gradients now. All ranks call it together."""
        # What is on its way belongs to the buckets before.
        self._cancel()
        buckets = bucket_parameters(self.param_groups, self._bucket_bytes, lambda param: param.requires_grad)
        check_same_buckets(buckets, self._world)
        self._trainable = self._find_trainable()
        self._sync.set_buckets(buckets)
        self._ready.watch(buckets, early=self._overlap)
        syncs = {MOMENTUM: self._sync}
        if self._local_steps is not None:
            self._local_steps.refresh(self.param_groups, self._bucket_bytes)
            syncs[UNSENT] = self._local_steps.sync
            numels = [anchor.numel() for anchor in self._local_steps.anchors.values()]
            self._lengths = dict(zip(self._local_steps.anchors, longest_on_node(numels, self._world), strict=True))
        for key, sync in syncs.items():
            for bucket in sync.buckets:
                shards = residual_shards(bucket, sync, self.param_groups[bucket.group]["compressor"])
                for param, shard in zip(bucket.params, shards, strict=False):
                    self._residual_shards.setdefault(param, {})[key] = shard

    def state_dict(self) -> dict[str, Any]:
        """Return torch's own format, with a node axis where nodes differ; see docs/training.md."""
        state_dict = super().state_dict()
        for packed, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            # Its repr, not the object: loading must not be able to run code.
            packed["compressor"] = repr(group["compressor"])
            for number, param in zip(packed["params"], group["params"], strict=True):
                state_dict["state"][number] = self._saved(param, state_dict["state"].get(number, {}))
        return state_dict

    def _saved(self, param: Parameter, state: dict[str, Any]) -> dict[str, Any]:
        axis, steps, shards = self._axis, self._local_steps, self._residual_shards.get(param, {})
        saved = {key: shard.saved(axis) for key, shard in shards.items()}
        if shards:
            saved[OWNER] = axis.owner()
        if steps is None or param not in steps.anchors:
            return {**state, **saved}
        saved[HERE] = axis.stacked(local(param), self._lengths[param])
        saved[ANCHOR] = wrapped_like(steps.anchors[param], param)
        if param in steps.velocities:
            saved[VELOCITY] = wrapped_like(steps.velocities[param], param)
        return {**axis.stacked_state(state, self._lengths[param]), **saved}

    def load_state_dict(self, state_dict: dict[str, Any], other_nodes: OtherNodes | None = None) -> None:
        """Go on from a state, bit for bit. A state that is refused changes nothing.

        Args:
            state_dict: as :meth:`state_dict` returned it.
            other_nodes: a state of another number of nodes: an ``"error"``, their ``"mean"``, or ``"reset"`` to zero.

        """
        self._refresh()
        check_sizes(state_dict["param_groups"], self.param_groups)
        if not any(OWNER in kept for kept in state_dict["state"].values()) and self._residual_shards:
            raise InvalidArgumentError("the state to be loaded holds no residuals: it was saved by another optimizer.")
        policy = other_nodes or DEFAULT_OTHER_NODES.get()
        rest: dict[str, Any] = {"state": {}, "param_groups": []}
        residuals: list[tuple[ResidualShard, Tensor]] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for index, (group, packed) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=True)):
            if packed.get("compressor") != repr(group["compressor"]):
                raise InvalidArgumentError(
                    f"group {index} was saved with compressor {packed.get('compressor')}, but has "
                    f"{group['compressor']!r}. Load with the same, then set group['compressor']."
                )
            rest["param_groups"].append({**packed, "compressor": group["compressor"]})
            for number, param in zip(packed["params"], group["params"], strict=True):
                rest["state"][number] = saved = dict(state_dict["state"].get(number, {}))
                # Empty if it was frozen when it was saved: it begins anew.
                if saved:
                    taken, of_local_steps = self._take_state_(param, saved, policy)
                    residuals += taken
                    copies += of_local_steps
        load_residuals(residuals)
        for target, value in copies:
            target.copy_(value)
        super().load_state_dict(rest)
        move_steps_to_host_(self)

    def _take_state_(
        self, param: Parameter, saved: dict[str, Any], other_nodes: OtherNodes
    ) -> tuple[list[tuple[ResidualShard, Tensor]], list[tuple[Tensor, Tensor]]]:
        """Take residuals and local steps out of ``saved``; return each place of this rank with its saved value."""
        axis, steps, shards = self._axis, self._local_steps, self._residual_shards.get(param, {})
        if shards:
            axis.check_owner(required(saved, OWNER))
        residuals = [
            (shard, shard.taken(required(saved, key), axis, key, other_nodes)) for key, shard in shards.items()
        ]
        if steps is None or param not in steps.anchors:
            return residuals, []
        here, anchor, saved_here = local(param), local(required(saved, ANCHOR)), required(saved, HERE)
        # On "reset", new nodes start from the last outer step.
        resets = other_nodes == "reset" and not axis.is_own(saved_here)
        value = anchor if resets else axis.taken(saved_here, here.shape, HERE, other_nodes)
        copies = [(here, value), (steps.anchors[param], anchor)]
        if param in steps.velocities:
            copies.append((steps.velocities[param], local(required(saved, VELOCITY))))
        axis.take_state_(saved, param, other_nodes)
        return residuals, copies
