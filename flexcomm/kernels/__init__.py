"""Kernels: the loops over chunks, once per kind of device, all to the same bits.

``choose_kernels`` finds the set for a device among what is installed. The variable ``FLEXCOMM_KERNELS`` forces one by
name: ``reference``, ``cpu``, ``gpu`` or ``staged``.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

import torch

from flexcomm.device import KINDS
from flexcomm.errors import InvalidArgumentError
from flexcomm.kernels.base import (
    LARGEST_MAGNITUDE,
    STORE,
    Average,
    BucketDecoder,
    Epilogue,
    EpilogueKind,
    Kernels,
    Problem,
    StateUpdate,
    Status,
    apply_epilogue_,
)
from flexcomm.kernels.layout import BufferPlan, IndexCode, Region, plan_layout
from flexcomm.kernels.plan import Selection, TensorPlan, TensorSpec, ValueCode, ValueName
from flexcomm.kernels.reference import ReferenceKernels

__all__ = [
    "KERNELS_VARIABLE",
    "LARGEST_MAGNITUDE",
    "STORE",
    "Average",
    "BucketDecoder",
    "BufferPlan",
    "Epilogue",
    "EpilogueKind",
    "IndexCode",
    "Kernels",
    "Problem",
    "ReferenceKernels",
    "Region",
    "Selection",
    "StateUpdate",
    "Status",
    "TensorPlan",
    "TensorSpec",
    "ValueCode",
    "ValueName",
    "apply_epilogue_",
    "choose_kernels",
    "plan_layout",
]

KERNELS_VARIABLE = "FLEXCOMM_KERNELS"
_log = logging.getLogger("flexcomm")
_SETS = {
    "reference": ("torch", "ReferenceKernels"),
    "cpu": ("numba", "CpuKernels"),
    "gpu": ("cupy", "GpuKernels"),
    "staged": ("numba", "StagedKernels"),
}
"""Kernel sets by name, which is their module's: the library that must be installed, and the class."""


def choose_kernels(device: torch.device, name: str | None = None) -> Kernels:
    """Return the kernel set for a device: the one named, else the one the variable names, else the fastest there is.

    Falls back to the reference, and says so in the log, where the fast one's library is not installed.
    """
    return _choose(device.type, name or os.environ.get(KERNELS_VARIABLE, ""))


@lru_cache(maxsize=16)
def _choose(device_type: str, forced: str) -> Kernels:
    own = KINDS[device_type].kernels if device_type in KINDS else "reference"
    name = forced or own
    if name not in _SETS:
        raise InvalidArgumentError(f"there are no kernels {name!r}; choose from {', '.join(_SETS)}.")
    if name not in (own, "reference", "staged"):
        raise InvalidArgumentError(
            f"the {name} kernels cannot work on {device_type} tensors; choose reference, or let {KERNELS_VARIABLE} be."
        )
    library = _SETS[name][0]
    if find_spec(library) is None:
        if forced:
            raise InvalidArgumentError(f"the {name} kernels need {library}, which is not installed.")
        _log.warning("%s is not installed: %s tensors are compressed by the slow reference", library, device_type)
        name = "reference"
    if not forced:
        _log.info("%s tensors are compressed by the %s kernels", device_type, name)
    # Imported only where it is used: numba and CuPy are slow to load, and CuPy is seldom there.
    kernels: Kernels = getattr(import_module(f"flexcomm.kernels.{name}"), _SETS[name][1])()
    return kernels
