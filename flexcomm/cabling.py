"""Laying cables: from the name of a kind (``auto``, ``nccl``, ``gloo``, ``mpi``) and a set of ranks to a transport."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist

from flexcomm.abort import abort_job_on_exception
from flexcomm.errors import TopologyError, TransportUnavailableError
from flexcomm.rendezvous import start_torch
from flexcomm.topology import MPI_LAUNCHERS
from flexcomm.transport import LoopbackTransport, MPITransport, PerDeviceTransport, TorchTransport
from flexcomm.transport.mpi_job import library_name, world_communicator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from flexcomm.topology import Announcement
    from flexcomm.transport import Transport

__all__ = ["Cable", "Cabling", "check_cable", "join_mpi_job"]

Cable = Literal["auto", "nccl", "gloo", "mpi"]


def check_cable(kind: str) -> None:
    """Raise unless ``kind`` names a cable that can be had on this machine."""
    if kind not in get_args(Cable):
        raise TransportUnavailableError(f"there is no transport {kind!r}. Choose one of {', '.join(get_args(Cable))}.")
    if kind == "nccl" and not nccl_is_usable():
        raise TransportUnavailableError(
            "nccl needs a CUDA device and a torch built with NCCL; this process sees neither or only one. Use 'auto' "
            "or 'gloo', or check CUDA_VISIBLE_DEVICES and the torch build."
        )


def nccl_is_usable() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def join_mpi_job(announced: Announcement, *, required: bool) -> MPI.Intracomm | None:
    """MPI's world, if this job has one; ``None`` where it has none and nobody ``required`` it."""
    if announced.launcher not in MPI_LAUNCHERS and not required:
        return None
    try:
        comm = world_communicator()
    except TransportUnavailableError:
        if required:
            raise
        return None
    place = (comm.Get_rank(), comm.Get_size())
    if place != (announced.rank, announced.size):
        raise TopologyError(
            f"{announced.launcher} announced rank {announced.rank} of {announced.size}, but the MPI that mpi4py loaded "
            f"({library_name()}) says rank {place[0]} of {place[1]}. They are different MPIs: start with the mpirun of "
            f"that library, or point mpi4py at the launcher's (MPI4PY_MPIABI, LD_LIBRARY_PATH)."
        )
    abort_job_on_exception(comm)
    return comm


@dataclass
class Cabling:
    """What is needed to join ranks, and how to undo what was joined: ``closers``, run last to first."""

    announced: Announcement
    comm: MPI.Intracomm | None
    timeout_s: float
    closers: list[Callable[[], None]] = field(default_factory=list)

    def join_everybody(self) -> Transport:
        """All ranks through host memory. torch's default process group is started on the way, unless it is there."""
        if self.announced.launcher == "none":
            return LoopbackTransport(self.timeout_s)
        everybody = [range(self.announced.size)]
        control = self._mpi(self.comm, everybody) if self.comm is not None else None
        if not dist.is_initialized():
            start_torch(self.announced, control=control, timeout_s=self.timeout_s)
            self.closers.append(dist.destroy_process_group)
        return control or self.lay("gloo", everybody)

    def lay(self, kind: Cable, groups: Sequence[Sequence[int]]) -> Transport:
        """Join the ranks of each group in the order given; the result is the cable of this rank's group.

        All ranks of the job call it together, with the same groups: each rank is in one, and all are of one size.
        """
        if len(groups[0]) == 1:
            return LoopbackTransport(self.timeout_s)
        if kind in ("nccl", "gloo"):
            return self._torch(kind, groups)
        host = self._mpi(self.comm, groups) if self.comm is not None else self._torch("gloo", groups)
        if kind == "mpi" or not nccl_is_usable():
            return host
        return PerDeviceTransport(host, self._torch("nccl", groups))

    def adopt(self, group: dist.ProcessGroup, device_type: str) -> Transport:
        """The ranks of a group for tensors on ``device_type`` that somebody else made and will close."""
        if dist.get_world_size(group) == 1:
            return LoopbackTransport(self.timeout_s)
        return TorchTransport(group, "nccl" if device_type == "cuda" else "gloo", self.timeout_s)

    def join_slice(self, ranks: Sequence[int]) -> Transport:
        """``ranks`` through host memory, called by them alone: other slices of the job may do the same or nothing.

        [Note: group names] torch then names the group by its ranks and the number of groups alive. That name comes back
        when a group was destroyed in between, and the new group finds the old one's addresses in the store. So such a
        group is never destroyed before torch itself is closed.
        """
        if len(ranks) == 1:
            return LoopbackTransport(self.timeout_s)
        group = dist.new_group(
            list(ranks), timedelta(seconds=self.timeout_s), "gloo", use_local_synchronization=True, sort_ranks=False
        )
        return TorchTransport(group, "gloo", self.timeout_s)

    def _mpi(self, comm: MPI.Intracomm, groups: Sequence[Sequence[int]]) -> MPITransport:
        color = self._own(groups)
        group = comm.Split(color, groups[color].index(self.announced.rank))
        self.closers.append(group.Free)
        return MPITransport(group, self.timeout_s)

    def _torch(self, backend: str, groups: Sequence[Sequence[int]]) -> TorchTransport:
        # Every rank makes every group, because of [Note: group names].
        made = [
            dist.new_group(list(ranks), timedelta(seconds=self.timeout_s), backend, sort_ranks=False)
            for ranks in groups
        ]
        group = made[self._own(groups)]
        self.closers.append(lambda: dist.destroy_process_group(group))
        return TorchTransport(group, backend, self.timeout_s)

    def _own(self, groups: Sequence[Sequence[int]]) -> int:
        return next(number for number, ranks in enumerate(groups) if self.announced.rank in ranks)
