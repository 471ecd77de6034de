"""Decentralized training keeps its laws over gloo, in worlds of every shape."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import pytest

import flexcomm
from flexdemo import load_checkpoint, save_checkpoint
from tests.ranks.decentralized_laws import CORE, LAWS, TORCH_LAWS, Net, flat, made, train
from tests.ranks.laws import Verdicts, judge
from tests.ranks.processes import run_ranks
from tests.ranks.recipes import ALL_LAWS
from tests.ranks.shapes import SHAPES, Shape

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from flexcomm import World

pytestmark = [pytest.mark.timeout(300)]
EVERY_LAW = (Shape(2, 2), Shape(4, 1))
"""Where all laws are kept; elsewhere the core of them, and some others in each."""


def laws_in(shape: Shape) -> dict[str, Callable[[World], object]]:
    everything = LAWS | TORCH_LAWS
    if ALL_LAWS or shape in EVERY_LAW:
        return everything
    others = [name for name in everything if name not in CORE]
    turn = SHAPES.index(shape)
    return {name: everything[name] for name in (*CORE, *others[turn :: len(SHAPES)])}


@lru_cache
def verdicts_on(shape: Shape) -> Verdicts:
    return judge(laws_in(shape), shape, limit_s=290.0, law_limit_s=60.0)


@pytest.mark.parametrize(("shape", "law"), [(shape, law) for shape in SHAPES for law in laws_in(shape)], ids=str)
def test_decentralized_training_keeps_the_law(shape: Shape, law: str) -> None:
    verdicts_on(shape).check(law)


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
