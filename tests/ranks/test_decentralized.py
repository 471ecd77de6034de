"""Decentralized training keeps its laws over gloo, in worlds of every shape."""

from __future__ import annotations

from functools import lru_cache

import pytest

from tests.ranks.decentralized_laws import LAWS, TORCH_LAWS
from tests.ranks.laws import Verdicts, judge
from tests.ranks.shapes import SHAPES, Shape

pytestmark = [pytest.mark.timeout(300)]


@lru_cache
def verdicts_on(shape: Shape) -> Verdicts:
    return judge(LAWS | TORCH_LAWS, shape, limit_s=290.0, law_limit_s=60.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("law", LAWS | TORCH_LAWS)
def test_decentralized_training_keeps_the_law(shape: Shape, law: str) -> None:
    verdicts_on(shape).check(law)
