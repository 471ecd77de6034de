"""Mixing over MPI keeps its laws in worlds of every shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ranks.laws import cases
from tests.ranks.mixing_laws import LAWS
from tests.ranks.shapes import SHAPES

if TYPE_CHECKING:
    from tests.mpi.shaped import Shaped

pytestmark = pytest.mark.mpi
BY_NAME = {law.__name__: law for law in LAWS}


@pytest.mark.parametrize(("shaped", "law"), cases(SHAPES, BY_NAME), indirect=["shaped"], scope="module")
def test_mixing_keeps_the_law(shaped: Shaped, law: str) -> None:
    shaped.keep(BY_NAME[law])
