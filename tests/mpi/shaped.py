"""Worlds of fewer ranks than mpirun started, so that laws for every shape need one start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpi4py import MPI

from flexcomm.bootstrap.groups import GroupFactory
from flexcomm.world import assemble, read_rank_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import World
    from tests.ranks.shapes import Shape

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Shaped:
    """A world of some of the ranks: ``among`` is ``None`` on those that are not in it."""

    shape: Shape
    everybody: World
    among: World | None

    def keep(self, law: Callable[[World], object]) -> None:
        """Hold ``law`` to the ranks of this shape; all ranks of the job return together."""
        if self.among is not None:
            law(self.among)
        self.everybody.control.barrier().wait()


def connect_the_first(shape: Shape, everybody: World) -> World | None:
    """What ``connect(ranks_per_node=...)`` gives the first ranks of a job, as if there were no others.

    Over MPI alone: torch's groups are made by all ranks of a job. All ranks call it.
    """
    rank = everybody.topology.rank
    comm = MPI.COMM_WORLD.Split(0 if rank < shape.size else MPI.UNDEFINED, rank)
    if comm == MPI.COMM_NULL:
        return None
    assert isinstance(comm, MPI.Intracomm)
    rank_info = replace(read_rank_info(), size=shape.size)
    return assemble(GroupFactory(rank_info, comm, TIMEOUT_S), "mpi", "mpi", shape.ranks_per_node)
