"""The laws of checkpoints: a run that was saved and loaded goes on bit for bit."""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

import flexcomm
from flexcomm import InvalidArgumentError, World
from flexdemo import (
    DistributedOptimizer,
    FlexDeMo,
    FlexDeMoAdamW,
    HookHandle,
    OuterOptimizer,
    attach_to_ddp,
    attach_to_fsdp,
    load_checkpoint,
    save_checkpoint,
)
from tests.ranks import optimizer_laws as zoos
from tests.ranks.hook_laws import COMPRESSOR, make_model, require_equal, sharded, train
from tests.ranks.zoo import Zoo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

BEFORE, AFTER = range(3), range(3, 5)


def states_go_on(world: World, name: str) -> None:
    """In memory, and in the middle of local steps, too."""
    make = zoos.OPTIMIZERS[name]
    zoo, other = Zoo(), Zoo(seed=5)
    optimizer = make(zoo, world)
    zoos.train(zoo, optimizer, world, BEFORE)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    saved, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(zoo.state_dict())
    zoos.train(zoo, optimizer, world, AFTER)
    resumed = make(other, world)
    other.load_state_dict(values)
    resumed.load_state_dict(saved)
    zoos.train(other, resumed, world, AFTER)
    zoos.require_equal(zoo, other, f"{name} goes on as if it had not stopped")


def states_come_back_from_a_file_without_pickled_code(world: World) -> None:
    zoo = Zoo()
    optimizer = zoos.flexdemo(zoo, world)
    zoos.train(zoo, optimizer, world, BEFORE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        torch.save(optimizer.state_dict(), path)
        saved = torch.load(path, weights_only=True)
    other = copy.deepcopy(zoo)
    resumed = zoos.flexdemo(other, world)
    resumed.load_state_dict(saved)
    zoos.train(zoo, optimizer, world, AFTER)
    zoos.train(other, resumed, world, AFTER)
    zoos.require_equal(zoo, other, "a state from a file goes on")


def a_state_of_another_rank_is_refused(world: World) -> None:
    zoo = Zoo()
    optimizer = zoos.flexdemo(zoo, world)
    zoos.train(zoo, optimizer, world, BEFORE)
    saved = optimizer.state_dict()
    for kept in saved["state"].values():
        kept["owner"] = kept["owner"] + 1
    before = zoos.momenta_of(optimizer)
    with pytest.raises(InvalidArgumentError, match=f"saved by rank {world.topology.rank + 1}, but this is"):
        optimizer.load_state_dict(saved)
    after = zoos.momenta_of(optimizer)
    assert all(torch.equal(before[name], state) for name, state in after.items()), "what is refused changes nothing"


def states_of_other_optimizers_are_refused(world: World) -> None:
    zoo = Zoo()
    optimizer = zoos.flexdemo(zoo, world)
    with pytest.raises(InvalidArgumentError, match="was saved with compressor"):
        optimizer.load_state_dict(zoos.flexdemo(Zoo(), world, compressor=flexcomm.top_k(0.1)).state_dict())
    with pytest.raises(InvalidArgumentError, match="sync_every"):
        zoos.flexdemo(zoo, world, sync_every=3).load_state_dict(optimizer.state_dict())
    with pytest.raises(InvalidArgumentError, match="groups of"):
        optimizer.load_state_dict(zoos.in_two_groups(Zoo(), world).state_dict())


def shared_folder(world: World) -> Iterator[Path]:
    """Yield a folder that all ranks know."""
    with tempfile.TemporaryDirectory() as own:
        name = torch.zeros(200, dtype=torch.uint8)
        name[: len(own)] = torch.tensor(list(own.encode()), dtype=torch.uint8)
        first = world.control.broadcast(name).wait()
        yield Path(bytes(first[first != 0].tolist()).decode())
        world.control.barrier().wait()


Run = tuple[Module, "Optimizer", HookHandle | None]


def fsdp2(world: World, make: Callable[..., Optimizer], seed: int = 0, **options: Any) -> Run:
    model = sharded(world, make_model(seed))
    return model, make(model.named_parameters(), world=world, compressor=COMPRESSOR, **options), None


def fsdp2_muon(world: World, seed: int = 0) -> Run:
    model = sharded(world, make_model(seed))
    matrices = [param for param in model.parameters() if param.dim() == 2]
    rest = [param for param in model.parameters() if param.dim() != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]
    return model, DistributedOptimizer(optimizers, compressor=COMPRESSOR, world=world, sync_every=2), None


def fsdp2_hook(world: World, seed: int = 0) -> Run:
    model = sharded(world, make_model(seed))
    handle = attach_to_fsdp(model, flexcomm.random_k(1 / 4), world=world)
    return model, torch.optim.AdamW(model.parameters(), 0.01), handle


def ddp_hook(world: World, seed: int = 0) -> Run:
    model = DistributedDataParallel(make_model(seed), bucket_cap_mb=0.01)
    handle = attach_to_ddp(model, COMPRESSOR, world=world)
    return model, torch.optim.AdamW(model.parameters(), 0.01), handle


def replicas(world: World, make: Callable[..., Optimizer], seed: int = 0, **options: Any) -> Run:
    model = make_model(seed)
    return model, make(model.named_parameters(), world=world, compressor=COMPRESSOR, **options), None


RUNS: dict[str, Callable[..., Run]] = {
    "FlexDeMo, FSDP2": partial(fsdp2, make=FlexDeMo),
    "FlexDeMo, FSDP2, overlap": partial(fsdp2, make=FlexDeMo, overlap=True),
    "FlexDeMoAdamW, FSDP2": partial(fsdp2, make=FlexDeMoAdamW),
    "local steps, FSDP2": partial(fsdp2, make=FlexDeMoAdamW, sync_every=2, outer=OuterOptimizer()),
    "FlexDeMo, replicas": partial(replicas, make=FlexDeMo),
    "local steps, replicas": partial(replicas, make=FlexDeMo, sync_every=2),
    "Muon's steps, FSDP2": fsdp2_muon,
    "hook, FSDP2": fsdp2_hook,
    "hook, DDP": ddp_hook,
}


def files_go_on(world: World, name: str) -> None:
    model, optimizer, handle = RUNS[name](world)
    train(model, optimizer, world, BEFORE)
    for folder in shared_folder(world):
        save_checkpoint(folder, model, optimizer, handle)
        train(model, optimizer, world, AFTER)
        other, resumed, again = RUNS[name](world, seed=5)
        if again is not None:
            with pytest.raises(InvalidArgumentError, match="residuals that nothing here asks for"):
                load_checkpoint(folder, other, resumed)
        load_checkpoint(folder, other, resumed, again)
    train(other, resumed, world, AFTER)
    require_equal(model, other, f"{name} goes on from files as if it had not stopped")


def what_was_frozen_when_saved_begins_anew(world: World) -> None:
    zoo, other = Zoo(), Zoo()
    zoo.matrix.requires_grad_(False)
    optimizer = zoos.flexdemo(zoo, world)
    zoos.train(zoo, optimizer, world, BEFORE)
    saved = optimizer.state_dict()
    resumed = zoos.flexdemo(other, world)
    resumed.load_state_dict(saved)
    assert not any(bool(x.any()) for name, x in zoos.momenta_of(resumed).items() if "matrix" in name)
    zoos.train(other, resumed, world, AFTER)


def nodes_that_skipped_a_step_count_their_own(world: World) -> None:
    zoo, other = Zoo(), Zoo()
    optimizer = zoos.adamw(zoo, world, sync_every=4, nonfinite="skip")
    zoos.train(zoo, optimizer, world, range(2))
    optimizer.zero_grad()
    zoo(zoos.gradients_at(world, 2)).backward()
    if world.topology.node == 0:
        zoo.matrix.grad[0, 0] = float("nan")
    optimizer.step()
    values, saved = copy.deepcopy(zoo.state_dict()), copy.deepcopy(optimizer.state_dict())
    resumed = zoos.adamw(other, world, sync_every=4, nonfinite="skip")
    other.load_state_dict(values)
    resumed.load_state_dict(saved)
    counted = float(resumed.state[other.matrix]["step"])
    assert counted == (2.0 if world.topology.node == 0 else 3.0), f"{counted} steps are counted"
    zoos.train(zoo, optimizer, world, AFTER)
    zoos.train(other, resumed, world, AFTER)
    zoos.require_equal(zoo, other, "a run goes on as if it had not stopped")


def laws() -> dict[str, Callable[[World], object]]:
    """Return the laws that a world of any shape keeps, by name."""
    found: dict[str, Callable[[World], object]] = {
        f"{states_go_on.__name__}, {name}": partial(states_go_on, name=name) for name in zoos.OPTIMIZERS
    }
    found |= {f"{files_go_on.__name__}, {name}": partial(files_go_on, name=name) for name in RUNS}
    for law in (
        states_come_back_from_a_file_without_pickled_code,
        a_state_of_another_rank_is_refused,
        states_of_other_optimizers_are_refused,
        what_was_frozen_when_saved_begins_anew,
        nodes_that_skipped_a_step_count_their_own,
    ):
        found[law.__name__] = law
    return found
