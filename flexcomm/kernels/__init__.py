"""Kernels: the loops over chunks, once per kind of device, all to the same bits.

``choose_kernels`` finds the set for a device among what is installed. The variable ``FLEXCOMM_KERNELS`` forces one by
name: ``reference``, ``cpu``, ``gpu`` or ``staged``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from flexcomm.device import KINDS
from flexcomm.errors import InvalidArgumentError
from flexcomm.kernels.base import (
    LARGEST_MAGNITUDE,
    Average,
    BucketDecoder,
    BucketEncoder,
    Kernels,
    Problem,
    StateUpdate,
    Status,
)
from flexcomm.kernels.layout import BufferPlan, IndexCode, Layout, Region, plan_layout
from flexcomm.kernels.plan import NO_SAMPLE_KEY, SampleKey, Selection, TensorPlan, TensorSpec, ValueCode, ValueName
from flexcomm.kernels.reference import ReferenceKernels

__all__ = [
    "KERNELS_VARIABLE",
    "LARGEST_MAGNITUDE",
    "NO_SAMPLE_KEY",
    "Average",
    "BucketDecoder",
    "BucketEncoder",
    "BufferPlan",
    "IndexCode",
    "Kernels",
    "Layout",
    "Problem",
    "ReferenceKernels",
    "Region",
    "SampleKey",
    "Selection",
    "StateUpdate",
    "Status",
    "TensorPlan",
    "TensorSpec",
    "ValueCode",
    "ValueName",
    "choose_kernels",
    "plan_layout",
]

KERNELS_VARIABLE = "FLEXCOMM_KERNELS"
_log = logging.getLogger("flexcomm")


def choose_kernels(device: torch.device, name: str | None = None) -> Kernels:
    """Return the kernel set for a device: the one named, else the one the variable names, else the fastest there is.

    Falls back to the reference, and says so in the log, where the fast one's library is not installed.
    """
    forced = name or os.environ.get(KERNELS_VARIABLE)
    return _find(device.type, forced) if forced else _find_fastest(device.type)


class _KernelSet(NamedTuple):
    """What a set needs to be installed, and how it is made. ``any_device``: not only where a device's row names it."""

    library: str
    make: Callable[[], Kernels]
    any_device: bool = False


def _make_cpu() -> Kernels:
    # Imported only where it is used, as are the others: numba and CuPy are slow to load, and CuPy is seldom there.
    from flexcomm.kernels.cpu import CpuKernels

    return CpuKernels()


def _make_gpu() -> Kernels:
    from flexcomm.kernels.gpu import GpuKernels

    return GpuKernels()


def _make_staged() -> Kernels:
    from flexcomm.kernels.staged import StagedKernels

    return StagedKernels(_make_cpu())


_SETS = {
    "reference": _KernelSet("torch", ReferenceKernels, any_device=True),
    "cpu": _KernelSet("numba", _make_cpu),
    "gpu": _KernelSet("cupy", _make_gpu),
    "staged": _KernelSet("numba", _make_staged, any_device=True),
}


@lru_cache(maxsize=8)
def _find(device_type: str, name: str) -> Kernels:
    if name not in _SETS:
        raise InvalidArgumentError(f"there are no kernels {name!r}; choose from {', '.join(_SETS)}.")
    chosen = _SETS[name]
    if not chosen.any_device and name != _own_kernels(device_type):
        raise InvalidArgumentError(
            f"the {name} kernels cannot work on {device_type} tensors; choose reference, or let {KERNELS_VARIABLE} be."
        )
    if find_spec(chosen.library) is None:
        raise InvalidArgumentError(f"the {name} kernels need {chosen.library}, which is not installed.")
    return chosen.make()


@lru_cache(maxsize=8)
def _find_fastest(device_type: str) -> Kernels:
    name = _own_kernels(device_type)
    if find_spec(_SETS[name].library) is None:
        _log.warning(
            "%s is not installed: %s tensors are compressed by the slow reference", _SETS[name].library, device_type
        )
        name = "reference"
    _log.info("%s tensors are compressed by the %s kernels", device_type, name)
    return _SETS[name].make()


def _own_kernels(device_type: str) -> str:
    return KINDS[device_type].kernels if device_type in KINDS else "reference"
