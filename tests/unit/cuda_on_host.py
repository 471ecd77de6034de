"""Runs the GPU's kernels where there is no GPU: ``codec.cu`` compiled for the host, every CUDA thread a real one."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from flexcomm.kernels.gpu import SOURCE, Job

if TYPE_CHECKING:
    import torch

SHIM = Path(__file__).with_name("cuda_on_host.h")
# The host must not fuse or reorder either; -O1 is as fast here, and compiles sooner.
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror")


def compile_for_host(folder: Path, *extra_flags: str) -> Path:
    library = folder / "codec_on_host.so"
    command = ["g++", *FLAGS, *extra_flags, f'-DKERNELS="{SOURCE}"', "-o", str(library), "-x", "c++", str(SHIM)]
    subprocess.run(command, check=True, timeout=100)
    return library


class HostLauncher:
    """A launcher whose device is this machine's memory. ``shared_limit`` in bytes is what a block may have."""

    def __init__(self, library: Path, shared_limit: int = 48 << 10) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.job_nbytes.restype = ctypes.c_uint64
        self._shared_limit = shared_limit
        self.launched: list[tuple[str, int, int, int]] = []
        assert self._library.job_nbytes() == ctypes.sizeof(Job)

    def shared_nbytes(self, device: torch.device) -> int:
        assert device.type == "cpu"
        return self._shared_limit

    def launch(self, name: str, grid: int, threads: int, shared_nbytes: int, job: Job, device: torch.device) -> None:
        assert device.type == "cpu"
        assert shared_nbytes <= self._shared_limit
        self.launched.append((name, grid, threads, shared_nbytes))
        kernel = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)
        asked = ctypes.c_uint32(grid), ctypes.c_uint32(threads), ctypes.c_uint64(shared_nbytes)
        assert self._library.launch(kernel, *asked, ctypes.byref(job)), f"{name} wrote beyond its shared memory"
