"""A paced transport keeps the laws of transports, and everything of a paced world that crosses nodes is paced."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

import flexcomm
from bench.paced import PacedTransport, pace
from flexcomm import testing
from tests.ranks.laws import cases, keep
from tests.ranks.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import Transport, World

FAST_BITS_PER_S = 1e9


def on_paced_links(law: Callable[[Transport, str], None], world: World) -> None:
    paced = pace(world, rate_bits_per_s=FAST_BITS_PER_S)
    assert isinstance(paced.inter, PacedTransport)
    law(paced.inter, "cpu")


def all_that_crosses_nodes_is_paced(world: World) -> None:
    paced = pace(world, rate_bits_per_s=FAST_BITS_PER_S)
    crossing = [paced.inter, paced.control, paced.clone_groups().inter, paced.node_only().control]
    assert [one.name for one in crossing] == ["gloo paced to 1000 Mbit/s"] * len(crossing)
    inside = [paced.intra, paced.clone_groups().intra, paced.node_only().inter]
    assert not any("paced" in one.name for one in inside)


def a_paced_world_averages_the_same_bits(world: World) -> None:
    paced = pace(world, rate_bits_per_s=FAST_BITS_PER_S)
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(world.topology.rank))
    for compressor in (flexcomm.dense(torch.bfloat16), flexcomm.top_k(0.1)):
        plain, slow = (flexcomm.hierarchical_sync(x.clone(), compressor, world=one) for one in (world, paced))
        assert torch.equal(plain, slow)


def mixing_over_a_paced_world_is_exact(world: World) -> None:
    paced = pace(world, rate_bits_per_s=FAST_BITS_PER_S)
    x = torch.full((8,), float(2 * world.topology.node))
    schedule = flexcomm.gossip.one_peer_exponential(world.topology.nodes)
    mixed = flexcomm.mix(x, schedule, step=0, world=paced)
    assert mixed.tensors.tolist() == [1.0] * 8


LAWS: dict[str, Callable[[World], object]] = {
    law.__name__: partial(on_paced_links, law) for law in testing.TRANSPORT_LAWS
}
LAWS |= {
    law.__name__: law
    for law in (
        all_that_crosses_nodes_is_paced,
        a_paced_world_averages_the_same_bits,
        mixing_over_a_paced_world_is_exact,
    )
}


@pytest.mark.parametrize(("shape", "law"), cases([Shape(2, 2)], LAWS))
def test_a_paced_world_keeps_the_law(shape: Shape, law: str) -> None:
    keep(LAWS[law], shape)
