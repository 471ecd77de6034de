"""Calls of hierarchical_sync as users get them wrong, or make them where tensors are special."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import flexcomm
from flexcomm import hierarchical_sync, start_sync
from flexcomm.errors import CompressorError, InvalidArgumentError, InvalidTensorError, NonFiniteError
from flexcomm.sync.engine import MOST_PLANS, engine_of
from flexcomm.sync.plan import MOST_SPARE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flexcomm import World

X = torch.arange(200.0).reshape(10, 20)


class Unhashable:
    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def world() -> Iterator[World]:
    with flexcomm.connect() as world:
        yield world


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"names": [3]}, "all different strings"),
        ({"names": ["a[0:4096]"]}, "stand for shards of tensors"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0"),
        ({"bucket_bytes": 1e6}, "bucket_bytes is 1000000.0"),
        ({"step": -1}, "step is -1"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_before_anything_starts(
    world: World, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        start_sync([X], flexcomm.dense(), world=world, **options)


def test_a_compressor_that_cannot_be_hashed_is_refused(world: World) -> None:
    with pytest.raises(CompressorError, match="frozen dataclass"):
        hierarchical_sync(X, Unhashable(), world=world)  # type: ignore[arg-type]


@pytest.mark.parametrize("x", [torch.zeros(3, 3).to_sparse(), torch.zeros(3, device="meta")])
def test_a_tensor_without_elements_in_memory_is_refused(world: World, x: torch.Tensor) -> None:
    with pytest.raises(InvalidTensorError, match="dense tensors on cpu or cuda"):
        hierarchical_sync(x, flexcomm.dense(), world=world)


@pytest.mark.parametrize("algorithm", ["gather", "gatherv", "reduce", "two_phase", "dense"])
def test_a_first_call_in_inference_mode_leaves_memory_that_later_calls_can_use(world: World, algorithm: Any) -> None:
    compressor = flexcomm.dense() if algorithm == "reduce" else flexcomm.top_k(1.0, values="fp32")
    residuals = flexcomm.Residuals()

    def sync() -> torch.Tensor:
        return hierarchical_sync(X, compressor, world=world, algorithm=algorithm, residuals=residuals)

    with torch.inference_mode():
        first = sync()
    assert torch.equal(first, X)
    assert torch.equal(sync(), X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_residuals_are_float32_whatever_torchs_default_is(world: World, dtype: torch.dtype) -> None:
    residuals, default = flexcomm.Residuals(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        hierarchical_sync(X, flexcomm.top_k(1 / 4), world=world, residuals=residuals)
    finally:
        torch.set_default_dtype(default)
    assert [state.dtype for state in residuals.state_dict().values()] == [torch.float32]


def test_a_nonfinite_tensor_is_named_on_its_rank(world: World) -> None:
    with pytest.raises(NonFiniteError, match=r"rank 0 \(node 0\) had NaN.* Here: NaN, .* in bad\. Skip this step"):
        hierarchical_sync([X, X * float("nan")], flexcomm.top_k(0.1), names=["good", "bad"], world=world)


def test_a_first_call_that_fails_leaves_no_residual_behind(world: World) -> None:
    residuals = flexcomm.Residuals()
    with pytest.raises(NonFiniteError):
        hierarchical_sync(X * float("nan"), flexcomm.demo(k=2, chunk=8), world=world, residuals=residuals)
    assert residuals.names() == []
    hierarchical_sync(X, flexcomm.demo(k=2, chunk=4), world=world, residuals=residuals)


def test_shapes_that_keep_changing_do_not_fill_the_memory(world: World) -> None:
    hierarchical_sync(torch.ones(1), flexcomm.dense(), world=world)
    (first,) = map(weakref.ref, engine_of(world).plans.values())
    for length in range(2, MOST_PLANS + 20):
        hierarchical_sync(torch.ones(length), flexcomm.dense(), world=world)
    assert len(engine_of(world).plans) == MOST_PLANS
    gc.collect()
    assert first() is None, "a forgotten call still holds its buffers"


def test_a_burst_of_calls_gives_its_memory_back(world: World) -> None:
    handles = [start_sync(X, flexcomm.dense(), world=world) for _ in range(3 * MOST_SPARE)]
    assert all(torch.equal(handle.wait(), X) for handle in handles)
    (plan,) = engine_of(world).plans.values()
    assert [len(pool.spare) for pool in plan.pools] == [MOST_SPARE]
