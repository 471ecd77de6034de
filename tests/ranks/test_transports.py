"""gloo keeps every law of a transport, whatever the number of ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from flexcomm import testing
from tests.ranks.laws import Verdicts, judge
from tests.ranks.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import Transport, World


def keep(law: Callable[[Transport, str], None], world: World) -> None:
    assert (world.intra.name, world.intra.size) == ("gloo", world.topology.size)
    law(world.intra, "cpu")


LAWS = {law.__name__: partial(keep, law) for law in testing.TRANSPORT_LAWS}


@pytest.fixture(scope="module", params=[Shape(1, 2), Shape(1, 3), Shape(1, 4)], ids=str)
def verdicts(request: pytest.FixtureRequest) -> Verdicts:
    return judge(LAWS, request.param)


@pytest.mark.parametrize("law", LAWS)
def test_gloo_keeps_the_law(verdicts: Verdicts, law: str) -> None:
    verdicts.check(law)


def gather_many_bytes(world: World) -> None:
    x = torch.full((40_000_001,), world.topology.rank + 1, dtype=torch.uint8)
    gathered = world.intra.all_gather(x).wait()
    assert bool((gathered[0] == 1).all())
    assert bool((gathered[1] == 2).all())


def test_a_large_gather_arrives_whole() -> None:
    judge({"gather_many_bytes": gather_many_bytes}, Shape(1, 2)).check("gather_many_bytes")
