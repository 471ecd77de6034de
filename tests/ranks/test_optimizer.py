"""The optimizers keep their laws over gloo, in worlds of every shape."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

import pytest

from tests.ranks.laws import Verdicts, judge
from tests.ranks.optimizer_laws import LAWS, fifty_steps_are_demos, replicas_of
from tests.ranks.recipes import ALL_LAWS
from tests.ranks.shapes import SHAPES, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import World

pytestmark = [pytest.mark.timeout(3600 if ALL_LAWS else 300)]
LIMIT_S = 3000.0 if ALL_LAWS else 290.0
EVERY_OPTIMIZER = (Shape(2, 2), Shape(4, 1))
"""Where replicas of every optimizer are compared; elsewhere some of them are, others in each."""
PARITIES = {"matrix": ((70, 130), 32, 7), "flat": ((130,), 8, 0)}


def laws_in(shape: Shape) -> dict[str, Callable[[World], object]]:
    laws: dict[str, Callable[[World], object]] = {law.__name__: law for law in LAWS}
    replicas = replicas_of()
    if not ALL_LAWS and shape not in EVERY_OPTIMIZER:
        turn = SHAPES.index(shape)
        replicas = {name: replicas[name] for name in list(replicas)[turn :: len(SHAPES)]}
    laws |= replicas
    if shape.ranks_per_node == 1:
        laws |= {
            f"{fifty_steps_are_demos.__name__}, {name}": partial(fifty_steps_are_demos, shape=size, k=k, seed=seed)
            for name, (size, k, seed) in PARITIES.items()
        }
    return laws


@lru_cache
def verdicts_on(shape: Shape) -> Verdicts:
    return judge(laws_in(shape), shape, limit_s=LIMIT_S, law_limit_s=LIMIT_S if ALL_LAWS else 30.0)


@pytest.mark.parametrize(("shape", "law"), [(shape, law) for shape in SHAPES for law in laws_in(shape)], ids=str)
def test_the_optimizers_keep_the_law(shape: Shape, law: str) -> None:
    verdicts_on(shape).check(law)
