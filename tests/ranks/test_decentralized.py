"""Decentralized training keeps its laws over gloo, in worlds of every shape."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import pytest

from tests.ranks.decentralized_laws import CORE, LAWS, TORCH_LAWS
from tests.ranks.laws import Verdicts, judge
from tests.ranks.recipes import ALL_LAWS
from tests.ranks.shapes import SHAPES, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

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
