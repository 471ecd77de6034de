"""The state of a node's own optimizer: what torch keeps for a parameter, with a node axis, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from flexdemo.parameters import local, wrapped_like

if TYPE_CHECKING:
    from torch.nn import Parameter

    from flexdemo.checkpoint import NodeAxis, OtherNodes

__all__ = ["stacked_state", "take_state_"]

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
