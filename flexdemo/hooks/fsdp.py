"""Hooks for models that FSDP shards inside a node: FSDP2 here, FSDP1 in its own module.

A unit's shard is exchanged when FSDP has reduce-scattered it inside the node, while the next unit's backward runs.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Module, Parameter

from flexcomm import Average, Compressor, InvalidArgumentError, NonFinitePolicy, World
from flexdemo.gradients import Bucket
from flexdemo.hooks.fsdp1 import attach_to_fsdp1
from flexdemo.hooks.handle import BackwardPass, HookHandle
from flexdemo.parameters import broadcast_parameters_, check_parameter, local
from flexdemo.torch_private import ParamGroup, ShardedParam, has_post_accumulate_grad_hooks, param_groups_of


def attach_to_fsdp(
    model: Module,
    compressor: Compressor,
    *,
    world: World | None = None,
    decay: float = 1.0,
    average: Average = "nodes",
    nonfinite: NonFinitePolicy = "raise",
) -> HookHandle:
    """Exchange the gradients of a model that FSDP shards inside a node between nodes; the optimizer stays yours.

    The model's replicas become node 0's. FSDP averages gradients inside the node, and no rank holds more of them than
    its shard. What is not sent now is kept, decayed, and added next time: any optimizer can use what arrives. A unit's
    exchange overlaps the backward of the next ones, if gradients are reduced in the parameters' dtype and not
    accumulated.

    Args:
        model: sharded by FSDP2 (``fully_shard``) or FSDP1 over the ranks of a node.
        compressor: what is sent between nodes.
        world: the ranks; those that ``flexcomm.connect()`` finds, if none are given.
        decay: the share of the residual that is left after a step.
        average: divide by all ``"nodes"``, or by the ``"contributors"`` of each coefficient.
        nonfinite: what NaN or infinity on any rank does: ``"raise"`` on all, ``"skip"`` (gradients are zero), or count
            as ``"zero"``.

    Returns:
        A handle that is saved beside the model (``state_dict``), and whose ``remove()`` takes the hooks away.

    Raises:
        InvalidArgumentError: the model is not sharded, or gradients are not the node's mean; it says what to do.

    """
    handle = HookHandle(compressor, world, decay=decay, average=average, nonfinite=nonfinite)
    if isinstance(model, FullyShardedDataParallel):
        attach_to_fsdp1(model, handle)
    elif any(isinstance(module, FSDPModule) for module in model.modules()):
        _attach_to_fsdp2(model, handle)
    else:
        raise InvalidArgumentError(
            f"{type(model).__name__} is not sharded: call fully_shard(model, mesh=mesh['shard']) before, or use "
            f"attach_to_ddp."
        )
    return handle


def _attach_to_fsdp2(model: Module, handle: HookHandle) -> None:
    """Exchange the gradients of every unit of ``model``, whose replicas become node 0's."""
    names = {param: name for name, param in model.named_parameters()}
    found = [
        (unit, group) for unit in model.modules() if isinstance(unit, FSDPModule) for group in param_groups_of(unit)
    ]
    for _, group in found:
        _check_group(group, names, handle.world)
    _check_all_are_sharded(names, {one.param for _, group in found for one in group.params})
    handle.plan([(_bucket_of(group.params, names), _gradients_like(group, handle.world)) for _, group in found])
    backward = BackwardPass(handle)
    for unit, group in found:
        _set_hook(unit, group, names, handle, backward)
    broadcast_parameters_([*model.parameters(), *model.buffers()], handle.world)


def _set_hook(
    unit: FSDPModule, group: ParamGroup, names: dict[Parameter, str], handle: HookHandle, backward: BackwardPass
) -> None:
    @cache
    def plan(trained: tuple[ShardedParam, ...]) -> tuple[Bucket, list[torch.Size]]:
        return _bucket_of(trained, names), [local(one.param).shape for one in trained]

    def exchange(flat: Tensor) -> None:
        trained = tuple(one for one in group.params if one.param.requires_grad)
        bucket, shapes = plan(trained)
        gradients = _cut(flat, shapes, [one.padded_numel for one in trained], bucket.names)
        backward.send(bucket, gradients, at_once=_is_read_at_once(flat, trained))

    # Else torch leaves unused parameters out, and which ones may differ from rank to rank.
    unit.set_reduce_scatter_unused_params(True, recurse=False)
    unit.set_all_reduce_hook(exchange)
    handle.on_remove(lambda: unit.set_reduce_scatter_unused_params(group.reduces_unused, recurse=False))
    handle.on_remove(lambda: unit.set_all_reduce_hook(None))  # type: ignore[arg-type]


def _bucket_of(params: tuple[ShardedParam, ...], names: dict[Parameter, str]) -> Bucket:
    return Bucket(0, True, tuple(one.param for one in params), tuple(names[one.param] for one in params))


def _gradients_like(group: ParamGroup, world: World) -> list[Tensor]:
    """Return tensors shaped as the gradients that the hook will see."""
    return [torch.empty(local(one.param).shape, dtype=group.reduce_dtype, device=world.device) for one in group.params]


def _cut(flat: Tensor, shapes: list[torch.Size], numels: list[int], names: tuple[str, ...]) -> list[Tensor]:
    """Return the shards that lie one behind the other in a unit's flat gradient, padded to ``numels``."""
    if flat.numel() != sum(numels):
        raise InvalidArgumentError(
            f"a unit of FSDP reduced {flat.numel()} elements, but its parameters that want gradients "
            f"({', '.join(names)}) have {sum(numels)}: freeze parameters between steps only."
        )
    begins = accumulate(numels, initial=0)
    return [flat[begin : begin + shape.numel()].view(shape) for begin, shape in zip(begins, shapes, strict=False)]


def _is_read_at_once(flat: Tensor, params: tuple[ShardedParam, ...]) -> bool:
    """Return whether FSDP copies or adds up the flat gradient after the hook, instead of handing out views of it."""
    return any(
        one.param.grad is not None
        or one.param.dtype != flat.dtype
        or one.param.device != flat.device
        or has_post_accumulate_grad_hooks(one.param)
        for one in params
    )


def _check_all_are_sharded(names: dict[Parameter, str], sharded: set[Parameter]) -> None:
    left = [name for param, name in names.items() if param.requires_grad and param not in sharded]
    if left:
        raise InvalidArgumentError(
            f"{', '.join(left)} belong to no unit of FSDP, so nobody would average their gradients: call "
            f"fully_shard(model, mesh=...) on the model itself, or freeze them."
        )


def _check_group(group: ParamGroup, names: dict[Parameter, str], world: World) -> None:
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
    for one in group.params:
        check_parameter(one.param, names[one.param], world.topology)
        # torch 2.15 then reduces parameters in another order.
        if one.param.grad_dtype != one.param.dtype:
            raise InvalidArgumentError(
                f"{names[one.param]} is {one.param.dtype} but wants gradients of {one.param.grad_dtype}. Leave "
                f"grad_dtype alone; gradients are averaged in the dtype of MixedPrecisionPolicy(reduce_dtype=...)."
            )
