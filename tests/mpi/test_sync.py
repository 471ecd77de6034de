"""Synchronisation over MPI keeps its laws in worlds of every shape.

Which recipe meets which law, ``tests/ranks/recipes.py`` says; it is another one than over gloo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ranks.recipes import ALL_LAWS, laws_in
from tests.ranks.shapes import SHAPES

if TYPE_CHECKING:
    from tests.mpi.shaped import Shaped

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600 if ALL_LAWS else 120)]
SHIFT = 5


CASES = [(shape, law) for shape in SHAPES for law in laws_in(shape, SHIFT)]


# Worlds in the order of the cases: each is connected once.
@pytest.mark.parametrize(("shaped", "law"), CASES, indirect=["shaped"], scope="module", ids=str)
def test_a_sync_keeps_the_law(shaped: Shaped, law: str) -> None:
    shaped.keep(laws_in(shaped.shape, SHIFT)[law])
