"""Averages go into the tensors that were passed for them, which are refused unless they are fit for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import flexcomm
from flexcomm import InvalidArgumentError, InvalidTensorError, NonFiniteError
from flexcomm.sync.api import check_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from flexcomm import World

RECIPE = flexcomm.demo(k=4, chunk=4)


@pytest.fixture
def world() -> Iterator[World]:
    with flexcomm.connect() as connected:
        yield connected


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((8, 8), (100,), (0,), ())]


def test_a_sync_returns_the_very_tensors_passed_filled_with_what_new_ones_would_hold(world: World) -> None:
    outs = [torch.full_like(x, torch.nan) for x in tensors()]
    expected = flexcomm.hierarchical_sync(tensors(), RECIPE, world=world)
    got = flexcomm.hierarchical_sync(tensors(), RECIPE, world=world, out=outs)
    assert all(one is out for one, out in zip(got, outs, strict=True))
    assert all(torch.equal(out, other) for out, other in zip(outs, expected, strict=True))


def test_a_single_tensor_has_a_single_output(world: World) -> None:
    x, out = torch.ones(5), torch.empty(5)
    assert flexcomm.hierarchical_sync(x, flexcomm.dense(), world=world, out=out) is out
    assert torch.equal(out, x)


def test_an_output_may_be_a_parameter(world: World) -> None:
    out = torch.nn.Parameter(torch.zeros(5))
    flexcomm.hierarchical_sync(torch.ones(5), flexcomm.dense(), world=world, out=out, nonfinite="skip")
    assert torch.equal(out, torch.ones(5))


def test_what_is_skipped_is_zero_in_the_tensors_passed(world: World) -> None:
    out = torch.ones(5)
    x = torch.tensor([0.0, torch.nan, 1.0, 2.0, 3.0])
    flexcomm.hierarchical_sync(x, flexcomm.dense(), world=world, out=out, nonfinite="skip")
    assert torch.equal(out, torch.zeros(5))


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (torch.empty(9), r"torch.float32 \[9\] on cpu, but must be contiguous torch.float32 \[10\] on cpu: make it"),
        (torch.empty(10, dtype=torch.float64), r"torch.float64 \[10\]"),
        (torch.empty(10, device="meta"), r"on meta, but"),
        (torch.empty(20)[::2], r"on cpu, not contiguous, but"),
        (torch.zeros(1).expand(10), r"on cpu, not contiguous, but"),
    ],
)
def test_an_output_that_is_not_as_its_tensor_is_refused(world: World, out: Tensor, words: str) -> None:
    with pytest.raises(InvalidTensorError, match=f"out for 0 is .*{words}"):
        flexcomm.hierarchical_sync(torch.ones(10), flexcomm.dense(), world=world, out=out)


@pytest.mark.parametrize("outs", [[], [torch.empty(10)] * 3])
def test_every_tensor_needs_an_output(world: World, outs: list[Tensor]) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"out has {len(outs)} tensors for 2 to be averaged: pass one for"):
        flexcomm.hierarchical_sync([torch.ones(10), torch.ones(10)], flexcomm.dense(), world=world, out=outs)


def test_outputs_in_memory_of_their_own_are_fine_wherever_it_is() -> None:
    memory = torch.zeros(60)
    inputs = [memory[20:30], memory[20:30], memory[0:20:2]]
    check_outputs(inputs, [memory[50:60], memory[30:40], memory[40:50]], ["a", "b", "c"])
    check_outputs([torch.ones(0)] * 2, [memory[:0], memory[:0]], ["a", "b"])


@pytest.mark.parametrize("places", [(0, 30), (5, 30), (19, 30), (50, 50), (50, 55), (50, 41), (28, 50)])
def test_outputs_that_share_memory_are_refused(places: tuple[int, int]) -> None:
    memory = torch.zeros(70)
    inputs = [memory[0:20:2], memory[20:30]]
    outs = [memory[place : place + 10] for place in places]
    with pytest.raises(InvalidTensorError, match=r"out for \w.* shares memory with|shares memory with out for"):
        check_outputs(inputs, outs, ["a", "b"])


def test_an_output_inside_a_long_input_is_refused_whatever_lies_between() -> None:
    memory = torch.zeros(100)
    with pytest.raises(InvalidTensorError, match="out for a shares memory with the tensor a"):
        check_outputs([memory[0:91:10], memory[5:15]], [memory[60:70], torch.empty(10)], ["a", "b"])


def test_an_average_may_be_written_over_its_own_tensor_and_over_no_other(world: World) -> None:
    xs = [torch.arange(10.0), torch.arange(10.0, 20.0)]
    with pytest.raises(InvalidTensorError, match="shares memory with"):
        flexcomm.hierarchical_sync(xs, flexcomm.dense(), world=world, out=xs[::-1])
    with pytest.raises(InvalidTensorError, match="shares memory with"):
        flexcomm.hierarchical_sync(xs[0][:4], flexcomm.dense(), world=world, out=xs[0][1:5])
    assert torch.equal(torch.stack(xs), torch.arange(20.0).view(2, 10))
    expected = flexcomm.hierarchical_sync(xs, flexcomm.top_k(1 / 2), world=world)
    got = flexcomm.hierarchical_sync(xs, flexcomm.top_k(1 / 2), world=world, out=xs)
    assert got[0] is xs[0]
    assert torch.equal(torch.stack(got), torch.stack(expected))


def test_a_call_that_fails_leaves_the_tensors_that_it_was_to_overwrite(world: World) -> None:
    xs = [torch.arange(10.0), torch.full((10,), torch.inf)]
    with pytest.raises(NonFiniteError):
        flexcomm.hierarchical_sync(xs, flexcomm.top_k(1 / 2), world=world, out=xs)
    assert torch.equal(xs[0], torch.arange(10.0))
    assert torch.equal(xs[1], torch.full((10,), torch.inf))


def test_a_call_that_is_skipped_keeps_residuals_though_inputs_become_zero(world: World) -> None:
    residuals, xs = flexcomm.Residuals(), [torch.arange(1.0, 257.0), torch.ones(256)]
    options = {"world": world, "residuals": residuals, "nonfinite": "skip", "bucket_bytes": 1024}
    flexcomm.hierarchical_sync(xs, flexcomm.top_k(1 / 16), **options)
    before = [residuals[name].clone() for name in residuals.names()]
    xs[1][3] = torch.nan
    flexcomm.hierarchical_sync(xs, flexcomm.top_k(1 / 16), out=xs, **options)
    assert not torch.stack(xs).any()
    # Small whole numbers: what is restored is exact.
    assert all(torch.equal(residuals[name], one) for name, one in zip(residuals.names(), before, strict=True))
