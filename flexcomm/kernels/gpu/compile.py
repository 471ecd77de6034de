"""Compiles the kernels for a device by NVRTC, once a machine, and without a device where asked to."""

from __future__ import annotations

import hashlib
import importlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from flexcomm.errors import FlexcommError
from flexcomm.kernels.gpu.source import kernel_text

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Arithmetic as IEEE has it: whatever is fused, flushed or approximated would differ from the other kernel sets."""


def find_cubin(capability: str) -> Path:
    """Return where the compiled kernels are, among CuPy's own; compile them if they are not there yet."""
    made_of = repr((kernel_text(), OPTIONS, capability, load_nvrtc().getVersion()))
    name = f"flexcomm-{hashlib.sha256(made_of.encode()).hexdigest()}.cubin"
    failures, cubin = [], b""
    for folder in cache_folders():
        path = folder / name
        try:
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                cubin = cubin or compile_cubin(capability)
                with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                    file.write(cubin)
                # All ranks of a node may get here at once: each finds a whole file, its own or another's.
                Path(file.name).replace(path)
        except OSError as error:
            failures.append(f"{folder}: {error.strerror}")
        else:
            return path
    raise FlexcommError(
        f"compiled GPU kernels can be kept nowhere ({'; '.join(failures)}). Let CUPY_CACHE_DIR name a folder that can "
        f"be written."
    )


def cache_folders() -> Iterator[Path]:
    """Yield CuPy's own folder, then one for temporary files that nobody else can have written: cubins are run."""
    with suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()
    temporary = Path(tempfile.gettempdir()) / f"flexcomm-{os.getuid()}"
    with suppress(OSError):
        temporary.mkdir(mode=0o700, exist_ok=True)
        found = temporary.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            yield temporary


def compile_cubin(capability: str, *more_options: str) -> bytes:
    """Return the kernels compiled for a compute capability such as ``"90"``; no device is needed.

    Not by ``cupy.RawModule``, which appends ``-ftz=true`` to any options: https://github.com/cupy/cupy/issues/9576.
    """
    nvrtc = load_nvrtc()
    program = nvrtc.createProgram(kernel_text(), "flexcomm.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture=sm_{capability}", *OPTIONS, *more_options))
        # CuPy leaves out the last byte, a zero, as it does of texts; without it no tool reads the file.
        return bytes(nvrtc.getCUBIN(program)) + b"\0"
    except nvrtc.NVRTCError as error:
        version = ".".join(map(str, nvrtc.getVersion()))
        raise FlexcommError(
            f"NVRTC {version} cannot compile the kernels for compute capability {capability}: "
            f"{nvrtc.getProgramLog(program)} Install an nvidia-cuda-nvrtc that knows the device, or set "
            f"FLEXCOMM_KERNELS=staged."
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
            f"that fits the driver, flexcomm[cuda13] or flexcomm[cuda12], or set FLEXCOMM_KERNELS=staged."
        ) from error
    return nvrtc
