"""Runs the GPU's kernels where there is no GPU: their text compiled for the host, every CUDA thread a fiber."""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from flexcomm.kernels.gpu import kernel_text, tables

if TYPE_CHECKING:
    import torch

    from flexcomm.kernels.gpu.tables import Record

SHIM = Path(__file__).with_name("cuda_on_host.h")
# The host must not fuse or reorder either; -O1 is as fast here, and compiles sooner. No kernel asks for all of CUDA.
FLAGS = (
    *("-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unused-function"),
)
_LAUNCHING = threading.Lock()
"""One launch at a time: all fibers of a library share its variables."""
_POINTED_TO = ("Tensor", "Section", "Operand", "Place", "Term")


def compile_for_host(folder: Path, *extra_flags: str, text: str | None = None) -> Path:
    """Return the library made of the kernels, or of another ``text``, whose kernels take a ``Job`` or a ``MixJob``."""
    source, library = folder / "kernels.cu", folder / "kernels_on_host.so"
    text = kernel_text() if text is None else text
    structures = set(re.findall(r"^struct (?:alignas\(\d+\) )?(\w+)", text, re.MULTILINE))
    sizes = {name: getattr(tables, name.upper()).itemsize for name in _POINTED_TO if name in structures}
    checks = (f'static_assert(sizeof({name}) == {size}, "as tables.py has it");\n' for name, size in sizes.items())
    source.write_text(text + "".join(checks))
    launched = " ".join(f"LAUNCHES({name})" for name in ("Job", "MixJob") if name in structures)
    defined = f'-DKERNELS="{source}"', f"-DLAUNCHED={launched}"
    command = ["g++", *FLAGS, *extra_flags, *defined, "-o", str(library), "-x", "c++", str(SHIM)]
    subprocess.run(command, check=True, timeout=300)
    return library


class HostLauncher:
    """A launcher whose device is this machine's memory.

    ``shared_limit`` in bytes is what a block may have; ``seed`` the order in which threads take turns; ``device_type``
    what torch calls the device whose memory the host reaches. ``launches`` are the names of all kernels that ran.
    """

    def __init__(self, library: Path, shared_limit: int = 96 << 10, seed: int = 0, device_type: str = "cpu") -> None:
        self.library = ctypes.CDLL(str(library))
        self._shared_limit, self._seed, self._device_type = shared_limit, seed, device_type
        self.launches: list[str] = []

    def shared_nbytes(self, device: torch.device) -> int:  # noqa: ARG002  (there is one)
        """Return how much shared memory a block may have."""
        return self._shared_limit

    def launch(self, name: str, device: torch.device, grid: int, threads: int, shared_nbytes: int, job: Record) -> None:
        """Run a kernel, block by block."""
        if device.type != self._device_type or grid < 1 or shared_nbytes > self._shared_limit:
            raise AssertionError(
                f"got a launch of {grid} blocks with {shared_nbytes} bytes of shared memory on {device}, needed one or "
                f"more blocks with {self._shared_limit} bytes at most on the {self._device_type}; see tables.py."
            )
        self.launches.append(name)
        kernel = ctypes.cast(getattr(self.library, name), ctypes.c_void_p)
        launch = self.library.launch_MixJob if job.dtype == tables.MIX_JOB else self.library.launch_Job
        launch.restype = ctypes.c_bool
        argument = ctypes.create_string_buffer(job.tobytes(), job.nbytes)
        asked = ctypes.c_uint32(grid), ctypes.c_uint32(threads), ctypes.c_uint64(shared_nbytes)
        given = argument, ctypes.c_uint64(job.nbytes), ctypes.c_uint32(self._seed)
        with _LAUNCHING:
            is_done = launch(kernel, *asked, *given)
        if not is_done:
            raise AssertionError(f"{name} wrote beyond the {shared_nbytes} bytes of shared memory that it asked for.")
