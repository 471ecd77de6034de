"""The state of a replica, parameters included, into a state dict with a node axis and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from flexcomm import InvalidArgumentError, World
from flexdemo.checkpoint import (
    NodeAxis,
    OtherNodes,
    check_sizes,
    longest_on_node,
    required,
    stacked_state,
    take_state_,
)
from flexdemo.decentralized.buckets import MixBucket
from flexdemo.parameters import Group, local

HERE, OWNER, PUSH_WEIGHT = "here", "owner", "push_weight"
"""The keys of a parameter's value on this replica, of the replica's owner, and of its push-sum weight."""
RESIDUALS = ("public", "public_sum")
"""The keys of a bucket's residuals, saved with the first of its parameters."""


class ReplicaState:
    """Parameters, moments, and the residuals of compressed mixing: all of them differ from replica to replica."""

    def __init__(self, world: World) -> None:
        self._world, self._axis = world, NodeAxis(world)
        self._lengths: dict[Parameter, int] = {}
        self._residual_lengths: dict[MixBucket, int] = {}

    def measure(self, buckets: Iterable[MixBucket]) -> None:
        """Measure the state of new buckets. The ranks of a node exchange their lengths."""
        for bucket in buckets:
            lengths = longest_on_node([local(param).numel() for param in bucket.params], self._world)
            self._lengths |= zip(bucket.params, lengths, strict=True)
            if bucket.residuals is not None:
                (length,) = longest_on_node([bucket.residuals.state_dict()[RESIDUALS[0]].numel()], self._world)
                self._residual_lengths[bucket] = length

    def added_to(self, state_dict: dict[str, Any], groups: list[Group], buckets: Iterable[MixBucket]) -> dict[str, Any]:
        """Return torch's state dict with a node axis in every tensor."""
        firsts = {bucket.params[0]: bucket for bucket in buckets}
        for packed, group in zip(state_dict["param_groups"], groups, strict=True):
            for number, param in zip(packed["params"], group["params"], strict=True):
                if param in self._lengths:
                    saved = self._saved(param, state_dict["state"].get(number, {}))
                    state_dict["state"][number] = saved | self._saved_bucket(firsts.get(param))
        return state_dict

    def _saved(self, param: Parameter, state: dict[str, Any]) -> dict[str, Any]:
        length = self._lengths[param]
        here = {HERE: self._axis.stacked(local(param), length), OWNER: self._axis.owner()}
        return stacked_state(self._axis, state, length) | here

    def _saved_bucket(self, bucket: MixBucket | None) -> dict[str, Tensor]:
        saved: dict[str, Tensor] = {}
        if bucket is not None and bucket.residuals is not None:
            length, residuals = self._residual_lengths[bucket], bucket.residuals.state_dict()
            saved |= {key: self._axis.stacked(residuals[key], length) for key in RESIDUALS}
        if bucket is not None and bucket.push_sum is not None:
            weight = torch.tensor([bucket.push_sum.weight], dtype=torch.float64)
            saved[PUSH_WEIGHT] = self._axis.stacked(weight, 1)
        return saved

    def taken_from(
        self, state_dict: dict[str, Any], groups: list[Group], buckets: Iterable[MixBucket], other_nodes: OtherNodes
    ) -> dict[str, Any]:
        """Load parameters and residuals, and return the rest for torch to load. Nothing changes if this raises."""
        check_sizes(state_dict["param_groups"], groups)
        if not any(state_dict["state"].values()) and self._lengths:
            raise InvalidArgumentError("the state to be loaded holds no replica: it was saved by another optimizer.")
        rest: dict[str, Any] = {"state": {}, "param_groups": state_dict["param_groups"]}
        firsts = {bucket.params[0]: bucket for bucket in buckets}
        values: list[Callable[[], object]] = []
        residuals: list[Callable[[], object]] = []
        for packed, group in zip(state_dict["param_groups"], groups, strict=True):
            for number, param in zip(packed["params"], group["params"], strict=True):
                saved = dict(state_dict["state"].get(number, {}))
                if saved and param in self._lengths:
                    if param in firsts:
                        residuals += self._load_bucket(firsts[param], saved)
                    values += self._load_value(param, saved, other_nodes)
                    take_state_(self._axis, saved, param, other_nodes)
                rest["state"][number] = saved
        with torch.no_grad():
            for commit in (*values, *residuals):
                commit()
        return rest

    def _load_value(
        self, param: Parameter, saved: dict[str, Any], other_nodes: OtherNodes
    ) -> list[Callable[[], object]]:
        self._axis.check_owner(required(saved, OWNER))
        here, value = local(param), required(saved, HERE)
        # New replicas start from the parameters that the model has.
        if other_nodes == "reset" and not self._axis.is_own(value):
            return []
        return [partial(here.copy_, self._axis.taken(value, here.shape, HERE, other_nodes))]

    def _load_bucket(self, bucket: MixBucket, saved: dict[str, Any]) -> list[Callable[[], object]]:
        """Return functions that load the residuals and the push-sum weight of a bucket, once nothing can fail any more.

        If they were saved by another number of nodes they are reset: then all replicas start from equal parameters.
        """
        commits: list[Callable[[], object]] = []
        if bucket.residuals is not None:
            states = {key: required(saved, key) for key in RESIDUALS}
            numel = bucket.residuals.state_dict()[RESIDUALS[0]].numel()
            if all(self._axis.is_own(state) for state in states.values()):
                own = {key: self._axis.taken(state, (numel,), key, "error") for key, state in states.items()}
                commits.append(partial(bucket.residuals.load_state_dict, own))
            else:
                commits.append(bucket.reset_residuals)
        if bucket.push_sum is not None:
            pushed = required(saved, PUSH_WEIGHT)
            weight = float(self._axis.taken(pushed, (), PUSH_WEIGHT, "error")) if self._axis.is_own(pushed) else 1.0
            commits.append(partial(bucket.push_sum.load_state_dict, {"weight": weight}))
        return commits
