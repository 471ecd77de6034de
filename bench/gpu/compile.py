"""Kernels compiled for a GPU by NVRTC, as a launch would compile them, with the lines of their text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.errors import UsageError
from bench.gpu.devices import Resources
from flexcomm.kernels.gpu.launcher import load_nvrtc


class Compiled(NamedTuple):
    """Machine code of a text, and what each of its kernels needs."""

    cubin: bytes
    ptx: str
    resources: Mapping[str, Resources]


def compile_text(
    name: str, text: str, capability: str, options: Sequence[str], headers: Mapping[str, str] | None = None
) -> Compiled:
    """Compile for a compute capability such as ``"90"``; no device is needed."""
    nvrtc = load_nvrtc()
    headers = headers or {}
    contents, names = (tuple(one.encode() for one in many) for many in (headers.values(), headers))
    program = nvrtc.createProgram(text, name, contents, names)
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


def read_log(log: str) -> dict[str, Resources]:
    """Return what ptxas says that each kernel needs."""
    found = {}
    for part in log.split("Compiling entry function ")[1:]:
        kernel = part.split("'")[1]
        numbers = {
            key: int(match[1]) if (match := re.search(pattern, part)) else 0
            for key, pattern in (
                ("registers", r"Used (\d+) registers"),
                ("stores", r"(\d+) bytes spill stores"),
                ("loads", r"(\d+) bytes spill loads"),
                ("shared", r"(\d+) bytes smem"),
            )
        }
        found[kernel] = Resources(numbers["registers"], numbers["stores"] + numbers["loads"], numbers["shared"])
    return found
