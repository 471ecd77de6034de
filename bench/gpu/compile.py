"""Kernels compiled for a GPU as a launch would compile them, with the lines of their text: by NVRTC, else by nvcc."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.errors import CompilerMissingError, UsageError
from bench.gpu.devices import Resources
from flexcomm.errors import FlexcommError
from flexcomm.kernels.gpu.compile import load_nvrtc


class Compiled(NamedTuple):
    """Machine code of a text, and what each of its kernels needs."""

    cubin: bytes
    ptx: str
    resources: dict[str, Resources]


def compile_text(name: str, text: str, capability: str, options: Sequence[str]) -> Compiled:
    """Compile for a compute capability such as ``"90"``; no device is needed."""
    try:
        nvrtc = load_nvrtc()
    except FlexcommError as error:
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            raise CompilerMissingError(f"{error} Or install nvcc, of NVIDIA's CUDA toolkit.") from error
        return compile_by_nvcc(nvcc, name, text, capability, options)
    program = nvrtc.createProgram(text, name, (), ())
    flags = (f"--gpu-architecture=sm_{capability}", *options, "-lineinfo", "--ptxas-options=-v")
    try:
        nvrtc.compileProgram(program, flags)
        log = nvrtc.getProgramLog(program)
        # CuPy cuts off the last byte, as if it were the end of a string; nvdisasm insists on it.
        return Compiled(bytes(nvrtc.getCUBIN(program)) + b"\0", bytes(nvrtc.getPTX(program)).decode(), read_log(log))
    except nvrtc.NVRTCError as error:
        raise UsageError(f"NVRTC cannot compile {name} for sm_{capability}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def compile_by_nvcc(nvcc: str, name: str, text: str, capability: str, options: Sequence[str]) -> Compiled:
    """Do the same by a program; of the same version it gives the same code."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / name
        source.write_text(text)
        command = [nvcc, f"-arch=sm_{capability}", *options, "-lineinfo", "-Xptxas", "-v", str(source), "-o"]
        cubin, ptx = source.with_suffix(".cubin"), source.with_suffix(".ptx")
        made = subprocess.run([*command, str(cubin), "-cubin"], capture_output=True, text=True, check=False)
        if made.returncode:
            raise UsageError(f"nvcc cannot compile {name} for sm_{capability}: {made.stderr}")
        subprocess.run([*command, str(ptx), "-ptx"], capture_output=True, check=True)
        return Compiled(cubin.read_bytes(), ptx.read_text(), read_log(made.stderr))


def read_log(log: str) -> dict[str, Resources]:
    """Return what ptxas says that each kernel needs."""
    found = {}
    for part in log.split("Compiling entry function ")[1:]:
        numbers = {
            key: int(match[1]) if (match := re.search(pattern, part)) else 0
            for key, pattern in (
                ("registers", r"Used (\d+) registers"),
                ("stores", r"(\d+) bytes spill stores"),
                ("loads", r"(\d+) bytes spill loads"),
                ("shared", r"(\d+) bytes smem"),
            )
        }
        spilled = numbers["stores"] + numbers["loads"]
        found[part.split("'")[1]] = Resources(numbers["registers"], spilled, numbers["shared"])
    return found
