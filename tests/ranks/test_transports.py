"""gloo keeps every law of a transport, whatever the number of ranks."""

from __future__ import annotations

import pytest
import torch

import flexcomm
from flexcomm import testing
from tests.ranks.processes import run_ranks


def keep_law(number: int) -> str:
    with flexcomm.connect(timeout_s=30) as world:
        testing.TRANSPORT_LAWS[number](world.intra, "cpu")
        return world.intra.name


def keep_all_laws() -> tuple[str, int]:
    with flexcomm.connect(timeout_s=30) as world:
        testing.check_transport(world.intra)
        return world.intra.name, world.intra.size


@pytest.mark.parametrize(
    "number", range(len(testing.TRANSPORT_LAWS)), ids=[law.__name__ for law in testing.TRANSPORT_LAWS]
)
def test_gloo_keeps_the_law_among_four_ranks(number: int) -> None:
    assert run_ranks(keep_law, 4, number) == ["gloo"] * 4


@pytest.mark.parametrize("size", [2, 3])
def test_gloo_keeps_all_laws(size: int) -> None:
    assert run_ranks(keep_all_laws, size) == [("gloo", size)] * size


def gather_many_bytes(numel: int) -> bool:
    with flexcomm.connect(timeout_s=60) as world:
        x = torch.full((numel,), world.topology.rank + 1, dtype=torch.uint8)
        gathered = world.intra.all_gather(x).wait()
        return bool((gathered[0] == 1).all() and (gathered[1] == 2).all())


def test_a_large_gather_arrives_whole() -> None:
    assert run_ranks(gather_many_bytes, 2, 40_000_001) == [True, True]
