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

from flexcomm.device import HOST, KINDS
from flexcomm.errors import InvalidArgumentError
from flexcomm.kernels.base import (
    LARGEST_MAGNITUDE,
    STORE,
    Average,
    BucketDecoder,
    DeviceStatus,
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
    "DeviceStatus",
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

    Where the fast one's library is not installed, tensors of a device are copied to the host's kernels; without those,
    too, the reference serves. The log says so, once.
    """
    return _choose(device.type, name or os.environ.get(KERNELS_VARIABLE, ""))


@lru_cache(maxsize=16)
def _choose(device_type: str, forced: str) -> Kernels:
    kind = KINDS.get(device_type)
    own = "reference" if kind is None else kind.kernels
    if (forced or own) not in _SETS:
        raise InvalidArgumentError(f"there are no kernels {forced!r}; choose from {', '.join(_SETS)}.")
    if forced and forced not in (own, "reference", "staged"):
        raise InvalidArgumentError(
            f"the {forced} kernels cannot work on {device_type} tensors; choose reference, or let {KERNELS_VARIABLE} "
            f"be."
        )
    wanted = [forced] if forced else [own, *(["staged"] if device_type != HOST.name else []), "reference"]
    name = next((one for one in wanted if find_spec(_SETS[one][0]) is not None), None)
    library = _SETS[wanted[0]][0]
    advice = kind.extra if kind is not None and kind.extra and wanted[0] == own else library
    if name is None:
        raise InvalidArgumentError(f"the {forced} kernels need {library}: install {advice}.")
    if name != wanted[0]:
        _log.warning(
            "%s is not installed, so %s tensors are %s: install %s",
            library,
            device_type,
            "copied to the host and compressed there" if name == "staged" else "compressed by the slow reference",
            advice,
        )
    if not forced:
        _log.info("%s tensors are compressed by the %s kernels", device_type, name)
    # Imported only where it is used: numba and CuPy are slow to load, and CuPy is seldom there.
    kernels: Kernels = getattr(import_module(f"flexcomm.kernels.{name}"), _SETS[name][1])()
    return kernels
