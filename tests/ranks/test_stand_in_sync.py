"""Synchronisation keeps its laws on devices, in an order in which a device would do all that it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bench.gpu.laws import LAWS as DEVICE_LAWS
from tests.ranks.laws import cases
from tests.ranks.recipes import LAWS
from tests.ranks.shapes import Shape
from tests.slow import slow_but
from tests.stand_in.laws import keep_on_stand_in

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = (Shape(1, 2), Shape(2, 1), Shape(2, 2))


@pytest.mark.parametrize("law", DEVICE_LAWS["sync"], ids=lambda law: law.__name__)
@pytest.mark.parametrize("shape", slow_but([Shape(2, 2)], SHAPES), ids=str)
def test_devices_do_what_hosts_do(shape: Shape, law: Callable[[Any], None]) -> None:
    keep_on_stand_in(law, shape)


@pytest.mark.parametrize(("shape", "law"), cases(SHAPES, LAWS, lambda _: []))
def test_a_sync_keeps_the_law(shape: Shape, law: str) -> None:
    keep_on_stand_in(LAWS[law], shape)
