"""``codec.cu``, compiled by NVRTC, and kept on disk for the next process."""

from __future__ import annotations

import hashlib
import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

from flexcomm.errors import FlexcommError

SOURCE = Path(__file__).with_name("codec.cu")
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Arithmetic as IEEE has it: whatever is fused, flushed or approximated would differ from the other kernel sets."""


def load_nvrtc() -> Any:  # CuPy has no types
    """Return CuPy's door to NVRTC, with NVRTC behind it: CuPy itself looks for it no sooner than it is asked."""
    try:
        nvrtc = importlib.import_module("cupy").cuda.nvrtc
        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        raise FlexcommError(
            f"NVRTC, which compiles the GPU kernels, cannot be loaded ({str(error).strip()}). Install the extra "
            f"that fits the driver, flexcomm[cuda13] or flexcomm[cuda12], or set FLEXCOMM_KERNELS=reference."
        ) from error
    return nvrtc


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
