"""FSDP2: every unit's shard is exchanged when its reduce-scatter is done, while the next unit's backward runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from flexcomm import InvalidArgumentError
from flexdemo.backward import BackwardPass
from flexdemo.lots import Lot
from flexdemo.parameters import check_parameter
from flexdemo.replicas import equalise_

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

    from flexdemo.attachment import Attachment

__all__ = ["attach_to_units"]


@dataclass(frozen=True)
class Shard:
    """A parameter's shard, which takes ``padded`` elements of its unit's flat gradient."""

    name: str
    param: Parameter
    size: torch.Size
    padded: int


def attach_to_units(model: Module, attachment: Attachment) -> None:
    """Exchange the gradients of every unit of ``model``, whose replicas become node 0's."""
    names = {param: name for name, param in model.named_parameters()}
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    found = [(unit, _shards_in(unit, names, attachment)) for unit in units]
    _check_all_are_sharded(names, [shard for _, shards in found for shard in shards])
    backward = BackwardPass(attachment)
    for unit, shards in found:
        if shards:
            _watch(unit, shards, attachment, backward)
    equalise_([*model.parameters(), *model.buffers()], attachment.world)


def _shards_in(unit: FSDPModule, names: dict[Parameter, str], attachment: Attachment) -> list[Shard]:
    """Return the shards of a unit's parameters, in order. torch tells that in attributes it keeps to itself."""
    shards = []
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        _check_group(group)
        for one in group.fsdp_params:
            name = names[one.sharded_param]
            check_parameter(one.sharded_param, name, attachment.world.topology)
            shards.append(Shard(name, one.sharded_param, one.sharded_size, one.padded_sharded_param_size.numel()))
    return shards


def _check_all_are_sharded(names: dict[Parameter, str], shards: list[Shard]) -> None:
    sharded = {shard.param for shard in shards}
    left = [name for param, name in names.items() if param.requires_grad and param not in sharded]
    if left:
        raise InvalidArgumentError(
            f"{', '.join(left)} belong to no unit of FSDP, so nobody would average their gradients: call "
            f"fully_shard(model, mesh=...) on the model itself, or freeze them."
        )


def _check_group(group: Any) -> None:
    """Raise if what a hook sees would not be the node's mean."""
    if group._all_reduce_hook is not None:
        raise InvalidArgumentError("this model has an all-reduce hook already: detach the attachment it has first.")
    if _reduced_as(group) == torch.float16:
        raise InvalidArgumentError(
            "gradients are reduced as float16, which FSDP adds up without dividing and divides after the exchange: "
            "they overflow on the way. Use MixedPrecisionPolicy(reduce_dtype=torch.float32)."
        )
    if group.gradient_divide_factor is not None or group.force_sum_reduction_for_comms:
        raise InvalidArgumentError(
            "this unit divides its gradients by a factor of its own, after the exchange. Leave "
            "set_gradient_divide_factor and set_force_sum_reduction_for_comms alone, and scale the loss instead."
        )


def _watch(unit: FSDPModule, shards: list[Shard], attachment: Attachment, backward: BackwardPass) -> None:
    (group,) = unit._get_fsdp_state()._fsdp_param_groups
    likes = [torch.empty(shard.size, dtype=_reduced_as(group), device=attachment.world.device) for shard in shards]
    attachment.remember(_lot_of(tuple(shards)), likes)
    lot_of = lru_cache(maxsize=None)(_lot_of)

    def exchange(flat: Tensor) -> None:
        trained = tuple(shard for shard in shards if shard.param.requires_grad)
        gradients = _cut(flat, trained)
        backward.send(lot_of(trained), gradients, at_once=_is_read_at_once(flat, trained))

    # Else torch leaves unused parameters out, and which ones may differ from rank to rank.
    includes_unused = group.reduce_scatter_unused_params
    unit.set_reduce_scatter_unused_params(True, recurse=False)
    unit.set_all_reduce_hook(exchange)
    attachment.on_detach(lambda: unit.set_reduce_scatter_unused_params(includes_unused, recurse=False))
    attachment.on_detach(lambda: unit.set_all_reduce_hook(None))  # type: ignore[arg-type]


def _lot_of(shards: tuple[Shard, ...]) -> Lot:
    return Lot(0, True, tuple(shard.param for shard in shards), tuple(shard.name for shard in shards))


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
        or bool(getattr(shard.param, "_post_accumulate_grad_hooks", None))
        for shard in shards
    )


def _reduced_as(group: Any) -> torch.dtype:  # torch's FSDPParamGroup, which it keeps to itself
    policy = group.mp_policy
    dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or group.fsdp_params[0].sharded_param.dtype
    return dtype
