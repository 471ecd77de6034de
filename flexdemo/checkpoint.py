"""Checkpoints: files, the node axis of state that differs from rank to rank, and residuals.

torch's distributed checkpoints keep one of the tensors that have one name on several ranks. What differs is therefore
saved as a tensor ``[nodes, ranks per node, numel]``, of which every rank holds its own row.

Residuals are coefficients of chunks, which follow from how a tensor is cut. For other ranks per node they are
transformed back into elements, put together, cut anew, and transformed again: exact but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Module, Parameter
from torch.optim import Optimizer

import flexcomm
from flexcomm.kernels.reference.transform import accumulate, restore
from flexdemo.gradients import Bucket, GradientSync
from flexdemo.parameters import Group, local, wrapped_like
from flexdemo.torch_private import mesh_without_groups

if TYPE_CHECKING:
    from flexdemo.hooks.handle import HookHandle

OtherNodes = Literal["error", "mean", "reset"]
"""For state of another number of nodes: refuse it, give every node the mean of all, or begin at zero."""
DEFAULT_OTHER_NODES: ContextVar[OtherNodes] = ContextVar("other_nodes", default="error")
"""That of ``load_state_dict``, which torch calls without arguments."""

_AXES = ("node", "local_rank")
_RESIDUALS = "handle.residuals."
_SCALAR = " (one)"
"""Ends the key of a tensor without dims, such as a step count, which is saved as a row of one element."""


def save_checkpoint(
    path: str | PathLike[str], model: Module, optimizer: Optimizer, handle: HookHandle | None = None
) -> None:
    """Save a model, its optimizer and the residuals of its hook into a folder. All ranks call it together.

    Args:
        path: the folder.
        model: plain, or sharded by FSDP2.
        optimizer: one of ours, or torch's.
        handle: what ``attach_to_fsdp`` or ``attach_to_ddp`` returned, if gradients are exchanged by a hook.

    """
    save(_state_of(model, optimizer, handle), checkpoint_id=path)


def load_checkpoint(
    path: str | PathLike[str],
    model: Module,
    optimizer: Optimizer,
    handle: HookHandle | None = None,
    *,
    other_nodes: OtherNodes = "error",
) -> None:
    """Go on from a folder, bit for bit where as many ranks saved it, else to rounding. All ranks call it together.

    Args:
        path: the folder.
        model: as it was saved.
        optimizer: as it was saved.
        handle: as it was saved.
        other_nodes: residuals of another number of nodes: an ``"error"``, their ``"mean"``, or ``"reset"`` to zero.

    """
    state = _state_of(model, optimizer, handle)
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    asked = set()
    for holder, key, name in _node_tensors(state):
        found = saved.get(name)
        asked.add(name)
        if isinstance(found, TensorStorageMetadata) and found.size != holder[key].shape:
            holder[key] = torch.empty(found.size, dtype=holder[key].dtype, device=holder[key].device)
    # torch loads what it is asked for, and no more.
    left = [name for name in saved if name.startswith(_RESIDUALS) and name not in asked]
    if left:
        raise flexcomm.InvalidArgumentError(
            f"the files hold {len(left)} residuals that nothing here asks for, such as {left[0]}: pass the handle of a "
            f"model with the same parameter names. A CompressionState without names knows them after one backward pass."
        )
    load(state, checkpoint_id=path)
    dcp.set_model_state_dict(model, state["model"])
    token = DEFAULT_OTHER_NODES.set(other_nodes)
    try:
        dcp.set_optimizer_state_dict(model, optimizer, state["optimizer"])
    finally:
        DEFAULT_OTHER_NODES.reset(token)
    if handle is not None:
        handle.load_state_dict(state["handle"], other_nodes)


def _state_of(model: Module, optimizer: Optimizer, handle: HookHandle | None) -> dict[str, Any]:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise flexcomm.InvalidArgumentError(
            "torch cannot save what FSDP1 shards inside nodes in one checkpoint: let every rank torch.save its own "
            "model.state_dict(), optimizer.state_dict() and handle.state_dict(), or shard by FSDP2."
        )
    state = {"model": dcp.get_model_state_dict(model), "optimizer": dcp.get_optimizer_state_dict(model, optimizer)}
    return state if handle is None else {**state, "handle": handle.state_dict()}


def _node_tensors(state: Mapping[str, Any]) -> Iterator[tuple[dict[str, Tensor], str, str]]:
    """Return everything with a node axis: what holds it, its key there, and what files call it."""
    for param, kept in state["optimizer"]["state"].items():
        for key, value in list(kept.items()):
            mesh = value.device_mesh if isinstance(value, DTensor) else None
            # A single process has no mesh.
            is_single = mesh is None and isinstance(value, Tensor) and value.dim() == 3 and value.shape[:2] == (1, 1)
            if is_single or (mesh is not None and mesh.mesh_dim_names == _AXES):
                yield kept, key, f"optimizer.state.{param}.{key}"
    if "handle" in state:
        handle = state["handle"]
        yield handle, "owner", "handle.owner"
        for param in handle["residuals"]:
            yield handle["residuals"], param, f"{_RESIDUALS}{param}"


class NodeAxis:
    """The place of this rank in tensors ``[nodes, ranks per node, numel]``."""

    def __init__(self, world: flexcomm.World) -> None:
        self._topology = world.topology
        self._meshes: dict[str, DeviceMesh] = {}
        self._is_single = world.topology.size == 1 or not dist.is_initialized()
        self._shape = (1, 1) if self._is_single else (world.topology.nodes, world.topology.local_size)

    def stacked(self, tensor: Tensor, length: int) -> Tensor:
        """Return a tensor of this rank as its row among all ranks', each of ``length`` elements, zeros at the end."""
        row = tensor.new_zeros(length)
        row[: tensor.numel()] = tensor.reshape(-1)
        row = row.view(1, 1, length)
        if self._is_single:
            return row
        # torch moves what is on another type of device than the mesh. Without groups of its own: checkpoints ask where
        # a row belongs, and send nothing. Making groups takes all ranks of the job, and this world may be a part of it.
        if row.device.type not in self._meshes:
            self._meshes[row.device.type] = mesh_without_groups(row.device.type, self._topology.members, _AXES)
        return DTensor.from_local(row, self._meshes[row.device.type], (Shard(0), Shard(1)), run_check=False)

    def owner(self) -> Tensor:
        """Return this rank's number with a node axis, saved so that another rank's state is recognised."""
        return self.stacked(torch.tensor([self._topology.rank]), 1)

    def check_owner(self, owner: Tensor) -> None:
        """Raise if the state is another rank's; a state of all ranks is fine."""
        if self.is_own(owner) and int(local(owner)) != self._topology.rank:
            raise flexcomm.InvalidArgumentError(
                f"this state was saved by rank {int(local(owner))}, but this is rank {self._topology.rank}: let every "
                f"rank save and load a file of its own, or use flexdemo.save_checkpoint."
            )

    def is_own(self, stacked: Tensor) -> bool:
        """Return whether this is a row as this rank saves it, of as many nodes and ranks."""
        return tuple(local(stacked).shape[:2]) == (1, 1) and tuple(stacked.shape[:2]) == self._shape

    def taken(
        self,
        stacked: Tensor,
        shape: tuple[int, ...],
        name: str,
        other_nodes: OtherNodes,
        reshard: Callable[[Tensor, int, int], Tensor] | None = None,
    ) -> Tensor:
        """Return this rank's tensor of that shape; ``reshard`` cuts what another number of ranks per node saved."""
        (nodes, ranks, length), here, numel = stacked.shape, self._topology, math.prod(shape)
        if self.is_own(stacked):
            rows = local(stacked)[0].expand(here.local_size, length)
        elif isinstance(stacked, DTensor):
            raise flexcomm.InvalidArgumentError(
                f"the saved {name} is of {nodes} x {ranks} ranks, of which only one row is here: load by "
                f"flexdemo.load_checkpoint, which reads them all."
            )
        elif nodes == here.nodes:
            rows = stacked[here.node]
        elif other_nodes == "reset":
            rows = stacked.new_zeros(ranks, length)
        elif other_nodes == "mean":
            rows = stacked.mean(dim=0)
        else:
            raise flexcomm.InvalidArgumentError(
                f"the saved {name} is of {nodes} nodes, but there are {here.nodes} now. Load with other_nodes='mean', "
                f"which gives every node the mean of all, or 'reset', which begins at zero."
            )
        mine: Tensor | None = None
        if len(rows) == here.local_size:
            mine = rows[here.local_rank, :numel]
        elif reshard is not None:
            mine = reshard(rows, here.local_size, here.local_rank)
        if mine is None or mine.shape not in ((numel,), shape):
            raise flexcomm.InvalidArgumentError(
                f"the saved {name} has {len(rows)} rows of {length} elements, but this rank needs {numel}. Load with "
                f"the same parameters, compressor and ranks per node, or without the optimizer's state."
            )
        return mine.reshape(shape)

    def stacked_state(self, state: dict[str, Any], length: int) -> dict[str, Any]:
        """Return a parameter's state, of up to ``length`` elements, with a node axis; counters, too."""
        own: dict[str, Any] = {}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                own[key] = value
            elif value.dim():
                own[key] = self.stacked(local(value), length)
            else:
                own[f"{key}{_SCALAR}"] = self.stacked(value, 1)
        return own

    def take_state_(self, saved: dict[str, Any], param: Parameter, other_nodes: OtherNodes) -> None:
        """Replace tensors that :meth:`stacked_state` made by this rank's own."""
        for key in [key for key, value in saved.items() if isinstance(value, Tensor)]:
            value, name = saved.pop(key), key.removesuffix(_SCALAR)
            if name != key:
                saved[name] = self.taken(value, (), key, other_nodes)
            else:
                saved[key] = wrapped_like(self.taken(value, local(param).shape, key, other_nodes), param)


def longest_on_node(lengths: Iterable[int], world: flexcomm.World) -> list[int]:
    """Return, number by number, the largest that any rank of this node has."""
    mine = torch.tensor(list(lengths), dtype=torch.int64)
    return list(world.intra_control.all_gather(mine).wait().amax(dim=0).tolist())


def required(saved: dict[str, Any], key: str) -> Tensor:
    """Remove a tensor from a parameter's saved state and return it; raise if it is not there."""
    if key not in saved:
        raise flexcomm.InvalidArgumentError(
            f"the state to be loaded has no {key}, but {', '.join(map(str, saved)) or 'nothing'}: it was saved by "
            f"another optimizer, or by one with other settings, such as sync_every, outer, compressor or schedule."
        )
    value: Tensor = saved.pop(key)
    return value


def check_sizes(saved: list[dict[str, Any]], groups: list[Group]) -> None:
    sizes = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes[0] != sizes[1]:
        raise flexcomm.InvalidArgumentError(
            f"the state to be loaded has groups of {sizes[0]} parameters, but this optimizer has {sizes[1]}."
        )


class ResidualShard(NamedTuple):
    """The residual of one tensor on this rank, if that has a ``shard``; the longest on this node has ``length``."""

    residuals: flexcomm.Residuals
    device: torch.device
    shard: flexcomm.TensorShard | None
    length: int
    unsharded: UnshardedTensor | None
    """None if it cannot be cut anew."""

    @property
    def shape(self) -> tuple[int, int]:
        return (0, 0) if self.shard is None else self.shard.plan.state_shape

    def saved(self, axis: NodeAxis) -> Tensor:
        """Return the residual, zeros if it has not begun, with a node axis."""
        if self.shard is not None and self.shard.spec.name in self.residuals.names():
            return axis.stacked(self.residuals[self.shard.spec.name], self.length)
        return axis.stacked(torch.zeros(self.shape, device=self.device), self.length)

    def taken(self, saved: Tensor, axis: NodeAxis, name: str, other_nodes: OtherNodes) -> Tensor:
        reshard = None if self.unsharded is None else self.unsharded.reshard
        return axis.taken(saved, self.shape, name, other_nodes, reshard)


def load_residuals(taken: Iterable[tuple[ResidualShard, Tensor]]) -> None:
    """Load what was taken; if taking raises, nothing has changed."""
    states: dict[flexcomm.Residuals, dict[str, Tensor]] = {}
    for (residuals, device, shard, _, _), state in taken:
        by_name = states.setdefault(residuals, {})
        if shard is not None:
            # Where the tensors are, whatever the device that the file was loaded to.
            by_name[shard.spec.name] = state.to(device)
    for residuals, by_name in states.items():
        residuals.load_state_dict(by_name)


def residual_shards(bucket: Bucket, sync: GradientSync, compressor: flexcomm.Compressor) -> list[ResidualShard]:
    """Return those of a bucket's tensors; none without residuals. All ranks of a node call it together."""
    residuals = sync.residuals_of(bucket)
    if residuals is None:
        return []
    shards = sync.shards_of(bucket, compressor)
    numels = [0 if shard is None else math.prod(shard.plan.state_shape) for shard in shards]
    found = zip(bucket.params, bucket.specs, shards, longest_on_node(numels, sync.world), strict=True)
    return [
        ResidualShard(residuals, bucket.device, shard, length, _find_unsharded(param, spec, compressor))
        for param, spec, shard, length in found
    ]


def _find_unsharded(
    param: Parameter, spec: flexcomm.TensorSpec, compressor: flexcomm.Compressor
) -> UnshardedTensor | None:
    """Return a parameter as it is before it is cut; None if that cannot be known, as of a flat one."""
    dim = None
    if isinstance(param, DTensor):
        (placement, *others) = param.placements
        if others or not isinstance(placement, Shard):
            return None
        dim = placement.dim
    spec = spec._replace(shape=tuple(param.shape))
    return None if isinstance(param, FlatParameter) else UnshardedTensor(spec, compressor, dim)


class UnshardedTensor(NamedTuple):
    """A tensor before it is cut among the ranks of a node: along ``dim`` by FSDP, or, if None, by flexcomm."""

    spec: flexcomm.TensorSpec
    compressor: flexcomm.Compressor
    dim: int | None

    def reshard(self, rows: Tensor, ranks: int, rank: int) -> Tensor:
        """Return the state of rank ``rank`` of ``ranks`` out of the states, one a row, that a node's ranks saved."""
        whole = torch.zeros(self.spec.shape, device=rows.device)
        for row, shard in zip(rows, self.shards(whole, len(rows)), strict=True):
            if shard is None:
                continue
            elements, plan = shard
            numel = math.prod(plan.state_shape)
            if row.numel() < numel:
                raise flexcomm.InvalidArgumentError(
                    f"the residual saved of {self.spec.name} has {row.numel()} coefficients where {numel} are needed: "
                    f"it is of another model, or of another compressor."
                )
            elements.copy_(restore(row[:numel].view(plan.state_shape), plan).reshape(elements.shape))
        mine = self.shards(whole, ranks)[rank]
        return rows.new_zeros(0, 0) if mine is None else accumulate(*mine)

    def shards(self, whole: Tensor, ranks: int) -> list[tuple[Tensor, flexcomm.TensorPlan] | None]:
        """Return what each rank holds of ``whole``, as a view, and its plan; None if it holds nothing."""
        if self.dim is None:
            cut = flexcomm.shard_tensor(self.spec, flexcomm.plan_tensor(self.spec, self.compressor), ranks)
            return [None if one is None else (whole.view(-1)[one.first : one.last], one.plan) for one in cut]
        # As FSDP cuts it: all of one size, the last ones what is left.
        size = -(-self.spec.shape[self.dim] // ranks)
        views = whole.tensor_split([rank * size for rank in range(1, ranks)], self.dim)
        specs = [self.spec._replace(shape=tuple(view.shape)) for view in views]
        return [(view, flexcomm.plan_tensor(spec, self.compressor)) for view, spec in zip(views, specs, strict=True)]
