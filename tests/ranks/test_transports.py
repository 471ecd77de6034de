"""gloo keeps every law of a transport, whatever the number of ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from flexcomm import testing
from tests.ranks.laws import cases, keep
from tests.ranks.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import Transport, World


def on_gloo(law: Callable[[Transport, str], None], world: World) -> None:
    assert (world.intra.name, world.intra.size) == ("gloo", world.topology.size)
    law(world.intra, "cpu")


LAWS = {law.__name__: partial(on_gloo, law) for law in testing.TRANSPORT_LAWS}


SHAPES = [Shape(1, 2), Shape(1, 3), Shape(1, 4)]


@pytest.mark.parametrize(("shape", "law"), cases(SHAPES, LAWS, lambda shape: LAWS if shape.size < 4 else []))
def test_gloo_keeps_the_law(shape: Shape, law: str) -> None:
    keep(LAWS[law], shape)


def gather_many_bytes(world: World) -> None:
    x = torch.full((40_000_001,), world.topology.rank + 1, dtype=torch.uint8)
    gathered = world.intra.all_gather(x).wait()
    assert bool((gathered[0] == 1).all())
    assert bool((gathered[1] == 2).all())


def test_a_large_gather_arrives_whole() -> None:
    keep(gather_many_bytes, Shape(1, 2))
