"""Runs kernels where there is no GPU, and counts how often warps pass the regions of their text."""

from __future__ import annotations

import ctypes
import subprocess
from collections import Counter
from pathlib import Path

import torch

from bench.gpu.count import Launch
from bench.gpu.devices import WARP
from flexcomm.kernels.gpu.launcher import CupyLauncher, Job, LaunchConfig

SHIM = Path(__file__).with_name("cuda_on_host.h")
# The host must not fuse or reorder either. Without unique symbols, libraries of one process have counters of their own.
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fno-gnu-unique", "-fPIC", "-shared", "-w")
SHARED_NBYTES = 48 << 10
_LAUNCH = """
alignas(16) unsigned shared_words[1u << 14];
static void (*kernel)(const Job);
static const Job* job;
extern "C" void launch(void (*given)(const Job), unsigned grid, unsigned threads, const Job* argument) {
    kernel = given;
    job = argument;
    host::run_blocks(grid, threads, [] { kernel(*job); });
}
"""


def compile_for_host(source: Path, folder: Path, *flags: str) -> ctypes.CDLL:
    """Compile a text of C++ or CUDA that includes nothing of CUDA itself; the shim comes before it."""
    library = folder / f"{source.stem}_on_host.so"
    command = ["g++", *FLAGS, *flags, "-include", str(SHIM), "-o", str(library), "-x", "c++", str(source)]
    subprocess.run(command, check=True, timeout=300)
    loaded = ctypes.CDLL(str(library))
    loaded.count_name.restype = ctypes.c_char_p
    loaded.count_value.restype = ctypes.c_ulonglong
    return loaded


def compile_kernels(text: str, folder: Path) -> ctypes.CDLL:
    """Compile the library's kernels. Shared memory of their launch, which is declared as ``extern``, is here."""
    source = folder / "kernels.cpp"
    source.write_text(text + _LAUNCH)
    return compile_for_host(source, folder, *(("-D__shared__=",) if "extern __shared__" in text else ()))


def take_passes(library: ctypes.CDLL) -> dict[str, int]:
    """Return how many warps passed each ``COUNT(name)`` since the last call; templates have a counter each."""
    passes: Counter[str] = Counter()
    number = 0
    while name := library.count_name(number):
        passes[name.decode()] += library.count_value(number)
        number += 1
    library.count_reset()
    return dict(passes)


class CountingLauncher(CupyLauncher):
    """A launcher whose device is this machine's memory; ``launches`` are those since it was emptied."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.launches: list[Launch] = []

    def shared_nbytes(self, device: torch.device) -> int:  # noqa: ARG002  (there is one)
        return SHARED_NBYTES

    def launch(self, name: str, config: LaunchConfig, job: Job) -> None:
        kernel = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)
        self._library.launch(kernel, config.grid, config.threads, ctypes.byref(job))
        warps = -(-config.threads // WARP)
        passes = take_passes(self._library)
        self.launches.append(Launch(name, config.grid, warps, passes, config.shared_nbytes))
