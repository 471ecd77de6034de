"""Who runs a kernel: CuPy, on a CUDA device. The tests have another, on the host."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Protocol

import numpy as np
import torch

from flexcomm.kernels.gpu.compiler import find_cubin
from flexcomm.kernels.gpu.records import Job


class Launcher(Protocol):
    """Runs a kernel of ``codec.cu`` by name, behind everything torch was told before, on one device."""

    def shared_nbytes(self, device: torch.device) -> int:
        """Return how much shared memory a block may have at most."""
        ...

    def launch(self, name: str, grid: int, threads: int, shared_nbytes: int, job: Job, device: torch.device) -> None:
        """Start ``grid`` blocks of so many threads."""
        ...


class CupyLauncher:
    """Launches on a CUDA device, on torch's current stream; compiles for it first, once a machine."""

    def __init__(self) -> None:
        self._cupy: Any = importlib.import_module("cupy")  # it has no types
        self._kernels: dict[tuple[str, int], Any] = {}

    def shared_nbytes(self, device: torch.device) -> int:
        return int(self._cupy.cuda.Device(device.index).attributes["MaxSharedMemoryPerBlockOptin"])

    def launch(self, name: str, grid: int, threads: int, shared_nbytes: int, job: Job, device: torch.device) -> None:
        cuda = self._cupy.cuda
        # A numpy array of one item is passed by value, whatever the item is.
        argument = np.frombuffer(bytes(job), np.dtype((np.void, ctypes.sizeof(job))))
        with cuda.Device(device.index), cuda.Stream.from_external(torch.cuda.current_stream(device)):
            self._kernel(name, device)((grid,), (threads,), (argument,), shared_mem=shared_nbytes)

    def _kernel(self, name: str, device: torch.device) -> Any:  # a function of CuPy's, which has no types
        key = name, device.index
        if key not in self._kernels:
            path = find_cubin(self._cupy.cuda.Device(device.index).compute_capability)
            kernel = self._cupy.RawModule(path=str(path)).get_function(name)
            kernel.max_dynamic_shared_size_bytes = self.shared_nbytes(device)
            self._kernels[key] = kernel
        return self._kernels[key]
