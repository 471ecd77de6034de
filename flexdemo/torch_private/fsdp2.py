"""FSDP2: what a unit reduces together, and as what. FSDPModule has setters for most of it, but no getters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flexcomm.torch_versions import private

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
    from torch.nn import Parameter

__all__ = ["ParamGroup", "ShardedParam", "param_groups_of"]


@dataclass(frozen=True)
class ShardedParam:
    """A sharded parameter, which takes ``padded_numel`` elements of its group's flat gradient."""

    param: Parameter
    padded_numel: int


@dataclass(frozen=True)
class ParamGroup:
    """Parameters whose gradients lie one behind the other, in this order, in one reduce-scatter.

    ``scales_gradients``: ``set_gradient_divide_factor`` or ``set_force_sum_reduction_for_comms`` was called.
    ``reduces_unused``: what ``set_reduce_scatter_unused_params`` was last called with.
    """

    params: tuple[ShardedParam, ...]
    reduce_dtype: torch.dtype
    has_all_reduce_hook: bool
    scales_gradients: bool
    reduces_unused: bool


def param_groups_of(unit: FSDPModule) -> list[ParamGroup]:
    """Return the parameter groups of a unit: none without parameters, several if they are on different meshes."""
    state = private(unit, "_get_fsdp_state")()
    return [_read(group) for group in private(state, "_fsdp_param_groups")]


def _read(group: Any) -> ParamGroup:  # torch's FSDPParamGroup
    found = private(group, "fsdp_params")
    params = tuple(
        ShardedParam(private(one, "sharded_param"), private(one, "padded_sharded_param_size").numel()) for one in found
    )
    trained = [one.param for one in params if one.param.requires_grad] or [params[0].param]
    return ParamGroup(
        params,
        _reduce_dtype(private(found[0], "mp_policy"), trained[0].dtype),
        private(group, "_all_reduce_hook") is not None,
        private(group, "gradient_divide_factor") is not None or private(group, "force_sum_reduction_for_comms"),
        private(group, "reduce_scatter_unused_params"),
    )


def _reduce_dtype(policy: MixedPrecisionPolicy, param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of parameters of ``param_dtype`` are reduced."""
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    # torch 2.15 no longer reduces in the dtype in which it computes (docs of MixedPrecisionPolicy).
    if torch.__version__ < "2.15" and policy.param_dtype is not None:
        return policy.param_dtype
    return param_dtype
