"""Everything that calls of the CPU kernels can make numba compile, as a few calls that compile it.

Loops are compiled once for all plans: what differs is data to them. So few calls are enough, and a test holds this list
against the laws that every kernel set goes through.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from flexcomm.kernels.base import StateUpdate
from flexcomm.kernels.cpu import CpuKernels
from flexcomm.kernels.layout import BufferPlan, Region
from flexcomm.kernels.plan import Selection, TensorPlan, TensorSpec, ValueCode


def _exchange(plan: TensorPlan, kernels: CpuKernels) -> None:
    """Send ones from one sender to itself."""
    bucket = BufferPlan.of((TensorSpec("x", (plan.rows, plan.cols), torch.float32),), (plan,), 0)
    words, x = torch.empty(bucket.nwords, dtype=torch.int32), torch.ones(plan.rows, plan.cols)
    kernels.encoder(bucket, words).encode_([x], None, None, StateUpdate(), step=0, sequence=0)
    decoder = kernels.decoder(bucket, words, [Region("self", 0, bucket.nwords)])
    decoder.verify(step=0, sequence=0)
    decoder.decode_([x], step=0, average="nodes")


def _mix(kernels: CpuKernels) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.ones(4, dtype=dtype)
        for others in (1, 2):
            kernels.mix_(x, 0.5, [x] * others, [0.25] * others, torch.empty_like(x))


_PLANS = {
    "squares": TensorPlan(64, 64, 64, 64, True, Selection.LARGEST, 4, ValueCode.BF16),
    "rows": TensorPlan(1, 64, 1, 64, True, Selection.LARGEST, 4, ValueCode.SIGN),
    "any chunks": TensorPlan(1, 8, 1, 8, True, Selection.STRIDED, 2, ValueCode.BF16),
    "threshold": TensorPlan(1, 8, 1, 8, False, Selection.ABOVE, 4, ValueCode.BF16),
    "random": TensorPlan(1, 8, 1, 8, False, Selection.SHUFFLED, 2, ValueCode.BF16),
}
CALLS: dict[str, Callable[[CpuKernels], None]] = {name: partial(_exchange, plan) for name, plan in _PLANS.items()}
"""By name, those that take longest to compile first."""
CALLS["mix"] = _mix


def compile_ahead(name: str) -> None:
    """Compile what one of the calls needs, unless it is in the cache."""
    from flexcomm.kernels.cpu import CpuKernels

    CALLS[name](CpuKernels(threads=1))
