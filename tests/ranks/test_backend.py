"""Groups of the backend "flexcomm" keep their laws, over gloo, in worlds of several nodes."""

from __future__ import annotations

import pytest

from tests.ranks.backend_laws import LAWS
from tests.ranks.laws import cases, keep
from tests.ranks.shapes import SHAPES, Shape

BY_NAME = {law.__name__: law for law in LAWS}


@pytest.mark.parametrize(("shape", "law"), cases([one for one in SHAPES if one.nodes > 1], BY_NAME))
def test_the_backend_keeps_the_law(shape: Shape, law: str) -> None:
    keep(BY_NAME[law], shape)
