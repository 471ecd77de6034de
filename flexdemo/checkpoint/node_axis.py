"""The node axis: state that differs from rank to rank, in a form that checkpoints keep apart.

torch's distributed checkpoints take tensors of equal name on several ranks for copies of one, and keep one of them.
What is a node's own is therefore saved as a tensor ``[nodes, ranks per node, numel]``, of which every rank holds the
row at its own place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from flexcomm import InvalidArgumentError, World
from flexdemo.parameters import Group, local, wrapped_like
from flexdemo.torch_private import mesh_without_groups

_AXES = ("node", "local_rank")

OtherNodes = Literal["error", "mean", "reset"]
"""For state of another number of nodes: refuse it, give every node the mean of all, or begin at zero."""


class FromOtherNodes:
    """A base of optimizers whose state has a node axis, so that another number of nodes can load it."""

    _other_nodes: OtherNodes = "error"

    @contextmanager
    def from_other_nodes(self, other_nodes: OtherNodes) -> Iterator[None]:
        """Return a context that sets the default of ``load_state_dict``, which torch calls without arguments."""
        before, self._other_nodes = self._other_nodes, other_nodes
        try:
            yield
        finally:
            self._other_nodes = before


class Rows(NamedTuple):
    """The saved rows of a node, one for each rank; if ``is_own``, the row of this rank alone."""

    values: Tensor
    is_own: bool


class NodeAxis:
    """The place of this rank in tensors ``[nodes, ranks per node, numel]``."""

    def __init__(self, world: World) -> None:
        self.topology = world.topology
        self._mesh: DeviceMesh | None = None
        self._nodes = self._ranks = 1
        if world.topology.size > 1 and dist.is_initialized():
            self._nodes, self._ranks = world.topology.nodes, world.topology.local_size
            # Without groups of its own: checkpoints ask where a row belongs, and send nothing. Making groups takes all
            # ranks of the job, and this world may be a part of it.
            self._mesh = mesh_without_groups(world.device.type, world.topology.members, _AXES)

    def stacked(self, tensor: Tensor, length: int) -> Tensor:
        """Return a tensor of this rank as its row among all ranks', each of ``length`` elements, zeros at the end."""
        row = tensor.new_zeros(length)
        row[: tensor.numel()] = tensor.reshape(-1)
        row = row.view(1, 1, length)
        if self._mesh is None:
            return row
        return DTensor.from_local(row, self._mesh, (Shard(0), Shard(1)), run_check=False)

    def owner(self) -> Tensor:
        """Return this rank's number with a node axis, saved so that another rank's state is recognised."""
        return self.stacked(torch.tensor([self.topology.rank]), 1)

    def check_owner(self, owner: Tensor) -> None:
        """Raise if the state is another rank's; a state of all ranks is fine."""
        if self.is_own(owner) and int(local(owner)) != self.topology.rank:
            raise InvalidArgumentError(
                f"this state was saved by rank {int(local(owner))}, but this is rank {self.topology.rank}: "
                f"momenta differ from node to node. Save and load on every rank, each its own file, or save by "
                f"torch.distributed.checkpoint, which keeps them apart."
            )

    def rows_of(self, stacked: Tensor, name: str, other_nodes: OtherNodes) -> Rows:
        """Return the rows that were saved for this node: this rank's own, or those of all ranks if they are there."""
        nodes, ranks, length = stacked.shape
        if self.is_own(stacked):
            return Rows(local(stacked).view(1, length), is_own=True)
        if isinstance(stacked, DTensor):
            raise InvalidArgumentError(
                f"the saved {name} is of {nodes} x {ranks} ranks, of which only one row is here: load by "
                f"flexdemo.load_checkpoint, which reads them all."
            )
        if nodes == self.topology.nodes:
            return Rows(stacked[self.topology.node], is_own=False)
        if other_nodes == "reset":
            return Rows(stacked.new_zeros(ranks, length), is_own=False)
        if other_nodes == "mean":
            return Rows(stacked.mean(dim=0), is_own=False)
        raise InvalidArgumentError(
            f"the saved {name} is of {nodes} nodes, but there are {self.topology.nodes} now. Load with "
            f"other_nodes='mean', which gives every node the mean of all, or 'reset', which begins at zero."
        )

    def taken(self, stacked: Tensor, shape: torch.Size | tuple[int, ...], name: str, other_nodes: OtherNodes) -> Tensor:
        """Return this rank's tensor of that shape. It must have been saved by as many ranks per node."""
        rows = self.rows_of(stacked, name, other_nodes)
        mine = self.row_of_this_rank(rows)
        if mine is None or mine.numel() < math.prod(shape):
            raise InvalidArgumentError(
                f"the saved {name} has {len(rows.values)} rows of {rows.values.shape[1]} elements a node, but here "
                f"{self._ranks} ranks need {math.prod(shape)}: parameters or ranks per node changed. Load with the "
                f"same, or without the optimizer's state."
            )
        return mine[: math.prod(shape)].reshape(shape)

    def row_of_this_rank(self, rows: Rows) -> Tensor | None:
        """Return this rank's row; None if so many ranks saved them that it has none."""
        if rows.is_own:
            return rows.values[0]
        return rows.values[self.topology.local_rank] if len(rows.values) == self.topology.local_size else None

    def is_own(self, stacked: Tensor) -> bool:
        """Return whether this is a row as this rank saves it, of as many nodes and ranks."""
        return tuple(local(stacked).shape[:2]) == (1, 1) and tuple(stacked.shape[:2]) == (self._nodes, self._ranks)


def is_stacked(tensor: Tensor) -> bool:
    """Return whether a tensor has a node axis. A single process has no mesh, so there the shape tells."""
    if isinstance(tensor, DTensor):
        return tensor.device_mesh.mesh_dim_names == _AXES
    return tensor.dim() == 3 and tuple(tensor.shape[:2]) == (1, 1)


def longest_on_node(lengths: Iterable[int], world: World) -> list[int]:
    """Return, number by number, the largest that any rank of this node has."""
    mine = torch.tensor(list(lengths), dtype=torch.int64, device=world.device)
    longest: list[int] = world.intra.all_gather(mine).wait().amax(dim=0).tolist()
    return longest


# State dicts

_SCALAR = " (one)"
"""Ends the key of a tensor without dims, such as a step count, which is saved as a row of one element."""


def stacked_state(axis: NodeAxis, state: dict[str, Any], length: int) -> dict[str, Any]:
    """Return a parameter's state, of up to ``length`` elements, with a node axis. Counters, too: nodes may differ."""
    own: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            own[key] = value
        elif value.dim():
            own[key] = axis.stacked(local(value), length)
        else:
            own[f"{key}{_SCALAR}"] = axis.stacked(value, 1)
    return own


def take_state_(axis: NodeAxis, saved: dict[str, Any], param: Parameter, other_nodes: OtherNodes) -> None:
    """Replace tensors that :func:`stacked_state` made by this rank's own."""
    shape = local(param).shape
    for key in [key for key, value in saved.items() if isinstance(value, Tensor)]:
        value = saved.pop(key)
        if key.endswith(_SCALAR):
            saved[key.removesuffix(_SCALAR)] = axis.taken(value, (), key, other_nodes)
        else:
            saved[key] = wrapped_like(axis.taken(value, shape, key, other_nodes), param)


def required(saved: dict[str, Any], key: str) -> Tensor:
    """Remove a tensor from a parameter's saved state and return it; raise if it is not there."""
    if key not in saved:
        raise InvalidArgumentError(
            f"the state to be loaded has no {key}, but {', '.join(map(str, saved)) or 'nothing'}: it was saved by "
            f"another optimizer, or by one with other settings, such as sync_every, outer, compressor or schedule."
        )
    value: Tensor = saved.pop(key)
    return value


def check_sizes(saved: list[dict[str, Any]], groups: list[Group]) -> None:
    """Raise unless the saved state has as many groups, of as many parameters."""
    sizes = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes[0] != sizes[1]:
        raise InvalidArgumentError(
            f"the state to be loaded has groups of {sizes[0]} parameters, but this optimizer has {sizes[1]}."
        )
