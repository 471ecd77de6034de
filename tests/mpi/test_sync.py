"""Synchronisation over MPI keeps its laws in worlds of every shape.

Which recipe meets which law in ``make test``, ``tests/ranks/recipes.py`` says; it is another one than over gloo.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.ranks.laws import cases
from tests.ranks.recipes import LAWS, usual_laws
from tests.ranks.shapes import SHAPES

if TYPE_CHECKING:
    from tests.mpi.shaped import Shaped

pytestmark = pytest.mark.mpi
CASES = cases(SHAPES, LAWS, partial(usual_laws, shift=5))


# Worlds in the order of the cases: each is connected once.
@pytest.mark.parametrize(("shaped", "law"), CASES, indirect=["shaped"], scope="module")
def test_a_sync_keeps_the_law(shaped: Shaped, law: str) -> None:
    shaped.keep(LAWS[law])
