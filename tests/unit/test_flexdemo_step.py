"""A step of FlexDeMo in a world of one rank: what kernels step, what they do not, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

import flexcomm
from flexcomm import InvalidArgumentError, NonFiniteError, World
from flexdemo import FlexDeMo, FlexDeMoAdamW


@pytest.fixture
def world() -> Iterator[World]:
    with flexcomm.connect() as one:
        yield one


def momentum_of(optimizer: FlexDeMo) -> Tensor:
    (residuals,) = optimizer._sync.residuals.values()
    return torch.cat([residuals[name].view(-1) for name in residuals.names()]).clone()


def test_a_gradient_that_changed_after_it_left_spoils_no_momentum(world: World) -> None:
    """Also where no comm thread can work, as in a world of one rank."""
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = FlexDeMo(model.parameters(), lr=0.1, compressor=flexcomm.top_k(1 / 8), world=world, overlap=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
    before = momentum_of(optimizer)
    optimizer.zero_grad()
    model(torch.ones(4, 64)).square().mean().backward()
    clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(InvalidArgumentError, match="overlap=False"):
        optimizer.step()
    assert torch.equal(momentum_of(optimizer), before)


@pytest.mark.parametrize("update", ["sign", "plain"])
def test_float64_parameters_step_in_float64(world: World, update: Any) -> None:
    param = Parameter(torch.full((8,), 1.0 + 1e-12, dtype=torch.float64))
    optimizer = FlexDeMo([param], lr=1e-9, compressor=flexcomm.dense(), world=world, update=update)
    param.grad = torch.ones_like(param)
    optimizer.step()
    # The momentum is float32: so the average is 1e-9 to seven digits.
    assert torch.allclose(param, torch.full_like(param, 1.0 + 1e-12 - 1e-9), rtol=0.0, atol=1e-15)


def test_parameters_that_share_memory_step(world: World) -> None:
    memory = torch.zeros(100)
    params = [Parameter(memory), Parameter(memory[:50])]
    optimizer = FlexDeMo(params, lr=0.5, compressor=flexcomm.dense(), world=world)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(params[0].detach(), torch.cat([torch.full((50,), -1.0), torch.full((50,), -0.5)]))


@pytest.mark.parametrize("overlap", [False, True])
def test_parameters_with_gaps_and_replaced_ones_step(world: World, overlap: bool) -> None:
    params = [Parameter(torch.zeros(6, 4).t()), Parameter(torch.zeros(5))]
    options: dict[str, Any] = {"compressor": flexcomm.dense(), "world": world, "weight_decay": 0.5, "overlap": overlap}
    optimizer = FlexDeMo(params, lr=0.5, **options)
    torch.stack([param.sum() for param in params]).sum().backward()
    for param in params:
        param.data = param.data + 4.0
    optimizer.step()
    assert all(torch.equal(param, torch.full_like(param, 0.75 * 4.0 - 0.5)) for param in params)


def test_autograd_is_told_of_a_step(world: World) -> None:
    param = Parameter(torch.ones(8))
    optimizer = FlexDeMo([param], lr=0.5, compressor=flexcomm.dense(), world=world)
    param.grad, product = torch.ones(8), (param * param).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("decay", [0.3, 0.0])
def test_momentum_that_decays_fast_survives_a_failed_step_bit_for_bit(world: World, decay: float) -> None:
    """Dividing by a small decay would enlarge what was rounded: so there is a copy."""
    params = [Parameter(torch.zeros(64, 64)), Parameter(torch.zeros(64, 64))]
    optimizer = FlexDeMo(params, lr=0.1, compressor=flexcomm.demo(k=8), world=world, decay=decay)
    for param in params:
        param.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    before, params[1].grad[3, 4] = momentum_of(optimizer), torch.nan  # type: ignore[index]
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert torch.equal(momentum_of(optimizer), before)


def test_a_dtensor_whose_local_part_has_gaps_steps(world: World) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, gapped = DeviceMesh("cpu", [0]), torch.zeros(8, 4)[:, ::2]
        param = Parameter(DTensor.from_local(gapped, mesh, [Replicate()], shape=torch.Size((8, 2)), stride=(2, 1)))
        optimizer = FlexDeMo([param], lr=0.5, compressor=flexcomm.dense(), world=world)
        param.grad = DTensor.from_local(torch.ones(8, 2), mesh, [Replicate()])
        optimizer.step()
        assert torch.equal(gapped, torch.full((8, 2), -0.5))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("bucket_bytes", [16, 1024])
def test_parameters_with_one_gradient_get_averages_of_their_own(bucket_bytes: int) -> None:
    params, others = ([Parameter(torch.ones(4)) for _ in range(2)] for _ in range(2))
    params[0].grad = params[1].grad = torch.arange(4.0)
    for other in others:
        other.grad = torch.arange(4.0)
    with flexcomm.connect() as world:
        optimizer = FlexDeMoAdamW(params, compressor=flexcomm.top_k(1 / 4), world=world, bucket_bytes=bucket_bytes)
        separate = FlexDeMoAdamW(others, compressor=flexcomm.top_k(1 / 4), world=world, bucket_bytes=bucket_bytes)
        optimizer.step()
        separate.step()
    assert all(torch.equal(param, other) for param, other in zip(params, others, strict=True))
    assert not torch.equal(params[0], torch.ones(4))
