"""The engine keeps its laws over gloo, in worlds of every shape."""

from __future__ import annotations

import pytest

from tests.ranks.engine_laws import LAWS
from tests.ranks.laws import cases, keep
from tests.ranks.shapes import SHAPES, Shape

SEVERAL = tuple(shape for shape in SHAPES if shape.size > 1)


@pytest.mark.parametrize(("shape", "law"), cases(SEVERAL, LAWS))
def test_the_engine_keeps_the_law(shape: Shape, law: str) -> None:
    keep(LAWS[law], shape)
