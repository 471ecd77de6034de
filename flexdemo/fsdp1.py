"""FSDP1: every unit's gradient is added up inside the node and exchanged between nodes by its communication hook."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel, ShardingStrategy

from flexcomm import InvalidArgumentError, TopologyError
from flexdemo.backward import BackwardPass
from flexdemo.lots import Lot
from flexdemo.replicas import equalise_

if TYPE_CHECKING:
    from torch import Tensor

    from flexdemo.attachment import Attachment

__all__ = ["attach_to_flat_units"]

_SHARDED = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


def attach_to_flat_units(model: FullyShardedDataParallel, attachment: Attachment) -> None:
    """Exchange the flat gradient of every unit of ``model``, whose replicas become node 0's."""
    units = [
        (name or "root", unit)
        for name, unit in model.named_modules()
        if isinstance(unit, FullyShardedDataParallel) and _flat_params_of(unit)
    ]
    for name, unit in units:
        _check_unit(name, unit, attachment)
    model.register_comm_hook(None, _reduce)
    backward = BackwardPass(attachment)
    for name, unit in units:
        # torch gives one state to all units; each needs its own, to know which one it is called for.
        unit._comm_hook_state = _Unit(name, unit, attachment, backward)
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        attachment.on_detach(lambda unit=unit: _forget(unit))  # type: ignore[misc]
    equalise_([flat for _, unit in units for flat in _flat_params_of(unit)], attachment.world)
    equalise_(model.buffers(), attachment.world)


def _flat_params_of(unit: FullyShardedDataParallel) -> list[FlatParameter]:
    """Return a unit's flat parameter; none if all it wraps is wrapped again inside."""
    return [] if unit._handle is None else [unit._handle.flat_param]


def _check_unit(name: str, unit: FullyShardedDataParallel, attachment: Attachment) -> None:
    if unit.sharding_strategy not in _SHARDED:
        raise InvalidArgumentError(
            f"{name} is wrapped with {unit.sharding_strategy}: torch takes hooks for FULL_SHARD and SHARD_GRAD_OP over "
            f"the ranks of one node. For whole replicas use DistributedDataParallel and attach_to_ddp."
        )
    node = list(attachment.world.topology.members[attachment.world.topology.node])
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
    """What the hook is told: for which unit it is called."""

    def __init__(
        self, name: str, unit: FullyShardedDataParallel, attachment: Attachment, backward: BackwardPass
    ) -> None:
        self.attachment, self.backward = attachment, backward
        (self.flat_param,) = _flat_params_of(unit)
        self.lot = Lot(0, True, (self.flat_param,), (name,))
        dtype = unit.mixed_precision.reduce_dtype or unit.mixed_precision.param_dtype or self.flat_param.dtype
        like = torch.empty(self.flat_param.shape, dtype=dtype, device=self.flat_param.device)
        attachment.remember(self.lot, [like])

    def is_read_at_once(self, shard: Tensor) -> bool:
        """Return whether FSDP copies or adds up the shard after the hook, instead of keeping it as the gradient."""
        return shard.dtype != self.flat_param.dtype or getattr(self.flat_param, "_saved_grad_shard", None) is not None


def _reduce(unit: _Unit, gradient: Tensor, shard: Tensor) -> None:
    """Fill ``shard`` with this rank's part of the node's mean, to be exchanged in place."""
    intra = unit.attachment.world.intra
    intra.reduce_scatter(gradient.view(intra.size, -1), out=shard).wait()
    shard.div_(intra.size)
    unit.backward.send(unit.lot, [shard], at_once=unit.is_read_at_once(shard))


def _forget(unit: FullyShardedDataParallel) -> None:
    unit._comm_hook = unit._comm_hook_state = None
