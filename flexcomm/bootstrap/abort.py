"""One rank's uncaught exception ends the whole MPI job, with that rank's traceback.

Without this, ``mpirun python x.py`` hangs for ever: the rank that failed waits for the others in ``MPI_Finalize``, and
they wait for it in a collective.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from mpi4py import MPI

__all__ = ["abort_job_on_exception"]

FORWARDING_S = 0.5
"""What the launcher gets to forward the traceback. MPICH's drops what it has not forwarded when a rank aborts."""

_installed = False


def abort_job_on_exception(comm: MPI.Intracomm) -> None:
    """From now on, an exception that ends this process ends every process of ``comm``. Stays until the process ends."""
    global _installed
    if _installed:
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
    _installed = True


def write_at_once(text: str) -> None:
    """Put ``text`` on the terminal in one piece, though other ranks write too.

    The file descriptor, not ``sys.stderr``: torch's hook captures what hooks below it print, to show it later, and
    there is no later.
    """
    with contextlib.suppress(OSError, ValueError):  # A closed or broken output must not keep the job from ending.
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
