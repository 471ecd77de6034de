"""Synchronisation over gloo keeps its laws in worlds of every shape, for every recipe.

Which recipe meets which law in ``make test``, ``tests/ranks/recipes.py`` says.
"""

from __future__ import annotations

from functools import partial

import pytest

import flexcomm
from tests.ranks.laws import cases, keep
from tests.ranks.recipes import LAWS, replicas_stay_equal, usual_laws
from tests.ranks.shapes import SHAPES, Shape
from tests.ranks.sync_laws import check_sync


@pytest.mark.parametrize(("shape", "law"), cases(SHAPES, LAWS, usual_laws))
def test_a_sync_keeps_the_law(shape: Shape, law: str) -> None:
    keep(LAWS[law], shape)


STEPS = {"10 steps": 10, "1000 steps": 1000}


def usual_steps(shape: Shape) -> list[str]:
    return ["10 steps"] if shape == Shape(2, 2) else []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("shape", "steps"), cases((Shape(2, 1), Shape(2, 2)), STEPS, usual_steps))
def test_replicas_stay_equal(shape: Shape, steps: str) -> None:
    keep(partial(replicas_stay_equal, steps=STEPS[steps]), shape, limit_s=500)


def test_a_world_of_one_rank_keeps_all_laws() -> None:
    with flexcomm.connect() as world:
        check_sync(world, flexcomm.top_k(0.1))
