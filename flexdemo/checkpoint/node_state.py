"""An optimizer's state on this rank, residuals included, into a state dict with a node axis and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from flexcomm import InvalidArgumentError, World
from flexdemo.checkpoint.node_axis import (
    NodeAxis,
    OtherNodes,
    check_sizes,
    longest_on_node,
    required,
    stacked_state,
    take_state_,
)
from flexdemo.checkpoint.residuals import StateEntry, States, find_entries, load_states
from flexdemo.gradients import Bucket, BucketExchange, CompressionSettings, GradientExchange, check_same_buckets
from flexdemo.local_steps import LocalSteps
from flexdemo.parameters import Group, local, wrapped_like

MOMENTUM, UNSENT, OWNER = "momentum", "unsent", "owner"
"""The keys of the residuals of gradients, of the residuals of local steps, and of the rank that saved them."""
ANCHOR, VELOCITY, HERE = "anchor", "velocity", "here"
"""The keys of the parameters and the velocity after the last outer step, and of this node's parameters now."""


class NodeState:
    """The part of an optimizer's state that differs from node to node: residuals, and parameters in local steps."""

    def __init__(self, world: World, gradients: GradientExchange, local_steps: LocalSteps | None) -> None:
        self._world, self._gradients, self._local_steps = world, gradients, local_steps
        self._axis = NodeAxis(world)
        self._entries: dict[Parameter, dict[str, StateEntry]] = {}
        self._lengths: dict[Parameter, int] = {}

    def measure(self) -> None:
        """Find the residuals of all parameters. The ranks of a node exchange their lengths."""
        check_same_buckets(self._gradients.buckets, self._world)
        gradients, steps = self._gradients, self._local_steps
        exchanges: list[tuple[str, BucketExchange, Callable[[Bucket], CompressionSettings]]] = [
            (MOMENTUM, gradients, gradients.settings_of)
        ]
        if steps is not None:
            exchanges.append((UNSENT, steps.exchange, steps.settings_of))
        for key, exchange, settings_of in exchanges:
            for bucket in exchange.buckets:
                here = [local(param) for param in bucket.params]
                self._lengths |= zip(bucket.params, longest_on_node(map(Tensor.numel, here), self._world), strict=True)
                entries = find_entries(bucket, exchange, here, settings_of(bucket))
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
                self._take_residuals(param, saved, other_nodes, states)
                copies += self._take_local_steps(param, saved, other_nodes)
                rest["state"][number] = saved
        load_states(states)
        for target, value in copies:
            target.copy_(value)
        return rest

    def _saved(self, param: Parameter, state: dict[str, Any]) -> dict[str, Any]:
        here, axis = local(param), self._axis
        entries = self._entries.get(param, {})
        saved = {key: entry.saved(axis, here.device) for key, entry in entries.items()}
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

    def _take_residuals(self, param: Parameter, saved: dict[str, Any], other_nodes: OtherNodes, states: States) -> None:
        """Add the residuals that were saved for ``param`` to ``states``."""
        entries = self._entries.get(param, {})
        if not saved:
            # Frozen when it was saved: it begins anew.
            return
        if entries:
            self._axis.check_owner(required(saved, OWNER))
        for key, entry in entries.items():
            entry.take(required(saved, key), self._axis, key, other_nodes, states)

    def _take_local_steps(
        self, param: Parameter, saved: dict[str, Any], other_nodes: OtherNodes
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors to load for ``param``, each with its saved value."""
        steps = self._local_steps
        if steps is None or param not in steps.anchors or not saved:
            return []
        here, anchor = local(param), local(required(saved, ANCHOR))
        saved_here = required(saved, HERE)
        if other_nodes == "reset" and not self._axis.is_own(saved_here):
            # New nodes start from the last outer step.
            value = anchor
        else:
            value = self._axis.taken(saved_here, here.shape, HERE, other_nodes)
        copies = [(here, value), (steps.anchors[param], anchor)]
        if param in steps.velocities:
            copies.append((steps.velocities[param], local(required(saved, VELOCITY))))
        take_state_(self._axis, saved, param, other_nodes)
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
