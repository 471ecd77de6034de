"""Hooks for FSDP2 and FSDP1: a unit's shard is exchanged once it is reduced inside the node, during later backwards."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.nn import Module, Parameter

from flexcomm import Average, Compressor, FlexcommError, InvalidArgumentError, NonFinitePolicy, TransportError, World
from flexcomm.device import record_stream
from flexdemo import torch_private
from flexdemo.gradients import Bucket, spec_of
from flexdemo.hooks.handle import HookHandle
from flexdemo.parameters import broadcast_parameters_, check_parameter, check_sharded_ranks, local
from flexdemo.torch_private import ParamGroup


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

    The model's replicas become node 0's. FSDP averages gradients inside the node, and each rank exchanges its shard.
    What is not sent now is kept, decayed, and added next time. A unit's exchange overlaps the backward of the next
    ones, if gradients are reduced in the parameters' dtype and not accumulated.

    Args:
        model: sharded by FSDP2 (``fully_shard``) or FSDP1 over the ranks of a node.
        compressor: what is sent between nodes.
        world: the ranks; those that ``flexcomm.connect()`` finds, if none are given.
        decay: the share of the residual that is left after a step.
        average: divide by all ``"nodes"``, or by the ``"contributors"`` of each coefficient.
        nonfinite: what NaN or infinity on any rank does: ``"raise"``, ``"skip"`` (all gradients are zero), ``"zero"``.

    Returns:
        A handle that is saved beside the model (``state_dict``), and whose ``remove()`` takes the hooks away.

    Raises:
        InvalidArgumentError: the model is not sharded, or gradients are not the node's mean; it says what to do.

    """
    handle = FsdpHandle(compressor, world, decay=decay, average=average, nonfinite=nonfinite)
    if isinstance(model, FullyShardedDataParallel):
        _attach_to_fsdp1(model, handle)
    elif any(isinstance(module, FSDPModule) for module in model.modules()):
        _attach_to_fsdp2(model, handle)
    else:
        raise InvalidArgumentError(
            f"{type(model).__name__} is not sharded: call fully_shard(model, mesh=mesh['shard']) before, or use "
            f"attach_to_ddp."
        )
    return handle


class FsdpHandle(HookHandle):
    """A handle that exchanges the units of one backward pass, and writes their averages at its end.

    Errors are raised when the pass ends: FSDP does not survive an exception in the middle of it.
    """

    _has_sent = False
    _failure: FlexcommError | None = None

    def send(self, bucket: Bucket, gradients: list[Tensor], at_once: bool) -> None:
        """Exchange gradients in place: until this returns if ``at_once``, else until the backward pass ends."""
        # With every send: a pass that failed has dropped its callbacks, and left its exchange under way.
        torch_private.queue_callback(self._end_backward)
        if bucket in self._sent:
            self.sync.cancel()
            self._sent = {}
        self._has_sent = True
        self.start(bucket, gradients)
        if at_once:
            self._receive()

    def _end_backward(self) -> None:
        if not self._has_sent:
            return
        self._receive()
        self._has_sent = False
        self.step += 1
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _receive(self) -> None:
        """Write what was received over what was sent, zeros if it failed."""
        sent = self._sent
        if not sent:
            return
        try:
            self.finish()
        except TransportError:
            raise
        except FlexcommError as failure:
            self._failure = self._failure or failure
            torch._foreach_zero_([gradient for gradients in sent.values() for gradient in gradients])


def _attach_to_fsdp2(model: Module, handle: FsdpHandle) -> None:
    names = {param: name for name, param in model.named_parameters()}
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    found = [(unit, group) for unit in units for group in torch_private.param_groups_of(unit)]
    for _, group in found:
        _check_group(group, names, handle.world)
    sharded = {param for _, group in found for param in group.params}
    left = [name for param, name in names.items() if param.requires_grad and param not in sharded]
    if left:
        raise InvalidArgumentError(
            f"{', '.join(left)} belong to no unit of FSDP, so nobody would average their gradients: call "
            f"fully_shard(model, mesh=...) on the model itself, or freeze them."
        )
    handle.plan([_bucket_of(group, group.params, names) for _, group in found])
    for unit, group in found:
        _set_hook(unit, group, names, handle)
    broadcast_parameters_([*model.parameters(), *model.buffers()], handle.world)


def _set_hook(unit: FSDPModule, group: ParamGroup, names: dict[Parameter, str], handle: FsdpHandle) -> None:
    @cache
    def bucket_of(trained: tuple[Parameter, ...]) -> Bucket:
        return _bucket_of(group, trained, names)

    def exchange(flat: Tensor) -> None:
        trained = tuple(param for param in group.params if param.requires_grad)
        bucket, numels = bucket_of(trained), [group.params[param] for param in trained]
        if flat.numel() != sum(numels):
            raise InvalidArgumentError(
                f"a unit of FSDP reduced {flat.numel()} elements, but its parameters that want gradients "
                f"({', '.join(bucket.names)}) have {sum(numels)}: freeze parameters between steps only."
            )
        padded = torch.split_with_sizes(flat, numels)
        shards = [x[: math.prod(spec.shape)].view(spec.shape) for x, spec in zip(padded, bucket.specs, strict=True)]
        # It was allocated on the stream of reduce-scatters, and where FSDP then copies it to the parameters' dtype, or
        # adds it to other gradients, it is freed while this stream is still at it.
        record_stream(flat)
        # After the hook FSDP keeps views of the flat gradient, except where it copies it or adds it to another.
        at_once = any(
            param.grad is not None
            or param.dtype != flat.dtype
            or param.device != flat.device
            or torch_private.has_post_accumulate_grad_hooks(param)
            for param in trained
        )
        handle.send(bucket, shards, at_once)

    # Else torch leaves unused parameters out, and which ones may differ from rank to rank.
    unit.set_reduce_scatter_unused_params(True, recurse=False)
    unit.set_all_reduce_hook(exchange)
    handle.on_remove.callback(unit.set_reduce_scatter_unused_params, group.reduces_unused, recurse=False)
    handle.on_remove.callback(unit.set_all_reduce_hook, None)  # type: ignore[arg-type]


def _bucket_of(group: ParamGroup, params: Iterable[Parameter], names: dict[Parameter, str]) -> Bucket:
    specs = [spec_of(local(param), names[param])._replace(dtype=group.reduce_dtype) for param in params]
    return Bucket(0, True, group.device, tuple(params), tuple(specs))


def _check_group(group: ParamGroup, names: dict[Parameter, str], world: World) -> None:
    """Raise if what a hook sees would not be the node's mean."""
    if group.has_all_reduce_hook:
        raise InvalidArgumentError("this model has an all-reduce hook already: remove() the handle it has first.")
    _check_reduce_dtype(group.reduce_dtype)
    if group.scales_gradients:
        raise InvalidArgumentError(
            "this unit divides its gradients by a factor of its own, after the exchange. Leave "
            "set_gradient_divide_factor and set_force_sum_reduction_for_comms alone, and scale the loss instead."
        )
    for param in group.params:
        check_parameter(param, names[param], world.topology)
        # torch 2.15 then reduces parameters in another order.
        if param.grad_dtype != param.dtype:
            raise InvalidArgumentError(
                f"{names[param]} is {param.dtype} but wants gradients of {param.grad_dtype}. Leave grad_dtype alone; "
                f"gradients are averaged in the dtype of MixedPrecisionPolicy(reduce_dtype=...)."
            )


def _attach_to_fsdp1(model: FullyShardedDataParallel, handle: FsdpHandle) -> None:
    units = [
        (name or "root", unit, flat_param)
        for name, unit in model.named_modules()
        if isinstance(unit, FullyShardedDataParallel) and (flat_param := torch_private.flat_param_of(unit)) is not None
    ]
    for name, unit, _ in units:
        _check_unit(name, unit, handle.world)
    model.register_comm_hook(None, _reduce_flat)
    buckets = []
    for name, unit, flat_param in units:
        dtype = unit.mixed_precision.reduce_dtype or unit.mixed_precision.param_dtype or flat_param.dtype
        spec = spec_of(flat_param, name)._replace(dtype=dtype)
        buckets.append(Bucket(0, True, flat_param.device, (flat_param,), (spec,)))
        torch_private.set_comm_hook_state(unit, (handle, buckets[-1]))
    handle.plan(buckets)
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle.on_remove.callback(torch_private.remove_comm_hook, unit)
    broadcast_parameters_([*(param for bucket in buckets for param in bucket.params), *model.buffers()], handle.world)


def _reduce_flat(state: tuple[FsdpHandle, Bucket], gradient: Tensor, shard: Tensor) -> None:
    """Fill ``shard`` with this rank's part of the node's mean, to be exchanged in place; FSDP1 calls it."""
    handle, bucket = state
    (flat_param,), intra = bucket.params, handle.world.intra
    intra.reduce_scatter(gradient.view(intra.size, -1), out=shard).wait()
    shard.div_(intra.size)
    # After the hook FSDP keeps the shard as the gradient, except where it copies it or adds it to another.
    is_copied = shard.dtype != flat_param.dtype or shard.device != flat_param.device
    at_once = is_copied or torch_private.has_saved_gradient(flat_param)
    handle.send(bucket, [shard], at_once)


def _check_unit(name: str, unit: FullyShardedDataParallel, world: World) -> None:
    if unit.sharding_strategy not in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        raise InvalidArgumentError(
            f"{name} is wrapped with {unit.sharding_strategy}: torch takes hooks for FULL_SHARD and SHARD_GRAD_OP over "
            f"the ranks of one node. For whole replicas use DistributedDataParallel and attach_to_ddp."
        )
    check_sharded_ranks(dist.get_process_group_ranks(unit.process_group), name, world.topology)
    _check_reduce_dtype(unit.mixed_precision.reduce_dtype)


def _check_reduce_dtype(dtype: torch.dtype | None) -> None:
    if dtype == torch.float16:
        raise InvalidArgumentError(
            "gradients are reduced as float16, in which their sum overflows before it is divided and exchanged: use "
            "MixedPrecisionPolicy, or FSDP1's MixedPrecision, with reduce_dtype=torch.float32."
        )
