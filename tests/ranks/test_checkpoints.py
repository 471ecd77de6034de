"""Checkpoints keep their laws over gloo; and other numbers of nodes and of ranks per node go on from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import flexcomm
from flexcomm import InvalidArgumentError, World
from flexcomm.kernels.cpu import CpuKernels
from flexcomm.testing.cases import elements_of
from flexdemo import FlexDeMo, FlexDeMoAdamW, attach_to_fsdp, load_checkpoint, save_checkpoint
from flexdemo.parameters import local
from tests.ranks.checkpoint_laws import laws
from tests.ranks.hook_laws import COMPRESSOR, make_model, require_replicas, sharded, train
from tests.ranks.laws import cases, keep
from tests.ranks.processes import run_ranks
from tests.ranks.shapes import Shape
from tests.slow import slow_but

if TYPE_CHECKING:
    from flexdemo.base import NodeOptimizer

Momenta = dict[str, NDArray[np.float32]]
"""By parameter; as arrays, which outlive the process that sent them."""

LAWS = laws()
USUAL_RUNS = ("FlexDeMo, replicas", "local steps, FSDP2", "hook, FSDP2", "hook, DDP")
USUAL_STATES = ("sign", "muon", "local adamw", "outer")


def usual_laws(shape: Shape) -> list[str]:
    """Of runs that resemble each other, one is saved."""
    usual = {f"files_go_on, {name}" for name in USUAL_RUNS} | {f"states_go_on, {name}" for name in USUAL_STATES}
    return [name for name in LAWS if "_go_on" not in name or name in usual] if shape == Shape(2, 2) else []


@pytest.mark.parametrize(("shape", "law"), cases((Shape(1, 1), Shape(2, 2)), LAWS, usual_laws))
def test_checkpoints_keep_the_law(shape: Shape, law: str) -> None:
    keep(LAWS[law], shape)


def make_run(world: World, kind: str) -> tuple[torch.nn.Module, NodeOptimizer]:
    model = make_model() if kind == "replicas" else sharded(world)
    return model, FlexDeMo(model.named_parameters(), compressor=COMPRESSOR, world=world, update="plain", decay=1.0)


def momentum_of(model: torch.nn.Module, optimizer: NodeOptimizer, world: World) -> Momenta:
    """Return this node's momentum in elements, whole, whatever its ranks hold of it."""
    return {name: _whole(_held(param, optimizer), world, param).numpy() for name, param in model.named_parameters()}


def _held(param: Tensor, optimizer: NodeOptimizer) -> Tensor:
    """Return the elements this rank remembers of what it holds of a parameter; zeros elsewhere."""
    elements = torch.zeros(local(param).shape)
    entry = optimizer._residual_shards[param]["momentum"]  # type: ignore[index]
    if entry.shard is not None:
        state = entry.residuals[entry.shard.spec.name]
        kept = elements_of(CpuKernels(1), state, entry.shard.plan)
        elements.view(-1)[entry.shard.first : entry.shard.last] = kept.reshape(-1)
    return elements


def _whole(x: Tensor, world: World, param: Tensor) -> Tensor:
    if not hasattr(param, "device_mesh"):
        return world.intra.all_reduce(x).wait()
    rows = -(-param.shape[0] // world.topology.local_size)
    padded = torch.zeros(rows, *param.shape[1:])
    padded[: x.shape[0]] = x
    return world.intra.all_gather(padded).wait().reshape(-1, *param.shape[1:])[: param.shape[0]]


def save_run(folder: str, kind: str) -> Momenta:
    with flexcomm.connect(timeout_s=60) as world:
        model, optimizer = make_run(world, kind)
        train(model, optimizer, world, range(3))
        save_checkpoint(Path(folder), model, optimizer)
        return momentum_of(model, optimizer, world)


def load_run(folder: str, kind: str, other_nodes: str) -> Momenta:
    with flexcomm.connect(timeout_s=60) as world:
        model, optimizer = make_run(world, kind)
        load_checkpoint(Path(folder), model, optimizer, other_nodes=other_nodes)  # type: ignore[arg-type]
        found = momentum_of(model, optimizer, world)
        model, optimizer = make_run(world, kind)
        load_checkpoint(Path(folder), model, optimizer, other_nodes=other_nodes)  # type: ignore[arg-type]
        train(model, optimizer, world, range(2))
        require_replicas(world, model, "replicas go on alike")
        return found


def refuse_run(folder: str, kind: str) -> None:
    with flexcomm.connect(timeout_s=60) as world:
        model, optimizer = make_run(world, kind)
        with pytest.raises(InvalidArgumentError, match="other_nodes='mean'"):
            load_checkpoint(Path(folder), model, optimizer)


def require_close(got: Momenta, expected: Momenta) -> None:
    """Transformed there and back, twice, in float32: some tens of roundings to 2**-24 of the largest."""
    for name, x in expected.items():
        assert np.abs(got[name] - x).max() <= 2.0**-20 * max(np.abs(x).max(), 1e-3), name
    assert any(x.any() for x in expected.values()), "there is momentum that could be lost"


@pytest.mark.parametrize(
    ("kind", "ranks", "others"), slow_but([("fsdp2", 2, 3)], [("replicas", 2, 3), ("fsdp2", 2, 3), ("fsdp2", 2, 1)])
)
def test_ranks_per_node_may_change(tmp_path: Path, kind: str, ranks: int, others: int) -> None:
    """On one node: whose momentum it is, is clear."""
    saved = run_ranks(save_run, ranks, str(tmp_path), kind, ranks_per_node=ranks)
    loaded = run_ranks(load_run, others, str(tmp_path), kind, "error", ranks_per_node=others)
    require_close(loaded[0], saved[0])


@pytest.mark.parametrize("kind", slow_but(["replicas"], ["replicas", "fsdp2"]))
def test_nodes_keep_their_own_when_ranks_per_node_change(tmp_path: Path, kind: str) -> None:
    saved = run_ranks(save_run, 4, str(tmp_path), kind, ranks_per_node=2)
    loaded = run_ranks(load_run, 2, str(tmp_path), kind, "error", ranks_per_node=1)
    for node in (0, 1):
        require_close(loaded[node], saved[2 * node])
    assert any((saved[0][name] != saved[2][name]).any() for name in saved[0]), "nodes differ in what they remember"


@pytest.mark.parametrize(
    ("kind", "nodes", "others"), slow_but([("replicas", 2, 4)], [("replicas", 2, 4), ("fsdp2", 2, 1)])
)
def test_nodes_get_the_mean_of_all(tmp_path: Path, kind: str, nodes: int, others: int) -> None:
    saved = run_ranks(save_run, nodes, str(tmp_path), kind, ranks_per_node=1)
    mean = {name: np.stack([one[name] for one in saved]).mean(axis=0) for name in saved[0]}
    for loaded in run_ranks(load_run, others, str(tmp_path), kind, "mean", ranks_per_node=1):
        require_close(loaded, mean)


def test_nodes_can_begin_at_zero(tmp_path: Path) -> None:
    run_ranks(save_run, 2, str(tmp_path), "replicas", ranks_per_node=1)
    (loaded,) = run_ranks(load_run, 1, str(tmp_path), "replicas", "reset", ranks_per_node=1)
    assert not any(x.any() for x in loaded.values())


def test_another_number_of_nodes_is_refused_if_nothing_is_said(tmp_path: Path) -> None:
    run_ranks(save_run, 2, str(tmp_path), "replicas", ranks_per_node=1)
    run_ranks(refuse_run, 1, str(tmp_path), "replicas", ranks_per_node=1)


def save_attached(folder: str) -> None:
    with flexcomm.connect(timeout_s=60) as world:
        model = sharded(world)
        handle = attach_to_fsdp(model, COMPRESSOR, world=world)
        optimizer = torch.optim.SGD(model.parameters(), 0.25)
        train(model, optimizer, world, range(2))
        save_checkpoint(Path(folder), model, optimizer, handle)


def load_attached(folder: str) -> list[bool]:
    with flexcomm.connect(timeout_s=60) as world:
        model = sharded(world)
        handle = attach_to_fsdp(model, COMPRESSOR, world=world)
        optimizer = torch.optim.SGD(model.parameters(), 0.25)
        with pytest.raises(InvalidArgumentError, match="other_nodes='mean'"):
            load_checkpoint(Path(folder), model, optimizer, handle)
        load_checkpoint(Path(folder), model, optimizer, handle, other_nodes="mean")
        train(model, optimizer, world, range(2))
        require_replicas(world, model, "replicas go on alike")
        return [bool(state.any()) for state in handle.sync.residuals[0].state_dict().values()]


def test_hooks_go_on_on_another_number_of_nodes(tmp_path: Path) -> None:
    run_ranks(save_attached, 4, str(tmp_path), ranks_per_node=2)
    for kept in run_ranks(load_attached, 2, str(tmp_path), ranks_per_node=2):
        assert any(kept)


def make_local(world: World, kind: str) -> tuple[torch.nn.Module, NodeOptimizer]:
    model = make_model()
    make = FlexDeMo if kind == "FlexDeMo" else FlexDeMoAdamW
    return model, make(model.named_parameters(), compressor=COMPRESSOR, world=world, sync_every=2)


def save_local(folder: str, kind: str) -> float:
    with flexcomm.connect(timeout_s=60) as world:
        model, optimizer = make_local(world, kind)
        train(model, optimizer, world, range(3))
        save_checkpoint(Path(folder), model, optimizer)
        return sum(float(param.detach().abs().sum()) for param in model.parameters())


def load_local(folder: str, kind: str, other_nodes: str) -> float:
    with flexcomm.connect(timeout_s=60) as world:
        model, optimizer = make_local(world, kind)
        load_checkpoint(Path(folder), model, optimizer, other_nodes=other_nodes)  # type: ignore[arg-type]
        held = sum(float(param.detach().abs().sum()) for param in model.parameters())
        train(model, optimizer, world, range(3, 4))
        require_replicas(world, model, "replicas meet")
        return held


@pytest.mark.parametrize(
    ("kind", "other_nodes"),
    slow_but(
        [("FlexDeMoAdamW", "mean")], [("FlexDeMo", "reset"), ("FlexDeMoAdamW", "reset"), ("FlexDeMoAdamW", "mean")]
    ),
)
def test_nodes_that_step_alone_go_on_on_another_number(tmp_path: Path, kind: str, other_nodes: str) -> None:
    """Parameters are what they were, nearly: nodes stand where they met last, or on average."""
    saved = run_ranks(save_local, 2, str(tmp_path), kind, ranks_per_node=1)
    for held in run_ranks(load_local, 3, str(tmp_path), kind, other_nodes, ranks_per_node=1):
        assert held == pytest.approx(saved[0], rel=0.05)
