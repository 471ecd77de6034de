"""The node axis: state that differs from rank to rank, in a form that checkpoints keep apart.

torch's distributed checkpoints take tensors of equal name on several ranks for copies of one, and keep one of them.
What is a node's own is therefore saved as a tensor ``[nodes, ranks per node, numel]``, of which every rank holds the
row at its own place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flexcomm import InvalidArgumentError

if TYPE_CHECKING:
    from torch import Tensor

    from flexcomm import World

__all__ = ["NodeAxis", "OtherNodes"]

OtherNodes = Literal["error", "mean", "reset"]
"""What to do with state of another number of nodes: refuse it, give every node the mean of all, or begin at zero."""


class NodeAxis:
    """The place of this rank in tensors ``[nodes, ranks per node, numel]``."""

    def __init__(self, world: World) -> None:
        self._topology = world.topology
        self._mesh: DeviceMesh | None = None
        self._nodes = self._ranks = 1
        if world.topology.size > 1 and dist.is_initialized():
            self._nodes, self._ranks = world.topology.nodes, world.topology.local_size
            # Without groups of its own: checkpoints ask where a row belongs, and send nothing. Making groups takes all
            # ranks of the job, and this world may be a part of it.
            self._mesh = DeviceMesh(
                world.device.type,
                world.topology.members,
                mesh_dim_names=("node", "local_rank"),
                _init_backend=False,
            )

    def stacked(self, tensor: Tensor, length: int) -> Tensor:
        """Return a tensor of this rank as its row among all ranks', each of ``length`` elements, zeros at the end."""
        row = tensor.new_zeros(length)
        row[: tensor.numel()] = tensor.reshape(-1)
        row = row.view(1, 1, length)
        if self._mesh is None:
            return row
        return DTensor.from_local(row, self._mesh, (Shard(0), Shard(1)), run_check=False)

    def owner(self) -> Tensor:
        """Return a stamp of this rank, by which state that was handed to another is found out."""
        return self.stacked(torch.tensor([self._topology.rank]), 1)

    def check_owner(self, owner: Tensor) -> None:
        """Raise if a stamp is another rank's, unless it comes from another number of nodes."""
        rows = _rows_of(owner)
        if owner.shape[0] == self._nodes and int(rows.reshape(-1)[0]) != self._topology.rank:
            raise InvalidArgumentError(
                f"this state was saved by rank {int(rows.reshape(-1)[0])}, but this is rank {self._topology.rank}: "
                f"momenta differ from node to node. Save and load on every rank, each its own file, or save by "
                f"torch.distributed.checkpoint, which keeps them apart."
            )

    def taken(self, stacked: Tensor, shape: torch.Size | tuple[int, ...], name: str, other_nodes: OtherNodes) -> Tensor:
        """Return this rank's tensor of that shape out of all ranks' rows."""
        nodes, ranks, length = stacked.shape
        numel = torch.Size(shape).numel()
        if ranks != self._ranks or length < numel:
            raise InvalidArgumentError(
                f"the saved {name} has rows of {length} elements for {ranks} ranks per node, but here {numel} are "
                f"needed for {self._ranks}: parameters, compressor or ranks per node changed. Load with "
                f"the same, or without the optimizer's state."
            )
        if nodes == self._nodes:
            return _rows_of(stacked).reshape(-1)[:numel].reshape(shape)
        if other_nodes == "reset":
            return stacked.new_zeros(shape) if not isinstance(stacked, DTensor) else _rows_of(stacked).new_zeros(shape)
        if other_nodes == "mean":
            return self._mean(stacked)[:numel].reshape(shape)
        raise InvalidArgumentError(
            f"the saved {name} is of {nodes} nodes, but there are {self._topology.nodes} now. Load with "
            f"other_nodes='mean', which gives every node the mean of all, or 'reset', which begins at zero."
        )

    def _mean(self, stacked: Tensor) -> Tensor:
        if isinstance(stacked, DTensor):
            raise InvalidArgumentError(
                "the mean over nodes needs the rows of all of them: load by flexdemo.load_checkpoint, which reads them."
            )
        return stacked[:, self._topology.local_rank].mean(dim=0)


def _rows_of(stacked: Tensor) -> Tensor:
    with torch.no_grad():
        return stacked.to_local() if isinstance(stacked, DTensor) else stacked
