"""Streams, memory and groups of devices are used as they must be."""

from __future__ import annotations

import pytest

from tests.ranks.device_laws import LAWS
from tests.ranks.laws import cases
from tests.ranks.shapes import Shape
from tests.stand_in.laws import keep_on_stand_in

SHAPES = (Shape(1, 2), Shape(2, 1), Shape(2, 2), Shape(3, 1))
TWO_EACH = 4
"""Devices of a node, so that every rank has a second one."""


def usual_laws(shape: Shape) -> list[str]:
    return list(LAWS) if shape == Shape(2, 2) else []


@pytest.mark.parametrize(("shape", "law"), cases(SHAPES, LAWS, usual_laws))
def test_devices_keep_the_law(shape: Shape, law: str) -> None:
    keep_on_stand_in(LAWS[law], shape, devices=TWO_EACH)
