"""Whether the MPI at hand may be given device pointers.

Asking is dangerous: an MPI that is not GPU-aware (Open MPI says CUDA-aware) reads the pointer as host memory and
crashes, and some builds answer their own query wrongly. So a child process tries it, and may crash instead of the job.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

from flexcomm.device import accelerator, current_device

__all__ = ["mpi_is_gpu_aware"]

PROBE = """
import sys, torch
from mpi4py import MPI
sent = torch.arange(1024, dtype=torch.int32, device=sys.argv[1])
received = torch.zeros_like(sent)
torch.accelerator.synchronize()
buffer = lambda x: [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), x.numel(), MPI.INT32_T]
MPI.COMM_SELF.Allreduce(buffer(sent), buffer(received), MPI.SUM)
MPI.COMM_SELF.Sendrecv(buffer(sent), 0, recvbuf=buffer(received), source=0)
raise SystemExit(0 if torch.equal(sent, received) else 1)
"""
PROBE_TIMEOUT_S = 60.0
LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYD", "MPI_LOCAL", "SLURM_")
CHOICE_PREFIXES = ("OMPI_ALLOW_", "PRTE_ALLOW_", "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_opal_cuda")
"""What people set to choose how Open MPI moves data; the rest of ``OMPI_MCA_*`` is the launcher's own state."""


@cache
def mpi_is_gpu_aware() -> bool:
    """True when a child process could pass device memory through this MPI; asked once per process."""
    kind = accelerator()
    if kind is None:
        return False
    try:
        probe = subprocess.run(
            [sys.executable, "-c", PROBE, str(current_device(kind.name))],
            env=alone(os.environ),
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return probe.returncode == 0


def alone(environ: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """The environment without the launcher's variables: the child is a job of one, not this job's rank again."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(CHOICE_PREFIXES) or not name.startswith(LAUNCHER_PREFIXES)
    }
