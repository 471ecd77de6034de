"""FSDP1: every unit's gradient is added up inside the node and exchanged between nodes by its communication hook."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from flexcomm import InvalidArgumentError, TopologyError
from flexdemo.gradients import Bucket
from flexdemo.hooks.handle import BackwardPass, HookHandle
from flexdemo.parameters import broadcast_parameters_
from flexdemo.torch_private import flat_params_of, has_saved_gradient, remove_comm_hook, set_comm_hook_state

_SHARDED = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


def attach_to_fsdp1(model: FullyShardedDataParallel, handle: HookHandle) -> None:
    """Exchange the flat gradient of every unit of ``model``, whose replicas become node 0's."""
    units = [
        (name or "root", unit)
        for name, unit in model.named_modules()
        if isinstance(unit, FullyShardedDataParallel) and flat_params_of(unit)
    ]
    for name, unit in units:
        _check_unit(name, unit, handle)
    model.register_comm_hook(None, _reduce)
    backward = BackwardPass(handle)
    states = [_Unit(name, unit, handle, backward) for name, unit in units]
    handle.plan([(state.bucket, [state.like]) for state in states])
    for (_, unit), state in zip(units, states, strict=True):
        set_comm_hook_state(unit, state)
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle.on_remove(lambda unit=unit: remove_comm_hook(unit))  # type: ignore[misc]
    broadcast_parameters_([flat for _, unit in units for flat in flat_params_of(unit)], handle.world)
    broadcast_parameters_(model.buffers(), handle.world)


def _check_unit(name: str, unit: FullyShardedDataParallel, handle: HookHandle) -> None:
    if unit.sharding_strategy not in _SHARDED:
        raise InvalidArgumentError(
            f"{name} is wrapped with {unit.sharding_strategy}: torch takes hooks for FULL_SHARD and SHARD_GRAD_OP over "
            f"the ranks of one node. For whole replicas use DistributedDataParallel and attach_to_ddp."
        )
    node = list(handle.world.topology.members[handle.world.topology.node])
    ranks = sorted(dist.get_process_group_ranks(unit.process_group))
    if ranks != sorted(node):
        raise TopologyError(
            f"{name} is sharded over ranks {ranks}, but this node holds {node}. Pass FullyShardedDataParallel the "
            f"process_group of this node's ranks."
        )
    if unit.mixed_precision.reduce_dtype == torch.float16:
        raise InvalidArgumentError(
            f"{name} reduces gradients as float16, in which their sum overflows before it is exchanged. Use "
            f"MixedPrecision(reduce_dtype=torch.float32)."
        )


class _Unit:
    """The state that FSDP passes to the hook: the unit it is called for."""

    def __init__(self, name: str, unit: FullyShardedDataParallel, handle: HookHandle, backward: BackwardPass) -> None:
        self.handle, self.backward = handle, backward
        (self.flat_param,) = flat_params_of(unit)
        self.bucket = Bucket(0, True, (self.flat_param,), (name,))
        dtype = unit.mixed_precision.reduce_dtype or unit.mixed_precision.param_dtype or self.flat_param.dtype
        self.like = torch.empty(self.flat_param.shape, dtype=dtype, device=self.flat_param.device)

    def is_read_at_once(self, shard: Tensor) -> bool:
        """Return whether FSDP copies or adds up the shard after the hook, instead of keeping it as the gradient."""
        return shard.dtype != self.flat_param.dtype or has_saved_gradient(self.flat_param)


def _reduce(unit: _Unit, gradient: Tensor, shard: Tensor) -> None:
    """Fill ``shard`` with this rank's part of the node's mean, to be exchanged in place."""
    intra = unit.handle.world.intra
    intra.reduce_scatter(gradient.view(intra.size, -1), out=shard).wait()
    shard.div_(intra.size)
    unit.backward.send(unit.bucket, [shard], at_once=unit.is_read_at_once(shard))
