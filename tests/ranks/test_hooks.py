"""FSDP and DDP keep their laws over gloo, in worlds of every shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ranks.hook_laws import laws_for
from tests.ranks.laws import cases, keep
from tests.ranks.shapes import SHAPES, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import World


def laws_in(shape: Shape) -> dict[str, Callable[[World], object]]:
    return {law.__name__: law for law in laws_for(shape.size, shape.ranks_per_node)}


def usual_laws(shape: Shape) -> list[str]:
    return list(laws_in(shape)) if shape == Shape(2, 2) else []


@pytest.mark.parametrize(("shape", "law"), cases(SHAPES, laws_in, usual_laws))
def test_hooks_keep_the_law(shape: Shape, law: str) -> None:
    keep(laws_in(shape)[law], shape)
