"""Runs the GPU's kernels where there is no GPU: ``codec.cu`` compiled for the host, every CUDA thread a real one."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from flexcomm.kernels.gpu import SOURCE, CupyLauncher, Job

if TYPE_CHECKING:
    import torch

    from flexcomm.kernels.gpu.launcher import LaunchConfig

SHIM = Path(__file__).with_name("cuda_on_host.h")
# The host must not fuse or reorder either; -O1 is as fast here, and compiles sooner.
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror")


def compile_for_host(folder: Path, *extra_flags: str) -> Path:
    library = folder / "codec_on_host.so"
    command = ["g++", *FLAGS, *extra_flags, f'-DKERNELS="{SOURCE}"', "-o", str(library), "-x", "c++", str(SHIM)]
    subprocess.run(command, check=True, timeout=100)
    return library


class HostLauncher(CupyLauncher):
    """A launcher whose device is this machine's memory. ``shared_limit`` in bytes is what a block may have."""

    def __init__(self, library: Path, shared_limit: int = 48 << 10) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.job_nbytes.restype = ctypes.c_uint64
        self._shared_limit = shared_limit
        assert self._library.job_nbytes() == ctypes.sizeof(Job)

    def shared_nbytes(self, device: torch.device) -> int:
        assert device.type == "cpu"
        return self._shared_limit

    def launch(self, name: str, config: LaunchConfig, job: Job) -> None:
        assert job.device.type == "cpu"
        assert config.shared_nbytes <= self._shared_limit
        kernel = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)
        asked = ctypes.c_uint32(config.grid), ctypes.c_uint32(config.threads), ctypes.c_uint64(config.shared_nbytes)
        assert self._library.launch(kernel, *asked, ctypes.byref(job)), f"{name} wrote beyond its shared memory"
