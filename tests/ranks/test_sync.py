"""Synchronisation over gloo keeps its laws in worlds of every shape, for every recipe.

Which recipe meets which law, ``tests/ranks/recipes.py`` says. Replicas are compared over 20 steps, over 1,000 with
``FLEXCOMM_ALL_LAWS=1``.
"""

from __future__ import annotations

from functools import lru_cache

import pytest

import flexcomm
from flexcomm import testing
from tests.ranks.laws import Verdicts, judge
from tests.ranks.recipes import ALL_LAWS, keep_replicas_equal, laws_in
from tests.ranks.shapes import SHAPES, Shape

pytestmark = [pytest.mark.timeout(3600 if ALL_LAWS else 120)]
LIMIT_S = 3000.0 if ALL_LAWS else 100.0


@lru_cache
def verdicts_on(shape: Shape) -> Verdicts:
    return judge(laws_in(shape), shape, limit_s=LIMIT_S)


@pytest.mark.parametrize(("shape", "law"), [(shape, law) for shape in SHAPES for law in laws_in(shape)], ids=str)
def test_a_sync_keeps_the_law(shape: Shape, law: str) -> None:
    verdicts_on(shape).check(law)


@pytest.mark.parametrize("shape", [Shape(2, 1), Shape(2, 2)], ids=str)
def test_replicas_stay_equal_for_many_steps(shape: Shape) -> None:
    law = keep_replicas_equal.__name__
    judge({law: keep_replicas_equal}, shape, limit_s=LIMIT_S, law_limit_s=LIMIT_S).check(law)


def test_a_user_can_hold_a_world_and_a_compressor_to_all_laws() -> None:
    with flexcomm.connect() as world:
        testing.check_sync(world, flexcomm.top_k(0.1))
