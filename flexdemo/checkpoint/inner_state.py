"""The state of a node's own optimizer: what torch keeps for a parameter, with a node axis, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from flexcomm import InvalidArgumentError
from flexdemo.parameters import local, wrapped_like

if TYPE_CHECKING:
    from torch.nn import Parameter

    from flexdemo.checkpoint.node_axis import NodeAxis, OtherNodes
    from flexdemo.parameters import Group

__all__ = ["check_sizes", "required", "stacked_state", "take_state_"]

_SCALAR = " (one)"
"""Marks a number of a node's own among tensors."""


def stacked_state(axis: NodeAxis, state: dict[str, Any], length: int) -> dict[str, Any]:
    """Return a parameter's state, of up to ``length`` elements, with a node axis. Counters, too: nodes may differ."""
    own: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            own[key] = value
        elif value.dim():
            own[key] = axis.stacked(local(value), length)
        else:
            own[f"{key}{_SCALAR}"] = axis.stacked(value, 1)
    return own


def take_state_(axis: NodeAxis, saved: dict[str, Any], param: Parameter, other_nodes: OtherNodes) -> None:
    """Replace what :func:`stacked_state` made by what this rank's optimizer goes on with."""
    shape = local(param).shape
    for key in [key for key, value in saved.items() if isinstance(value, Tensor)]:
        value = saved.pop(key)
        if key.endswith(_SCALAR):
            saved[key.removesuffix(_SCALAR)] = axis.taken(value, (), key, other_nodes)
        else:
            saved[key] = wrapped_like(axis.taken(value, shape, key, other_nodes), param)


def required(saved: dict[str, Any], key: str) -> Tensor:
    """Take a tensor out of what was saved for a parameter."""
    if key not in saved:
        raise InvalidArgumentError(
            f"the state to be loaded has no {key}, but {', '.join(map(str, saved)) or 'nothing'}: it was saved by "
            f"another optimizer, or by one with other settings, such as sync_every, outer, compressor or schedule."
        )
    value: Tensor = saved.pop(key)
    return value


def check_sizes(saved: list[dict[str, Any]], groups: list[Group]) -> None:
    """Raise unless what was saved has as many groups, of as many parameters."""
    sizes = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes[0] != sizes[1]:
        raise InvalidArgumentError(
            f"the state to be loaded has groups of {sizes[0]} parameters, but this optimizer has {sizes[1]}."
        )
