"""Residuals cut anew hold the same elements, however many ranks saved them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flexcomm
from flexcomm import InvalidArgumentError, TensorSpec
from flexcomm.kernels.reference.transform import accumulate, restore
from flexdemo.checkpoint import UnshardedTensor

SHAPES = {"matrix": (100, 70), "flat": (1000,), "few rows": (3, 70), "stack": (5, 20, 20)}
# Transformed there and back twice, each time some ten roundings of 2**-24 of the largest, which is below 5.
ROUNDING = 2.0**-24 * 40 * 5


def whole(shape: tuple[int, ...], dim: int | None) -> UnshardedTensor:
    return UnshardedTensor(TensorSpec("w", shape, torch.float32), flexcomm.demo(k=4, chunk=16), dim)


def saved_by(ranks: int, x: Tensor, kept: UnshardedTensor) -> Tensor:
    """Return what so many ranks would save of ``x``: a row each, zeros at the end."""
    rows = [torch.zeros(0) if shard is None else accumulate(*shard).reshape(-1) for shard in kept.shards(x, ranks)]
    longest = max(row.numel() for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (0, longest - row.numel())) for row in rows])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dim", [None, 0])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (4, 2), (3, 5)])
def test_elements_stay_what_they_were(shape: tuple[int, ...], dim: int | None, before: int, after: int) -> None:
    kept, x = whole(shape, dim), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows, found = saved_by(before, x, kept), torch.zeros(shape)
    for rank, shard in enumerate(kept.shards(found, after)):
        state = kept.reshard(rows, after, rank)
        if shard is None:
            assert state.numel() == 0
            continue
        elements, plan = shard
        assert tuple(state.shape) == plan.state_shape
        elements.copy_(restore(state, plan).reshape(elements.shape))
    assert float((found - x).abs().max()) <= ROUNDING


def test_rows_of_another_model_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="of another model"):
        whole((100, 70), None).reshard(torch.zeros(2, 100), 1, 0)
