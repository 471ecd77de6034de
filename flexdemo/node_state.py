"""State that differs from node to node in state dicts: residuals and local steps, with a node axis.

Residuals are coefficients of chunks, and chunks follow from how a tensor is cut. For other ranks per node, what the
ranks of a node saved is transformed back into elements, put together, cut anew, and transformed again: exact but for
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from flexcomm import (
    Compressor,
    InvalidArgumentError,
    Residuals,
    TensorPlan,
    TensorShard,
    TensorSpec,
    World,
    plan_tensor,
    shard_tensor,
)
from flexcomm.kernels.reference.transform import accumulate, restore
from flexdemo.checkpoint import NodeAxis, OtherNodes, check_sizes, longest_on_node, required, stacked_state, take_state_
from flexdemo.gradients import Bucket, BucketExchange, check_same_buckets, spec_of
from flexdemo.local_steps import LocalSteps
from flexdemo.parameters import Group, local, wrapped_like

MOMENTUM, UNSENT, OWNER = "momentum", "unsent", "owner"
"""The keys of the residuals of gradients, of the residuals of local steps, and of the rank that saved them."""
ANCHOR, VELOCITY, HERE = "anchor", "velocity", "here"
"""The keys of the parameters and the velocity after the last outer step, and of this node's parameters now."""


class NodeState:
    """The part of an optimizer's state that differs from node to node: residuals, and parameters in local steps."""

    def __init__(self, world: World, gradients: BucketExchange, local_steps: LocalSteps | None) -> None:
        self._world, self._local_steps = world, local_steps
        self._exchanges = {MOMENTUM: gradients}
        if local_steps is not None:
            self._exchanges[UNSENT] = local_steps.exchange
        self._axis = NodeAxis(world)
        self._entries: dict[Parameter, dict[str, StateEntry]] = {}
        self._lengths: dict[Parameter, int] = {}

    def measure(self, groups: list[Group]) -> None:
        """Find the residuals of all parameters. The ranks of a node exchange their lengths."""
        check_same_buckets(self._exchanges[MOMENTUM].buckets, self._world)
        for key, exchange in self._exchanges.items():
            for bucket in exchange.buckets:
                here = [local(param) for param in bucket.params]
                self._lengths |= zip(bucket.params, longest_on_node(map(Tensor.numel, here), self._world), strict=True)
                entries = find_entries(bucket, exchange, here, groups[bucket.group]["compressor"])
                for param, entry in zip(bucket.params, entries, strict=False):
                    self._entries.setdefault(param, {})[key] = entry

    def added_to(self, state_dict: dict[str, Any], groups: list[Group]) -> dict[str, Any]:
        """Return torch's state dict with residuals and local steps in it."""
        for packed, group in zip(state_dict["param_groups"], groups, strict=True):
            # Its repr, not the object: loading must not be able to run code.
            packed["compressor"] = repr(group["compressor"])
            for number, param in zip(packed["params"], group["params"], strict=True):
                state_dict["state"][number] = self._saved(param, state_dict["state"].get(number, {}))
        return state_dict

    def taken_from(self, state_dict: dict[str, Any], groups: list[Group], other_nodes: OtherNodes) -> dict[str, Any]:
        """Load residuals and local steps, and return the rest for torch to load. Nothing changes if this raises."""
        _check_groups(state_dict["param_groups"], groups)
        if not any(OWNER in kept for kept in state_dict["state"].values()) and self._entries:
            raise InvalidArgumentError(
                "the state to be loaded holds no residuals at all: it was saved by another optimizer."
            )
        rest: dict[str, Any] = {"state": {}, "param_groups": []}
        copies: list[tuple[Tensor, Tensor]] = []
        states: States = {}
        for packed, group in zip(state_dict["param_groups"], groups, strict=True):
            rest["param_groups"].append({**packed, "compressor": group["compressor"]})
            for number, param in zip(packed["params"], group["params"], strict=True):
                saved = dict(state_dict["state"].get(number, {}))
                copies += self._take(param, saved, other_nodes, states)
                rest["state"][number] = saved
        load_states(states)
        for target, value in copies:
            target.copy_(value)
        return rest

    def _saved(self, param: Parameter, state: dict[str, Any]) -> dict[str, Any]:
        here, axis = local(param), self._axis
        entries = self._entries.get(param, {})
        saved = {key: entry.saved(axis) for key, entry in entries.items()}
        if entries:
            saved[OWNER] = axis.owner()
        if self._local_steps is None or param not in self._local_steps.anchors:
            return {**state, **saved}
        length = self._lengths[param]
        saved[HERE] = axis.stacked(here, length)
        saved[ANCHOR] = wrapped_like(self._local_steps.anchors[param], param)
        if param in self._local_steps.velocities:
            saved[VELOCITY] = wrapped_like(self._local_steps.velocities[param], param)
        return {**stacked_state(axis, state, length), **saved}

    def _take(
        self, param: Parameter, saved: dict[str, Any], other_nodes: OtherNodes, states: States
    ) -> list[tuple[Tensor, Tensor]]:
        """Take all but torch's own out of ``saved``: add residuals to ``states``, return tensors with saved values."""
        if not saved:
            # Frozen when it was saved: it begins anew.
            return []
        entries, axis, steps = self._entries.get(param, {}), self._axis, self._local_steps
        if entries:
            axis.check_owner(required(saved, OWNER))
        for key, entry in entries.items():
            entry.take(required(saved, key), axis, key, other_nodes, states)
        if steps is None or param not in steps.anchors:
            return []
        here, anchor, saved_here = local(param), local(required(saved, ANCHOR)), required(saved, HERE)
        # On "reset", new nodes start from the last outer step.
        resets = other_nodes == "reset" and not axis.is_own(saved_here)
        value = anchor if resets else axis.taken(saved_here, here.shape, HERE, other_nodes)
        copies = [(here, value), (steps.anchors[param], anchor)]
        if param in steps.velocities:
            copies.append((steps.velocities[param], local(required(saved, VELOCITY))))
        take_state_(axis, saved, param, other_nodes)
        return copies


def _check_groups(saved: list[dict[str, Any]], groups: list[Group]) -> None:
    check_sizes(saved, groups)
    for number, (packed, group) in enumerate(zip(saved, groups, strict=True)):
        if packed.get("compressor") != repr(group["compressor"]):
            raise InvalidArgumentError(
                f"group {number} was saved with compressor {packed.get('compressor')}, but has "
                f"{group['compressor']!r}, which may see momenta differently. Load with the same, then set "
                f"group['compressor']."
            )


class StateEntry(NamedTuple):
    """The residual of one tensor on this rank; ``length`` is the longest on this node.

    Without a shard this rank has none. Without ``unsharded`` it cannot be cut anew.
    """

    residuals: Residuals
    device: torch.device
    shard: TensorShard | None
    length: int
    unsharded: UnshardedTensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return (0, 0) if self.shard is None else self.shard.plan.state_shape

    def saved(self, axis: NodeAxis) -> Tensor:
        """Return the residual, zeros if it has not begun, with a node axis."""
        if self.shard is not None and self.shard.spec.name in self.residuals.names():
            return axis.stacked(self.residuals[self.shard.spec.name], self.length)
        return axis.stacked(torch.zeros(self.shape, device=self.device), self.length)

    def take(self, saved: Tensor, axis: NodeAxis, name: str, other_nodes: OtherNodes, states: States) -> None:
        """Add the saved residual, as this rank's part of it, to ``states``."""
        reshard = None if self.unsharded is None else self.unsharded.reshard
        taken = axis.taken(saved, self.shape, name, other_nodes, reshard)
        by_name = states.setdefault(self.residuals, {})
        if self.shard is not None:
            by_name[self.shard.spec.name] = taken


States = dict[Residuals, dict[str, Tensor]]
"""States to load, by residuals and name."""


def load_states(states: States) -> None:
    for residuals, by_name in states.items():
        residuals.load_state_dict(by_name)


def find_entries(
    bucket: Bucket, exchange: BucketExchange, tensors: Sequence[Tensor], compressor: Compressor
) -> list[StateEntry]:
    """Return the entries of a bucket's tensors; none without residuals. All ranks of a node call it together."""
    residuals = exchange.residuals_of(bucket)
    if residuals is None:
        return []
    shards = exchange.shards_of(bucket, list(tensors), compressor)
    mine = [0 if shard is None else math.prod(shard.plan.state_shape) for shard in shards]
    found = zip(tensors, bucket.params, bucket.names, shards, longest_on_node(mine, exchange.world), strict=True)
    return [
        StateEntry(residuals, x.device, shard, length, _find_unsharded(param, name, x.dtype, compressor))
        for x, param, name, shard, length in found
    ]


def _find_unsharded(param: Tensor, name: str, dtype: torch.dtype, compressor: Compressor) -> UnshardedTensor | None:
    """Return a parameter as it is before it is cut; None if that cannot be known, as of a flat one."""
    spec = TensorSpec(name, tuple(param.shape), dtype)
    if isinstance(param, FlatParameter):
        return None
    if not isinstance(param, DTensor):
        return UnshardedTensor(spec, compressor, None)
    (placement, *others) = param.placements
    return UnshardedTensor(spec, compressor, placement.dim) if isinstance(placement, Shard) and not others else None


class UnshardedTensor(NamedTuple):
    """A tensor before it is cut among the ranks of a node: along ``dim`` by FSDP, or, if None, by flexcomm."""

    spec: TensorSpec
    compressor: Compressor
    dim: int | None

    def reshard(self, rows: Tensor, ranks: int, rank: int) -> Tensor:
        """Return the state of rank ``rank`` of ``ranks`` out of the states, one a row, that a node's ranks saved."""
        whole = torch.zeros(self.spec.shape, device=rows.device)
        for row, shard in zip(rows, self.shards(whole, len(rows)), strict=True):
            if shard is None:
                continue
            elements, plan = shard
            numel = math.prod(plan.state_shape)
            if row.numel() < numel:
                raise InvalidArgumentError(
                    f"the residual saved of {self.spec.name} has {row.numel()} coefficients where {numel} are needed: "
                    f"it is of another model, or of another compressor."
                )
            elements.copy_(restore(row[:numel].view(plan.state_shape), plan).reshape(elements.shape))
        mine = self.shards(whole, ranks)[rank]
        return rows.new_zeros(0, 0) if mine is None else accumulate(*mine)

    def shards(self, whole: Tensor, ranks: int) -> list[tuple[Tensor, TensorPlan] | None]:
        """Return what each rank holds of ``whole``, as a view, and its plan; None if it holds nothing."""
        if self.dim is None:
            cut = shard_tensor(self.spec, plan_tensor(self.spec, self.compressor), ranks)
            return [one and (whole.view(-1)[one.first : one.last], one.plan) for one in cut]
        # As FSDP cuts it: all of one size, the last ones what is left.
        size = -(-self.spec.shape[self.dim] // ranks)
        views = whole.tensor_split([rank * size for rank in range(1, ranks)], self.dim)
        return [(view, plan_tensor(spec_of(view, self.spec.name), self.compressor)) for view in views]
