"""A kernel of ``codec.cu``: what it is given, how it is compiled by NVRTC, and how CuPy launches it."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexcomm.errors import FlexcommError
from flexcomm.kernels.gpu.blocks import LaunchConfig

SOURCE = Path(__file__).with_name("codec.cu")
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Arithmetic as IEEE has it: whatever is fused, flushed or approximated would differ from the other kernel sets."""


def _int64s(names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names.split()]


# The structures of codec.cu, field by field. Addresses are integers.
class Transform(ctypes.Structure):
    """A transform's program, on the device."""

    _fields_ = _int64s("height levels inputs outputs bounds steps")


class Section(ctypes.Structure):
    """Where one sender's sections begin, how its indices are written, and where its entries before each chunk are."""

    _fields_ = _int64s("indices scales values code low_bits entry_bits chunk_bits value_padding before")


class Term(ctypes.Structure):
    """A vector to be mixed in, and its weight."""

    _fields_ = [("memory", ctypes.c_int64), ("weight", ctypes.c_double)]


class Job(ctypes.Structure):
    """What every kernel is given, by value; and the device to run on, that of its tensors."""

    _fields_ = [
        *_int64s("rows cols chunk_rows chunk_cols grid_cols chunk_numel chunks"),
        *_int64s("transformed selection k tau_bits values value_bits scales count_bits key start"),
        *_int64s("element numel first senders divisor by_contributors term_count"),
        *_int64s("group solo pitch pitch_down pitch_along turned_at marks_at ranks_at block_words"),
        *[(name, ctypes.c_float) for name in ("decay", "factor", "stays", "padding")],
        *[("down", Transform), ("along", Transform), ("own", Section)],
        *_int64s("sections memory state next_state words counts answer workspace terms out distances"),
    ]
    device: torch.device

    def __init__(self, **numbers: float) -> None:
        super().__init__(**numbers)
        self._held: list[Tensor] = []

    def set(self, **fields: float | Tensor | ctypes.Structure | None) -> None:
        """Set fields: to a number, a structure, or the address of a tensor."""
        for name, value in fields.items():
            setattr(self, name, self.address_of(value) if isinstance(value, Tensor) else value or 0)

    def address_of(self, x: Tensor) -> int:
        """Return the address of a tensor, which is held for as long as this job.

        Memory given back before the launch could be given out again for another part of the same launch.
        """
        self._held.append(x)
        self.device = x.device
        return x.data_ptr()


class CupyLauncher:
    """Launches on a CUDA device, on torch's current stream; compiles for it first, once a machine."""

    def __init__(self) -> None:
        self._cupy: Any = importlib.import_module("cupy")  # it has no types
        self._kernels: dict[tuple[str, int], Any] = {}

    def shared_nbytes(self, device: torch.device) -> int:
        """Return how much shared memory a block may have at most."""
        return int(self._cupy.cuda.Device(device.index).attributes["MaxSharedMemoryPerBlockOptin"])

    def launch(self, name: str, config: LaunchConfig, job: Job) -> None:
        """Run a kernel behind everything torch was told before."""
        cuda, device = self._cupy.cuda, job.device
        # A numpy array of one item is passed by value, whatever the item is.
        argument = np.frombuffer(bytes(job), np.dtype((np.void, ctypes.sizeof(job))))
        with cuda.Device(device.index), cuda.Stream.from_external(torch.cuda.current_stream(device)):
            if (name, device.index) not in self._kernels:
                path = find_cubin(cuda.Device(device.index).compute_capability)
                kernel = self._cupy.RawModule(path=str(path)).get_function(name)
                kernel.max_dynamic_shared_size_bytes = self.shared_nbytes(device)
                self._kernels[name, device.index] = kernel
            launch = self._kernels[name, device.index]
            launch((config.grid,), (config.threads,), (argument,), shared_mem=config.shared_nbytes)


def find_cubin(capability: str) -> Path:
    """Return where the compiled kernels are, among CuPy's own; compile them if they are not there yet."""
    made_of = repr((SOURCE.read_text(), OPTIONS, capability, load_nvrtc().getVersion()))
    folder = Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()
    path = folder / f"flexcomm-{hashlib.sha256(made_of.encode()).hexdigest()}.cubin"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(compile_cubin(capability))
        # All ranks of a node may get here at once: each finds a whole file, its own or another's.
        Path(file.name).replace(path)
    return path


def compile_cubin(capability: str) -> bytes:
    """Return ``codec.cu`` compiled for a compute capability such as ``"90"``; no device is needed.

    Not by ``cupy.RawModule``, which appends ``-ftz=true`` to any options: https://github.com/cupy/cupy/issues/9576.
    """
    nvrtc = load_nvrtc()
    program = nvrtc.createProgram(SOURCE.read_text(), SOURCE.name, (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture=sm_{capability}", *OPTIONS))
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        version = ".".join(map(str, nvrtc.getVersion()))
        raise FlexcommError(
            f"NVRTC {version} cannot compile the kernels for compute capability {capability}: "
            f"{nvrtc.getProgramLog(program)} Install an nvidia-cuda-nvrtc that knows the device, or set "
            f"FLEXCOMM_KERNELS=reference."
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def load_nvrtc() -> Any:  # CuPy has no types
    """Return CuPy's interface to NVRTC, with NVRTC loaded: CuPy itself looks for it no sooner than it is asked."""
    try:
        nvrtc = importlib.import_module("cupy").cuda.nvrtc
        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        raise FlexcommError(
            f"NVRTC, which compiles the GPU kernels, cannot be loaded ({str(error).strip()}). Install the extra "
            f"that fits the driver, flexcomm[cuda13] or flexcomm[cuda12], or set FLEXCOMM_KERNELS=reference."
        ) from error
    return nvrtc
