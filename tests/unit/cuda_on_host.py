"""Runs the GPU's kernels where there is no GPU: their text compiled for the host, every CUDA thread a fiber."""

from __future__ import annotations

import ctypes
import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from flexcomm.kernels.gpu import kernel_text, tables

if TYPE_CHECKING:
    import torch

    from flexcomm.kernels.gpu.tables import Record

SHIM = Path(__file__).with_name("cuda_on_host.h")
# The host must not fuse or reorder either; -O1 is as fast here, and compiles sooner.
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")


def compile_for_host(folder: Path, *extra_flags: str, text: str | None = None) -> Path:
    """Return the library made of the kernels, or of another ``text``."""
    source, library = folder / "kernels.cu", folder / "kernels_on_host.so"
    source.write_text(kernel_text() if text is None else text)
    command = ["g++", *FLAGS, *extra_flags, f'-DKERNELS="{source}"', "-o", str(library), "-x", "c++", str(SHIM)]
    subprocess.run(command, check=True, timeout=300)
    return library


class HostLauncher:
    """A launcher whose device is this machine's memory.

    ``shared_limit`` in bytes is what a block may have; ``seed`` the order in which threads take turns. ``launches`` are
    the names of all kernels that ran.
    """

    def __init__(self, library: Path, shared_limit: int = 96 << 10, seed: int = 0) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.struct_nbytes.restype = self.library.count_value.restype = ctypes.c_uint64
        self.library.count_name.restype = ctypes.c_char_p
        self._shared_limit, self._seed = shared_limit, seed
        self.launches: list[str] = []
        for name in ("Job", "MixJob", "Tensor", "Section", "Operand", "Place", "Term"):
            record = getattr(tables, {"MixJob": "MIX_JOB"}.get(name, name.upper()))
            assert self.library.struct_nbytes(name.encode()) == record.itemsize, name

    def shared_nbytes(self, device: torch.device) -> int:
        assert device.type == "cpu"
        return self._shared_limit

    def launch(self, name: str, device: torch.device, grid: int, threads: int, shared_nbytes: int, job: Record) -> None:
        assert device.type == "cpu"
        assert grid > 0
        assert shared_nbytes <= self._shared_limit
        self.launches.append(name)
        kernel = ctypes.cast(getattr(self.library, name), ctypes.c_void_p)
        argument = ctypes.create_string_buffer(job.tobytes(), job.nbytes)
        asked = ctypes.c_uint32(grid), ctypes.c_uint32(threads), ctypes.c_uint64(shared_nbytes)
        given = argument, ctypes.c_uint64(job.nbytes), ctypes.c_uint32(self._seed)
        assert self.library.launch(kernel, *asked, *given), f"{name} wrote beyond its shared memory"

    def counts(self) -> Counter[str]:
        """Return how many warps came by each ``COUNT`` so far."""
        names = (self.library.count_name(number).decode() for number in range(self.library.counter_count()))
        total: Counter[str] = Counter()
        for number, name in enumerate(names):
            total[name] += self.library.count_value(number)
        return total
