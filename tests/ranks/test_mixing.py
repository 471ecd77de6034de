"""Mixing keeps its laws over gloo, in worlds of every shape."""

from __future__ import annotations

import pytest

from tests.ranks.laws import cases, keep
from tests.ranks.mixing_laws import LAWS, usual_laws
from tests.ranks.shapes import SHAPES, Shape


@pytest.mark.parametrize(("shape", "law"), cases(SHAPES, LAWS, usual_laws))
def test_mixing_keeps_the_law(shape: Shape, law: str) -> None:
    keep(LAWS[law], shape, limit_s=60)
