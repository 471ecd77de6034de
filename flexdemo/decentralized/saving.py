"""What a replica is and remembers, into a state dict with a node axis and back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexcomm import InvalidArgumentError
from flexdemo.checkpoint.entries import longest_on_node
from flexdemo.checkpoint.inner_state import check_sizes, required, stacked_state, take_state_
from flexdemo.checkpoint.node_axis import NodeAxis
from flexdemo.parameters import local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.nn import Parameter

    from flexcomm import World
    from flexdemo.checkpoint.node_axis import OtherNodes
    from flexdemo.decentralized.parts import Part
    from flexdemo.parameters import Group

__all__ = ["ReplicaMemory"]

HERE, OWNER, PUSH_WEIGHT = "here", "owner", "push_weight"
"""Where this replica is, whose it is, and its weight of push-sum."""
KNOWN = ("public", "public_sum")
"""What compressed mixing remembers: of a whole part, kept with the first of its parameters."""


class ReplicaMemory:
    """Parameters, moments, and the memory of compressed mixing: all of them differ from replica to replica."""

    def __init__(self, world: World) -> None:
        self._world, self._axis = world, NodeAxis(world)
        self._lengths: dict[Parameter, int] = {}
        self._known_lengths: dict[Part, int] = {}

    def measure(self, parts: Iterable[Part]) -> None:
        """Plan what is kept of parts that joined. The ranks of a node tell each other how much that is."""
        for part in parts:
            lengths = longest_on_node([local(param).numel() for param in part.params], self._world)
            self._lengths |= zip(part.params, lengths, strict=True)
            if part.memory is not None:
                (length,) = longest_on_node([part.memory.state_dict()[KNOWN[0]].numel()], self._world)
                self._known_lengths[part] = length

    def added_to(self, state_dict: dict[str, Any], groups: list[Group], parts: list[Part]) -> dict[str, Any]:
        """Return torch's state dict with a node axis in all of it."""
        firsts = {part.params[0]: part for part in parts}
        for packed, group in zip(state_dict["param_groups"], groups, strict=True):
            for number, param in zip(packed["params"], group["params"], strict=True):
                if param in self._lengths:
                    saved = self._saved(param, state_dict["state"].get(number, {}))
                    state_dict["state"][number] = saved | self._saved_part(firsts.get(param))
        return state_dict

    def _saved(self, param: Parameter, state: dict[str, Any]) -> dict[str, Any]:
        length = self._lengths[param]
        here = {HERE: self._axis.stacked(local(param), length), OWNER: self._axis.owner()}
        return stacked_state(self._axis, state, length) | here

    def _saved_part(self, part: Part | None) -> dict[str, Tensor]:
        saved: dict[str, Tensor] = {}
        if part is not None and part.memory is not None:
            length, known = self._known_lengths[part], part.memory.state_dict()
            saved |= {key: self._axis.stacked(known[key], length) for key in KNOWN}
        if part is not None and part.push_sum is not None:
            weight = torch.tensor([part.push_sum.weight], dtype=torch.float64)
            saved[PUSH_WEIGHT] = self._axis.stacked(weight, 1)
        return saved

    def taken_from(
        self, state_dict: dict[str, Any], groups: list[Group], parts: list[Part], other_nodes: OtherNodes
    ) -> dict[str, Any]:
        """Take parameters and memories, and return the rest for torch to load. Nothing changes if this raises."""
        check_sizes(state_dict["param_groups"], groups)
        if not any(state_dict["state"].values()) and self._lengths:
            raise InvalidArgumentError("the state to be loaded is of no replica: it was saved by another optimizer.")
        rest: dict[str, Any] = {"state": {}, "param_groups": state_dict["param_groups"]}
        firsts = {part.params[0]: part for part in parts}
        places: list[Callable[[], object]] = []
        memories: list[Callable[[], object]] = []
        for packed, group in zip(state_dict["param_groups"], groups, strict=True):
            for number, param in zip(packed["params"], group["params"], strict=True):
                saved = dict(state_dict["state"].get(number, {}))
                if saved and param in self._lengths:
                    if param in firsts:
                        memories += self._take_part(firsts[param], saved)
                    places += self._take_place(param, saved, other_nodes)
                    take_state_(self._axis, saved, param, other_nodes)
                rest["state"][number] = saved
        with torch.no_grad():
            for commit in (*places, *memories):
                commit()
        return rest

    def _take_place(
        self, param: Parameter, saved: dict[str, Any], other_nodes: OtherNodes
    ) -> list[Callable[[], object]]:
        self._axis.check_owner(required(saved, OWNER))
        here, stood = local(param), required(saved, HERE)
        # Replicas that begin anew begin where the model says.
        if other_nodes == "reset" and not self._axis.is_own(stood):
            return []
        return [partial(here.copy_, self._axis.taken(stood, here.shape, HERE, other_nodes))]

    def _take_part(self, part: Part, saved: dict[str, Any]) -> list[Callable[[], object]]:
        """Return what takes a part's memory; that of other nodes says nothing here, where all then begin alike."""
        commits: list[Callable[[], object]] = []
        if part.memory is not None:
            known = {key: required(saved, key) for key in KNOWN}
            numel = part.memory.state_dict()[KNOWN[0]].numel()
            if all(self._axis.is_own(kept) for kept in known.values()):
                mine = {key: self._axis.taken(kept, (numel,), key, "error") for key, kept in known.items()}
                commits.append(partial(part.memory.load_state_dict, mine))
            else:
                commits.append(part.begin_memory)
        if part.push_sum is not None:
            pushed = required(saved, PUSH_WEIGHT)
            weight = float(self._axis.taken(pushed, (), PUSH_WEIGHT, "error")) if self._axis.is_own(pushed) else 1.0
            commits.append(partial(part.push_sum.load_state_dict, {"weight": weight}))
        return commits
