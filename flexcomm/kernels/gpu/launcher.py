"""Launches kernels on a CUDA device by CuPy."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from flexcomm.kernels.gpu.compile import find_cubin
from flexcomm.kernels.gpu.tables import Record


class CupyLauncher:
    """Launches on torch's current stream of a device; compiles for it first, once a machine."""

    def __init__(self) -> None:
        self._cupy: Any = importlib.import_module("cupy")  # it has no types
        self._modules: dict[int, Any] = {}
        self._kernels: dict[tuple[str, int], Any] = {}
        self._shared_nbytes: dict[int, int] = {}

    def shared_nbytes(self, device: torch.device) -> int:
        """Return how much shared memory a block may have at most."""
        # CuPy asks the driver for every attribute there is.
        if device.index not in self._shared_nbytes:
            attributes = self._cupy.cuda.Device(device.index).attributes
            self._shared_nbytes[device.index] = int(attributes["MaxSharedMemoryPerBlockOptin"])
        return self._shared_nbytes[device.index]

    def launch(self, name: str, device: torch.device, grid: int, threads: int, shared_nbytes: int, job: Record) -> None:
        """Run a kernel behind everything torch was told before, with a structure as its argument, by value."""
        cuda = self._cupy.cuda
        # A numpy array of one item is passed by value, whatever the item is.
        argument = np.frombuffer(job.tobytes(), np.dtype((np.void, job.nbytes)))
        stream = torch.cuda.current_stream(device)
        with cuda.Device(device.index), cuda.Stream.from_external(stream):
            if device.index not in self._modules:
                # One for all kernels: to load code, the driver may wait for what runs on the device.
                path = find_cubin(cuda.Device(device.index).compute_capability)
                self._modules[device.index] = self._cupy.RawModule(path=str(path))
            if (name, device.index) not in self._kernels:
                kernel = self._modules[device.index].get_function(name)
                kernel.max_dynamic_shared_size_bytes = self.shared_nbytes(device)
                self._kernels[name, device.index] = kernel
            self._kernels[name, device.index]((grid,), (threads,), (argument,), shared_mem=shared_nbytes)
