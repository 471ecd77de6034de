"""One start of four ranks holds a world of every shape, which is what connect() gives that many ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from flexcomm import World
    from tests.mpi.shaped import Shaped
    from tests.ranks.shapes import Shape

pytestmark = pytest.mark.mpi


def stand_in_place(shape: Shape, world: World) -> None:
    place = world.topology
    assert (place.size, place.nodes, place.local_size) == (shape.size, shape.nodes, shape.ranks_per_node)
    assert (world.control.size, world.intra.size, world.inter.size) == (shape.size, shape.ranks_per_node, shape.nodes)
    assert world.control.name == "mpi"
    assert world.intra.name == ("mpi" if shape.ranks_per_node > 1 else "loopback")
    assert world.inter.name == ("mpi" if shape.nodes > 1 else "loopback")


def test_a_world_has_the_shape_it_was_asked_for(shaped: Shaped) -> None:
    shaped.keep(partial(stand_in_place, shaped.shape))


def sum_inside_and_between(world: World) -> None:
    mine = torch.tensor([float(2**world.topology.rank)])
    everybodys = world.inter.all_reduce(world.intra.all_reduce(mine).wait()).wait()
    assert everybodys.tolist() == [2.0**world.topology.size - 1]
    world.agree({"shape": (world.topology.nodes, world.topology.local_size)})


def test_a_sum_inside_and_between_nodes_counts_every_rank_once(shaped: Shaped) -> None:
    shaped.keep(sum_inside_and_between)
