"""FSDP and DDP keep their laws over gloo; with ``FLEXCOMM_ALL_LAWS=1`` in worlds of every shape."""

from __future__ import annotations

from functools import lru_cache

import pytest

from tests.ranks.hook_laws import laws_for
from tests.ranks.laws import Verdicts, judge
from tests.ranks.recipes import ALL_LAWS
from tests.ranks.shapes import SHAPES, Shape

pytestmark = [pytest.mark.timeout(300)]
WORLDS = SHAPES if ALL_LAWS else (Shape(1, 1), Shape(2, 1), Shape(2, 2))
CASES = [(shape, law) for shape in WORLDS for law in laws_for(shape.size, shape.ranks_per_node)]


@lru_cache
def verdicts_on(shape: Shape) -> Verdicts:
    laws = {law.__name__: law for law in laws_for(shape.size, shape.ranks_per_node)}
    return judge(laws, shape, limit_s=290.0)


@pytest.mark.parametrize(
    ("shape", "law"), [pytest.param(shape, law.__name__, id=f"{shape}-{law.__name__}") for shape, law in CASES]
)
def test_hooks_keep_the_law(shape: Shape, law: str) -> None:
    verdicts_on(shape).check(law)
