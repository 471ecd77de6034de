"""Mixing over MPI keeps its laws in worlds of every shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ranks.mixing_laws import LAWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import World
    from tests.mpi.shaped import Shaped

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_mixing_keeps_the_law(shaped: Shaped, law: Callable[[World], object]) -> None:
    shaped.keep(law)
