"""Mixing over MPI keeps its laws in worlds of every shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ranks.laws import cases
from tests.ranks.mixing_laws import LAWS, usual_laws
from tests.ranks.shapes import SHAPES, Shape

if TYPE_CHECKING:
    from tests.mpi.shaped import Shaped

pytestmark = pytest.mark.mpi


def usual_over_mpi(shape: Shape) -> list[str]:
    return usual_laws(shape) if shape == Shape(2, 2) else []


@pytest.mark.parametrize(("shaped", "law"), cases(SHAPES, LAWS, usual_over_mpi), indirect=["shaped"], scope="module")
def test_mixing_keeps_the_law(shaped: Shaped, law: str) -> None:
    shaped.keep(LAWS[law])
