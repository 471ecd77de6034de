"""Kernels: the loops over chunks, once per kind of device, all to the same bits.

``choose_kernels`` finds the set for a device among what is installed. The variable ``FLEXCOMM_KERNELS`` forces one by
name: ``reference``, ``cpu`` or ``gpu``.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from flexcomm.errors import InvalidArgumentError
from flexcomm.kernels.base import (
    LARGEST_MAGNITUDE,
    Average,
    Kernels,
    Momentum,
    Payload,
    PayloadError,
    Reader,
    ThresholdCounts,
    Writer,
)
from flexcomm.kernels.plan import (
    NO_SAMPLE_KEY,
    IndexCode,
    Layout,
    SampleKey,
    Selection,
    TensorPlan,
    ValueCode,
    ValueName,
)
from flexcomm.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    import torch

__all__ = [
    "KERNELS_VARIABLE",
    "LARGEST_MAGNITUDE",
    "NO_SAMPLE_KEY",
    "Average",
    "IndexCode",
    "Kernels",
    "Layout",
    "Momentum",
    "Payload",
    "PayloadError",
    "Reader",
    "ReferenceKernels",
    "SampleKey",
    "Selection",
    "TensorPlan",
    "ThresholdCounts",
    "ValueCode",
    "ValueName",
    "Writer",
    "choose_kernels",
]

KERNELS_VARIABLE = "FLEXCOMM_KERNELS"
_LIBRARIES = {"reference": "torch", "cpu": "numba", "gpu": "cupy"}
_DEVICES = {"cpu": "cpu", "gpu": "cuda"}

_log = logging.getLogger("flexcomm")


def choose_kernels(device: torch.device, name: str | None = None) -> Kernels:
    """Return the kernel set for a device: the one named, else the one the variable names, else the fastest there is.

    Falls back to the reference, and says so in the log, where the fast one's library is not installed.
    """
    forced = name or os.environ.get(KERNELS_VARIABLE)
    return _find(device.type, forced) if forced else _find_fastest(device.type)


@lru_cache(maxsize=8)
def _find(device_type: str, name: str) -> Kernels:
    if name not in _LIBRARIES:
        raise InvalidArgumentError(f"there are no kernels {name!r}; choose from {', '.join(_LIBRARIES)}.")
    if _DEVICES.get(name, device_type) != device_type:
        raise InvalidArgumentError(
            f"the {name} kernels cannot work on {device_type} tensors; choose reference, or let {KERNELS_VARIABLE} be."
        )
    if find_spec(_LIBRARIES[name]) is None:
        raise InvalidArgumentError(f"the {name} kernels need {_LIBRARIES[name]}, which is not installed.")
    return _load(name)


@lru_cache(maxsize=8)
def _find_fastest(device_type: str) -> Kernels:
    name = next((name for name, device in _DEVICES.items() if device == device_type), "reference")
    if find_spec(_LIBRARIES[name]) is None:
        _log.warning(
            "%s is not installed: %s tensors are compressed by the slow reference", _LIBRARIES[name], device_type
        )
        name = "reference"
    _log.info("%s tensors are compressed by the %s kernels", device_type, name)
    return _load(name)


def _load(name: str) -> Kernels:
    """Import only what is used: numba and CuPy are slow to load, and CuPy is seldom there."""
    if name == "cpu":
        from flexcomm.kernels.cpu import CpuKernels

        return CpuKernels()
    if name == "gpu":
        from flexcomm.kernels.gpu import GpuKernels

        return GpuKernels()
    return ReferenceKernels()
