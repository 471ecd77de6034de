"""Buckets for the GPU's kernels, and tensors in chunks of 64 x 64, which they keep in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexcomm.codec import assemble_buffer
from flexcomm.kernels import TensorSpec, ValueCode
from flexcomm.testing.cases import numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flexcomm.kernels import BufferPlan, TensorPlan


def squares() -> dict[str, tuple[Tensor, Tensor | None]]:
    """Tensors by how hard it is to find their largest coefficients, with the state that makes it so; None: any."""
    column, sparse, order = torch.zeros(64, 64), torch.zeros(128, 128), torch.arange(4096)
    column[:, 7] = numbers("normal", (64,), 1)
    sparse.view(-1)[::811] = numbers("normal", (sparse.view(-1)[::811].numel(),), 2)
    zeros = torch.zeros(64, 64)
    return {
        "noise": (numbers("normal", (128, 192), 3), None),
        "ragged": (numbers("normal", (100, 90), 4), None),
        "a rim of one row": (numbers("normal", (65, 130), 5), None),
        "zeros": (torch.zeros(64, 128), torch.zeros(2, 4096)),
        "constant": (torch.full((128, 64), 0.37), torch.zeros(2, 4096)),
        "one column": (column, torch.zeros(1, 4096)),
        "sparse": (sparse, None),
        "heavy tails": (numbers("wide", (128, 128), 6), None),
        "rank one": (torch.outer(numbers("normal", (128,), 7), numbers("normal", (64,), 8)), None),
        "denormal": (numbers("tiny", (64, 64), 9), None),
        "large": (numbers("normal", (64, 64), 10) * 1e28, None),
        "all equal": (zeros, torch.full((1, 4096), 0.5)),
        "equal below": (zeros, torch.where(order % 100 == 7, torch.linspace(1, 9, 4096), 0.25)[None]),
        "few large, the rest equal": (zeros, torch.where(order % 200 == 3, 3.0, -0.5)[None]),
        "sixty equal": (zeros, torch.where(order % 70 == 3, 3.0, 0.001 * torch.sin(order))[None]),
        "to the last bit": (zeros, (1.0 + order.flip(0) * 2.0**-23)[None]),
    }


CHOICES = [
    *((32, values) for values in ValueCode),
    *((1, ValueCode.INT8), (4, ValueCode.SIGN), (5, ValueCode.FP32), (33, ValueCode.SIGN2), (96, ValueCode.FP16)),
    *((300, ValueCode.BF16), (396, ValueCode.SIGN), (700, ValueCode.INT8), (1000, ValueCode.FP32)),
]


def bucket_of(plans: Sequence[TensorPlan]) -> BufferPlan:
    specs = tuple(TensorSpec(f"t{i}", (plan.rows, plan.cols), torch.float32) for i, plan in enumerate(plans))
    return assemble_buffer(specs, tuple(plans))
