"""A state that was loaded to another device goes to that of the parameters, and training goes on bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

import flexcomm
from flexcomm import World
from flexdemo import (
    AccumAdam,
    CompressionState,
    DecentralizedAdam,
    DistributedOptimizer,
    FlexDeMo,
    FlexDeMoAdamW,
    HookHandle,
    OuterOptimizer,
)

DCT = flexcomm.demo(k=4, chunk=16)


class Elsewhere(Tensor):
    """A tensor that says it is on a device, until it is moved."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 3)

    def to(self, *args: Any, **options: Any) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor).to(*args, **options)

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor)


def moved(state: Any) -> Any:
    """Return the same state, as ``torch.load(map_location=...)`` may return it."""
    if isinstance(state, Tensor):
        return state.clone().as_subclass(Elsewhere)
    if isinstance(state, dict):
        return {key: moved(value) for key, value in state.items()}
    return [moved(one) for one in state] if isinstance(state, list) else state


def everything_in(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for one in state.values() if isinstance(state, dict) else state:
            yield from everything_in(one)


OPTIMIZERS: dict[str, Callable[[list[Parameter], World], Optimizer]] = {
    "FlexDeMo": lambda params, world: FlexDeMo(params, 0.1, compressor=DCT, world=world),
    "FlexDeMoAdamW": lambda params, world: FlexDeMoAdamW(params, 0.1, compressor=DCT, world=world),
    "local steps": lambda params, world: FlexDeMoAdamW(
        params, 0.1, compressor=DCT, world=world, sync_every=2, outer=OuterOptimizer()
    ),
    "momentum": lambda params, world: DistributedOptimizer(SGD(params, 0.1, 0.9), compressor=DCT, world=world),
    "DecentralizedAdam": lambda params, world: DecentralizedAdam(
        params,
        0.1,
        world=world,
        schedule=flexcomm.gossip.fixed_ring(1),
        compressor=flexcomm.dense(values="int8"),
        accumulate=2,
    ),
    "AccumAdam": lambda params, _: AccumAdam(params, 0.1, window=2),
}


def parameters() -> list[Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=draw)) for shape in ((24, 20), (33,))]


def train(params: list[Parameter], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for number, param in enumerate(params):
            draw = torch.Generator().manual_seed(10 * step + number)
            param.grad = torch.randn(param.shape, generator=draw)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_state_comes_to_its_parameters(name: str) -> None:
    with flexcomm.connect() as world:
        params, other = parameters(), parameters()
        optimizer, resumed = OPTIMIZERS[name](params, world), OPTIMIZERS[name](other, world)
        train(params, optimizer, range(3))
        saved = copy.deepcopy(optimizer.state_dict())
        for param, there in zip(params, other, strict=True):
            there.data.copy_(param.data)
        resumed.load_state_dict(moved(saved))
        assert not any(isinstance(x, Elsewhere) for x in everything_in(list(resumed.state.values())))
        train(params, optimizer, range(3, 7))
        train(other, resumed, range(3, 7))
        assert all(torch.equal(x, y) for x, y in zip(params, other, strict=True))
        assert not any(isinstance(x, Elsewhere) for x in everything_in(resumed.state_dict()))


def test_a_hooks_residuals_come_to_the_gradients() -> None:
    def sent(handle: HookHandle, step: int) -> list[Tensor]:
        gradients = [torch.full((24, 20), float(step)), torch.arange(33.0)]
        handle.start(handle.sync.buckets[0], gradients)
        handle.finish()
        return gradients

    with flexcomm.connect() as world:
        first, second = (
            CompressionState(DCT, world, names={param: str(number) for number, param in enumerate(parameters())})
            for _ in range(2)
        )
        sent(first, 1)
        second.load_state_dict(moved(first.state_dict()))
        assert not any(isinstance(x, Elsewhere) for x in everything_in(second.state_dict()))
        assert all(torch.equal(x, y) for x, y in zip(sent(first, 2), sent(second, 2), strict=True))


def test_residuals_of_ones_own_come_to_the_tensors() -> None:
    ring, x = flexcomm.gossip.fixed_ring(1), torch.arange(40.0)
    with flexcomm.connect() as world:
        kept, loaded = flexcomm.Residuals(), flexcomm.Residuals()
        flexcomm.hierarchical_sync(x, DCT, world=world, residuals=kept)
        loaded.load_state_dict(moved(kept.state_dict()))
        out = [flexcomm.hierarchical_sync(x, DCT, world=world, residuals=one) for one in (kept, loaded)]
        assert torch.equal(*out)
        mixing, resumed = flexcomm.MixResiduals(), flexcomm.MixResiduals()
        int8 = flexcomm.dense(values="int8")
        flexcomm.mix(x, ring, 0, world=world, compressor=int8, residuals=mixing)
        resumed.load_state_dict(moved(mixing.state_dict()))
        for one in (mixing, resumed):
            flexcomm.mix(x, ring, 1, world=world, compressor=int8, residuals=one)
        pairs = [(kept.state_dict(), loaded.state_dict()), (mixing.state_dict(), resumed.state_dict())]
    for before, after in pairs:
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not any(isinstance(x, Elsewhere) for x in everything_in(after))
