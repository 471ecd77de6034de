"""Mixing keeps its laws over gloo, in worlds of every shape."""

from __future__ import annotations

import pytest

from tests.ranks.laws import cases, keep
from tests.ranks.mixing_laws import LAWS
from tests.ranks.shapes import SHAPES, Shape

BY_NAME = {law.__name__: law for law in LAWS}


@pytest.mark.parametrize(("shape", "law"), cases(SHAPES, BY_NAME))
def test_mixing_keeps_the_law(shape: Shape, law: str) -> None:
    keep(BY_NAME[law], shape, limit_s=60)
