"""Runs kernels where there is no GPU, and counts how often warps pass the regions of their text."""

from __future__ import annotations

import ctypes
import subprocess
from collections import Counter
from pathlib import Path

SHIM = Path(__file__).with_name("cuda_on_host.h")
# The host must not fuse or reorder either.
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w")


def compile_for_host(source: Path, folder: Path, *flags: str) -> ctypes.CDLL:
    """Compile a text of C++ or CUDA that includes nothing of CUDA itself; the shim comes before it."""
    library = folder / f"{source.stem}_on_host.so"
    command = ["g++", *FLAGS, *flags, "-include", str(SHIM), "-o", str(library), "-x", "c++", str(source)]
    subprocess.run(command, check=True, timeout=300)
    loaded = ctypes.CDLL(str(library))
    loaded.count_name.restype = ctypes.c_char_p
    loaded.count_value.restype = ctypes.c_ulonglong
    return loaded


def take_passes(library: ctypes.CDLL) -> dict[str, int]:
    """Return how many warps passed each ``COUNT(name)`` since the last call; templates have a counter each."""
    passes: Counter[str] = Counter()
    number = 0
    while name := library.count_name(number):
        passes[name.decode()] += library.count_value(number)
        number += 1
    library.count_reset()
    return dict(passes)
