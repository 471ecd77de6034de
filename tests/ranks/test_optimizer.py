"""The optimizers keep their laws over gloo, in worlds of every shape."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.ranks.laws import cases, keep
from tests.ranks.optimizer_laws import LAWS, fifty_steps_are_demos, replicas_of
from tests.ranks.shapes import SHAPES, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import World

PARITIES = {"matrix": ((70, 130), 32, 7), "flat": ((130,), 8, 0)}
BY_NAME: dict[str, Callable[[World], object]] = {law.__name__: law for law in LAWS}
REPLICAS = replicas_of()
MANY_STEPS = replicas_of(steps=1000, every=25)
ON_LARGER_NODES = ("sign", "overlap", "adamw", "steps", "outer")
PARITY = {
    f"{fifty_steps_are_demos.__name__}, {name}": partial(fifty_steps_are_demos, shape=size, k=k, seed=seed)
    for name, (size, k, seed) in PARITIES.items()
}
EVERYTHING = BY_NAME | REPLICAS | PARITY


def laws_in(shape: Shape) -> list[str]:
    return [name for name in EVERYTHING if name not in PARITY or shape.ranks_per_node == 1]


def usual_laws(shape: Shape) -> list[str]:
    """Every second law where nodes have two ranks; on three nodes, the others and the steps of DeMo itself."""
    names = [*BY_NAME, *REPLICAS]
    return {Shape(2, 2): names[::2], Shape(3, 1): [*names[1::2], *PARITY]}.get(shape, [])


@pytest.mark.parametrize(("shape", "law"), cases(SHAPES, laws_in, usual_laws))
def test_the_optimizers_keep_the_law(shape: Shape, law: str) -> None:
    keep(EVERYTHING[law], shape)


def long_laws(shape: Shape) -> list[str]:
    """Every optimizer on nodes of one rank; on larger ones, where a step takes six times as long, one of a kind."""
    return [law for law in MANY_STEPS if shape.ranks_per_node == 1 or law.split(", ")[1] in ON_LARGER_NODES]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("shape", "law"), cases([Shape(2, 1), Shape(2, 2)], long_laws, lambda _: []))
def test_replicas_are_equal_after_a_thousand_steps(shape: Shape, law: str) -> None:
    keep(MANY_STEPS[law], shape, limit_s=300)
