"""All that flexdemo uses of torch and torch keeps private, but for ``torch._foreach_*``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.nn import Parameter

from flexcomm.torch_private import queue_callback as queue_callback
from flexcomm.versions import missing, private


def version_of(tensor: Tensor) -> int:
    """Return how often ``tensor`` was changed in place, as autograd counts it."""
    return int(private(tensor, "_version"))


def has_post_accumulate_grad_hooks(param: Tensor) -> bool:
    return bool(private(param, "_post_accumulate_grad_hooks"))


def mesh_without_groups(device_type: str, ranks: Sequence[Sequence[int]], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of ``ranks`` with axes ``names``, without the process groups that all ranks would have to make."""
    try:
        return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)
    except TypeError as error:
        raise missing("DeviceMesh(_init_backend=...)") from error


@dataclass(frozen=True)
class ParamGroup:
    """FSDP2's parameters whose gradients lie one behind the other, in this order, in one reduce-scatter.

    ``params``: the elements that each takes of the flat gradient, padding included.
    ``device``: where the flat gradient is; parameters that are offloaded are elsewhere.
    ``scales_gradients``: ``set_gradient_divide_factor`` or ``set_force_sum_reduction_for_comms`` was called.
    ``reduces_unused``: what ``set_reduce_scatter_unused_params`` was last called with.
    """

    params: dict[Parameter, int]
    device: torch.device
    reduce_dtype: torch.dtype
    has_all_reduce_hook: bool
    scales_gradients: bool
    reduces_unused: bool


def param_groups_of(unit: FSDPModule) -> list[ParamGroup]:
    """Return the parameter groups of a unit: none without parameters, several if they are on different meshes."""
    groups = []
    for group in private(private(unit, "_get_fsdp_state")(), "_fsdp_param_groups"):
        found = private(group, "fsdp_params")
        params = {private(one, "sharded_param"): private(one, "padded_sharded_param_size").numel() for one in found}
        policy: MixedPrecisionPolicy = private(found[0], "mp_policy")
        # torch 2.15 no longer reduces in the dtype in which it computes (docs of MixedPrecisionPolicy).
        computed = policy.param_dtype if torch.__version__ < "2.15" else None
        # The first that wants gradients, or else the first.
        trained = max(params, key=lambda param: param.requires_grad)
        groups.append(
            ParamGroup(
                params,
                private(group, "device"),
                policy.reduce_dtype or computed or trained.dtype,
                private(group, "_all_reduce_hook") is not None,
                private(group, "gradient_divide_factor") is not None or private(group, "force_sum_reduction_for_comms"),
                private(group, "reduce_scatter_unused_params"),
            )
        )
    return groups


def flat_param_of(unit: FullyShardedDataParallel) -> FlatParameter | None:
    """Return a unit's flat parameter; None if all it wraps is wrapped again inside."""
    handle = private(unit, "_handle")
    return None if handle is None else private(handle, "flat_param")


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
