"""Hooks for models that FSDP shards inside a node: the optimizer stays the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from flexcomm import InvalidArgumentError
from flexdemo.hooks.fsdp1 import attach_to_flat_units
from flexdemo.hooks.fsdp2 import attach_to_units
from flexdemo.hooks.handle import HookHandle

if TYPE_CHECKING:
    from torch.nn import Module

    from flexcomm import Average, Compressor, NonFinitePolicy, World

__all__ = ["attach_to_fsdp"]


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
        attach_to_flat_units(model, handle)
    elif any(isinstance(module, FSDPModule) for module in model.modules()):
        attach_to_units(model, handle)
    else:
        raise InvalidArgumentError(
            f"{type(model).__name__} is not sharded: call fully_shard(model, mesh=mesh['shard']) before, or use "
            f"attach_to_ddp."
        )
    return handle
