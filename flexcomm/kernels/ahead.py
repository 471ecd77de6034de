"""Everything that calls of the CPU kernels can make numba compile, as a few calls that compile it.

Loops are compiled once for all plans and, where they can, for all dtypes: what differs is data to them. So few calls
are enough, and a test holds this list against the laws that every kernel set goes through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexcomm.kernels.base import StateUpdate
from flexcomm.kernels.layout import IndexCode, Layout
from flexcomm.kernels.per_tensor import Payload, TensorEncoding, TensorState, ThresholdCounts
from flexcomm.kernels.plan import NO_SAMPLE_KEY, Selection, TensorPlan, ValueCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm.kernels.cpu import CpuKernels

__all__ = ["CALLS", "compile_ahead"]

_LENGTH = 4
_PLAN = TensorPlan(1, _LENGTH, 1, _LENGTH, False, Selection.EVERYTHING, _LENGTH, ValueCode.FP32)
_VARIABLE = TensorPlan(1, _LENGTH, 1, _LENGTH, False, Selection.ABOVE, _LENGTH - 1, ValueCode.FP32)
_STATELESS = TensorState(None, None, StateUpdate())
_LAYOUT = Layout(IndexCode.BITMAP, 0, 0, _LENGTH, indices=1, scales=2, values=2, nwords=2 + _LENGTH)


def _encode(kernels: CpuKernels) -> None:
    threshold = ThresholdCounts(torch.tensor([_LENGTH - 1]), 0)
    words = torch.zeros(_LAYOUT.nwords, dtype=torch.int32)
    encoding = TensorEncoding(_VARIABLE, _LAYOUT, NO_SAMPLE_KEY, threshold)
    kernels.encode_tensor_(torch.ones(_LENGTH), words, encoding, _STATELESS)


def _decode(kernels: CpuKernels) -> None:
    kernels.decode_tensor_(_words(), [Payload(0, _LAYOUT)], _PLAN, NO_SAMPLE_KEY, "nodes", torch.empty(_LENGTH))


def _find_threshold(kernels: CpuKernels) -> None:
    kernels.find_threshold(torch.ones(_LENGTH), _VARIABLE, _STATELESS)


def _find_error(kernels: CpuKernels) -> None:
    kernels.find_problem(_words(), Payload(0, _LAYOUT), _PLAN)


def _check(kernels: CpuKernels) -> None:
    kernels.checksum(torch.zeros(_LENGTH * _LENGTH, dtype=torch.int32))
    kernels.read_counts(_words(), _VARIABLE, 0)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        kernels.is_finite(torch.ones(_LENGTH, dtype=dtype))


def _mix(kernels: CpuKernels) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.ones(_LENGTH, dtype=dtype)
        for others in (1, 2):
            kernels.mix_(x, 0.5, [x] * others, [0.25] * others, torch.empty_like(x))


def _words() -> torch.Tensor:
    return torch.zeros(_LAYOUT.nwords, dtype=torch.int32)


CALLS: dict[str, Callable[[CpuKernels], None]] = {
    "encode": _encode,
    "decode": _decode,
    "find_threshold": _find_threshold,
    "mix": _mix,
    "find_error": _find_error,
    "check": _check,
}
"""By name, those that take longest to compile first."""


def compile_ahead(name: str) -> None:
    """Compile what one of the calls needs, unless it is in the cache."""
    from flexcomm.kernels.cpu import CpuKernels

    CALLS[name](CpuKernels(threads=1))
