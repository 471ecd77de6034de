"""FSDP2: every unit's shard is exchanged when its reduce-scatter is done, while the next unit's backward runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule

from flexcomm import InvalidArgumentError
from flexdemo.gradients import Bucket
from flexdemo.hooks.handle import BackwardPass
from flexdemo.parameters import broadcast_parameters_, check_parameter, local
from flexdemo.torch_private import has_post_accumulate_grad_hooks, param_groups_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

    from flexdemo.hooks.handle import HookHandle
    from flexdemo.torch_private import ParamGroup

__all__ = ["attach_to_units"]


@dataclass(frozen=True)
class Shard:
    """A parameter's shard, which takes ``padded`` elements of its unit's flat gradient."""

    name: str
    param: Parameter
    size: torch.Size
    padded: int


def attach_to_units(model: Module, handle: HookHandle) -> None:
    """Exchange the gradients of every unit of ``model``, whose replicas become node 0's."""
    names = {param: name for name, param in model.named_parameters()}
    found = [
        (unit, group, _shards_in(group, names, handle))
        for unit in model.modules()
        if isinstance(unit, FSDPModule)
        for group in param_groups_of(unit)
    ]
    _check_all_are_sharded(names, [shard for _, _, shards in found for shard in shards])
    handle.plan([(_bucket_of(tuple(shards)), _likes(group, shards, handle)) for _, group, shards in found])
    backward = BackwardPass(handle)
    for unit, group, shards in found:
        _watch(unit, group, shards, handle, backward)
    broadcast_parameters_([*model.parameters(), *model.buffers()], handle.world)


def _shards_in(group: ParamGroup, names: dict[Parameter, str], handle: HookHandle) -> list[Shard]:
    """Return the shards of a group's parameters, in order."""
    _check_group(group)
    shards = []
    for one in group.params:
        name = names[one.param]
        check_parameter(one.param, name, handle.world.topology)
        _check_grad_dtype(one.param, name)
        shards.append(Shard(name, one.param, local(one.param).shape, one.padded_numel))
    return shards


def _check_all_are_sharded(names: dict[Parameter, str], shards: list[Shard]) -> None:
    sharded = {shard.param for shard in shards}
    left = [name for param, name in names.items() if param.requires_grad and param not in sharded]
    if left:
        raise InvalidArgumentError(
            f"{', '.join(left)} belong to no unit of FSDP, so nobody would average their gradients: call "
            f"fully_shard(model, mesh=...) on the model itself, or freeze them."
        )


def _check_group(group: ParamGroup) -> None:
    """Raise if what a hook sees would not be the node's mean."""
    if group.has_all_reduce_hook:
        raise InvalidArgumentError("this model has an all-reduce hook already: remove() the handle it has first.")
    if group.reduce_dtype == torch.float16:
        raise InvalidArgumentError(
            "gradients are reduced as float16, which FSDP adds up without dividing and divides after the exchange: "
            "they overflow on the way. Use MixedPrecisionPolicy(reduce_dtype=torch.float32)."
        )
    if group.scales_gradients:
        raise InvalidArgumentError(
            "this unit divides its gradients by a factor of its own, after the exchange. Leave "
            "set_gradient_divide_factor and set_force_sum_reduction_for_comms alone, and scale the loss instead."
        )


def _check_grad_dtype(param: Parameter, name: str) -> None:
    """Raise if gradients are not of the parameter's dtype: torch 2.15 then reduces parameters in another order."""
    if param.grad_dtype != param.dtype:
        raise InvalidArgumentError(
            f"{name} is {param.dtype} but wants gradients of {param.grad_dtype}. Leave grad_dtype alone; the dtype in "
            f"which gradients are averaged is MixedPrecisionPolicy(reduce_dtype=...)."
        )


def _watch(
    unit: FSDPModule, group: ParamGroup, shards: list[Shard], handle: HookHandle, backward: BackwardPass
) -> None:
    bucket_of = lru_cache(maxsize=None)(_bucket_of)

    def exchange(flat: Tensor) -> None:
        trained = tuple(shard for shard in shards if shard.param.requires_grad)
        gradients = _cut(flat, trained)
        backward.send(bucket_of(trained), gradients, at_once=_is_read_at_once(flat, trained))

    # Else torch leaves unused parameters out, and which ones may differ from rank to rank.
    unit.set_reduce_scatter_unused_params(True, recurse=False)
    unit.set_all_reduce_hook(exchange)
    handle.on_remove(lambda: unit.set_reduce_scatter_unused_params(group.reduces_unused, recurse=False))
    handle.on_remove(lambda: unit.set_all_reduce_hook(None))  # type: ignore[arg-type]


def _likes(group: ParamGroup, shards: list[Shard], handle: HookHandle) -> list[Tensor]:
    """Return tensors shaped as the gradients that the hook will see."""
    return [torch.empty(shard.size, dtype=group.reduce_dtype, device=handle.world.device) for shard in shards]


def _bucket_of(shards: tuple[Shard, ...]) -> Bucket:
    return Bucket(0, True, tuple(shard.param for shard in shards), tuple(shard.name for shard in shards))


def _cut(flat: Tensor, shards: tuple[Shard, ...]) -> list[Tensor]:
    """Return the shards that lie one behind the other in a unit's flat gradient."""
    needed = sum(shard.padded for shard in shards)
    if flat.numel() != needed:
        raise InvalidArgumentError(
            f"a unit of FSDP reduced {flat.numel()} elements, but its parameters that want gradients "
            f"({', '.join(shard.name for shard in shards)}) have {needed}: freeze parameters between steps only."
        )
    begins = accumulate((shard.padded for shard in shards), initial=0)
    return [
        flat[begin : begin + shard.size.numel()].view(shard.size) for begin, shard in zip(begins, shards, strict=False)
    ]


def _is_read_at_once(flat: Tensor, shards: tuple[Shard, ...]) -> bool:
    """Return whether FSDP copies or adds up the flat gradient after the hook, instead of handing out views of it."""
    return any(
        shard.param.grad is not None
        or shard.param.dtype != flat.dtype
        or shard.param.device != flat.device
        or has_post_accumulate_grad_hooks(shard.param)
        for shard in shards
    )
