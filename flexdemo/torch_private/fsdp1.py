"""FSDP1: the flat parameter of a unit, and the state that its communication hook is called with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

from flexcomm.torch_versions import missing, private

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["flat_params_of", "has_saved_gradient", "remove_comm_hook", "set_comm_hook_state"]


def flat_params_of(unit: FullyShardedDataParallel) -> list[FlatParameter]:
    """Return a unit's flat parameter; none if all it wraps is wrapped again inside."""
    handle = private(unit, "_handle")
    return [] if handle is None else [private(handle, "flat_param")]


def set_comm_hook_state(unit: FullyShardedDataParallel, state: object) -> None:
    """Give one unit a hook state of its own: ``register_comm_hook`` gives the same one to all units."""
    private(unit, "_comm_hook_state")
    # torch deletes the attribute between backward passes, so only its declaration can be looked up.
    if "_saved_grad_shard" not in FlatParameter.__annotations__:
        raise missing("FlatParameter._saved_grad_shard")
    unit._comm_hook_state = state


def remove_comm_hook(unit: FullyShardedDataParallel) -> None:
    private(unit, "_comm_hook")
    unit._comm_hook = unit._comm_hook_state = None


def has_saved_gradient(flat_param: Tensor) -> bool:
    """Return whether FSDP adds the next gradient to one of an earlier backward pass."""
    return getattr(flat_param, "_saved_grad_shard", None) is not None
