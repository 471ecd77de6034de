"""Mixing keeps its laws over gloo, in worlds of every shape."""

from __future__ import annotations

from functools import lru_cache

import pytest

from tests.ranks.laws import Verdicts, judge
from tests.ranks.mixing_laws import LAWS
from tests.ranks.shapes import SHAPES, Shape

pytestmark = [pytest.mark.timeout(300)]
BY_NAME = {law.__name__: law for law in LAWS}


@lru_cache
def verdicts_on(shape: Shape) -> Verdicts:
    return judge(BY_NAME, shape, limit_s=290.0, law_limit_s=60.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("law", BY_NAME)
def test_mixing_keeps_the_law(shape: Shape, law: str) -> None:
    verdicts_on(shape).check(law)
