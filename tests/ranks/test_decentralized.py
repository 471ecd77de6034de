"""Decentralized training keeps its laws over gloo, in worlds of every shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import flexcomm
from flexdemo import load_checkpoint, save_checkpoint
from tests.ranks.decentralized_laws import LAWS, TORCH_LAWS, Net, flat, made, train
from tests.ranks.laws import cases, keep
from tests.ranks.processes import run_ranks
from tests.ranks.shapes import ALWAYS, SHAPES, Shape

if TYPE_CHECKING:
    from pathlib import Path

EVERYTHING = LAWS | TORCH_LAWS
SLOW = (
    "a run goes on, step first", "a run goes on, accumulated", "a run goes on, rounds", "a run goes on, complete",
    "a checkpoint goes on, plain", "a checkpoint goes on, complete",
    "fifty_steps_are_those_of_a_reference, ring", "fifty_steps_are_those_of_a_reference, complete",
    "fifty_steps_are_those_of_a_reference, base",
)  # fmt: skip


def usual_laws(shape: Shape) -> list[str]:
    """Schedules differ from three nodes on: there they are compared with references. Of the other laws, every second
    is kept there, and the rest where nodes have two ranks. Of runs that resemble each other, some are taken.
    """
    if shape not in ALWAYS:
        return []
    on_three = [name for name in LAWS if "fifty_steps" in name] + [name for name in LAWS if "fifty" not in name][::2]
    return [name for name in EVERYTHING if name not in SLOW and (name in on_three) == (shape.nodes > 2)]


@pytest.mark.parametrize(("shape", "law"), cases(SHAPES, EVERYTHING, usual_laws))
def test_decentralized_training_keeps_the_law(shape: Shape, law: str) -> None:
    keep(EVERYTHING[law], shape, limit_s=60)


def save_and_tell_the_mean(path: str) -> list[float]:
    with flexcomm.connect(timeout_s=60) as world:
        net = Net()
        optimizer = made(net, world)
        train(net, optimizer, world, range(5))
        save_checkpoint(path, net, optimizer)
        with optimizer.average():
            return flat(net).tolist()


def load_and_tell(path: str) -> list[float]:
    with flexcomm.connect(timeout_s=60) as world:
        net = Net()
        optimizer = made(net, world)
        load_checkpoint(path, net, optimizer, other_nodes="mean")
        begun = flat(net).tolist()
        train(net, optimizer, world, range(5, 7))
        return begun


def test_a_checkpoint_is_taken_over_by_another_number_of_nodes(tmp_path: Path) -> None:
    means = run_ranks(save_and_tell_the_mean, 4, str(tmp_path), ranks_per_node=1)
    for size in (2, 1):
        for begun in run_ranks(load_and_tell, size, str(tmp_path), ranks_per_node=1):
            assert begun == pytest.approx(means[0], rel=0, abs=1e-12)
