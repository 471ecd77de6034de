"""FSDP2: every unit's shard is exchanged when its reduce-scatter is done, while the next unit's backward runs."""

from __future__ import annotations

from dataclasses import dataclass
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
class Place:
    """Where a parameter's shard lies in its unit's flat gradient."""

    name: str
    param: Parameter
    offset: int
    size: torch.Size

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.size.numel()].view(self.size)


def attach_to_units(model: Module, attachment: Attachment) -> None:
    """Exchange the gradients of every unit of ``model``, whose replicas become node 0's."""
    names = {param: name for name, param in model.named_parameters()}
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    found = [(unit, _places_in(unit, names, attachment)) for unit in units]
    backward = BackwardPass(attachment)
    for unit, places in found:
        if places:
            _watch(unit, places, attachment, backward)
    equalise_([*model.parameters(), *model.buffers()], attachment.world)


def _places_in(unit: FSDPModule, names: dict[Parameter, str], attachment: Attachment) -> list[Place]:
    """Return where the shards of a unit's parameters lie. torch tells that in attributes it keeps to itself."""
    places, offset = [], 0
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        _check_group(group)
        for one in group.fsdp_params:
            name = names[one.sharded_param]
            check_parameter(one.sharded_param, name, attachment.world.topology)
            places.append(Place(name, one.sharded_param, offset, one.sharded_size))
            offset += one.padded_sharded_param_size.numel()
    return places


def _check_group(group: Any) -> None:
    """Raise if what a hook sees would not be the node's mean."""
    policy = group.mp_policy
    dtypes = {one.sharded_param.dtype for one in group.fsdp_params}
    reduced_as = policy.reduce_dtype or policy.param_dtype or next(iter(dtypes), torch.float32)
    if reduced_as == torch.float16:
        raise InvalidArgumentError(
            "gradients are reduced as float16, which FSDP adds up without dividing and divides after the exchange: "
            "they overflow on the way. Use MixedPrecisionPolicy(reduce_dtype=torch.float32)."
        )
    if group.gradient_divide_factor is not None or group.force_sum_reduction_for_comms:
        raise InvalidArgumentError(
            "this unit divides its gradients by a factor of its own, after the exchange. Leave "
            "set_gradient_divide_factor and set_force_sum_reduction_for_comms alone, and scale the loss instead."
        )


def _watch(unit: FSDPModule, places: list[Place], attachment: Attachment, backward: BackwardPass) -> None:
    lot = Lot(0, True, tuple(place.param for place in places), tuple(place.name for place in places))
    dtype = _reduced_dtype(unit)
    attachment.remember(lot, [torch.empty(place.size, dtype=dtype, device=place.param.device) for place in places])

    def exchange(flat: Tensor) -> None:
        backward.send(lot, [place.of(flat) for place in places], at_once=_is_read_at_once(flat, places))

    unit.set_all_reduce_hook(exchange)
    attachment.on_detach(lambda: unit.set_all_reduce_hook(None))  # type: ignore[arg-type]


def _is_read_at_once(flat: Tensor, places: list[Place]) -> bool:
    """Return whether FSDP copies or adds up the flat gradient after the hook, instead of handing out views of it."""
    return any(
        place.param.grad is not None
        or place.param.dtype != flat.dtype
        or place.param.device != flat.device
        or bool(getattr(place.param, "_post_accumulate_grad_hooks", None))
        for place in places
    )


def _reduced_dtype(unit: FSDPModule) -> torch.dtype:
    (group,) = unit._get_fsdp_state()._fsdp_param_groups
    policy = group.mp_policy
    dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or group.fsdp_params[0].sharded_param.dtype
    return dtype
