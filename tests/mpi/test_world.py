"""Under mpirun, connect() finds the ranks, starts torch beside MPI, and asks MPI only what nobody announced."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import flexcomm
from flexcomm import world as world_module
from flexcomm.errors import ConfigMismatchError, TopologyError
from flexcomm.topology import read_launcher

pytestmark = pytest.mark.mpi


def test_all_ranks_of_one_host_share_a_node(world: flexcomm.World) -> None:
    topology = world.topology
    assert (topology.rank, topology.size) == (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
    assert (topology.nodes, topology.local_rank, topology.local_size) == (1, topology.rank, topology.size)
    assert topology.launcher in ("openmpi", "mpich")


def test_torch_is_started_beside_mpi(world: flexcomm.World) -> None:
    x = torch.tensor([float(world.topology.rank)])
    dist.all_reduce(x)
    assert x.item() == sum(range(world.topology.size))


@pytest.mark.parametrize("transports", [("mpi", "mpi"), ("gloo", "mpi"), ("mpi", "gloo"), ("gloo", "gloo")])
def test_transports_are_chosen_independently(world: flexcomm.World, transports: tuple[str, str]) -> None:
    intra, inter = transports
    size = world.topology.size
    per_node = 2 if size % 2 == 0 else 1
    with flexcomm.connect(intra=intra, inter=inter, ranks_per_node=per_node, timeout_s=30) as other:
        assert other.topology.nodes == size // per_node
        assert other.intra.name == (intra if per_node > 1 else "loopback")
        assert other.inter.name == (inter if size > per_node else "loopback")
        total = other.inter.all_reduce(other.intra.all_reduce(torch.ones(3)).wait()).wait()
        assert total.tolist() == [float(size)] * 3
    world.control.barrier().wait()


def test_mpi_is_asked_where_no_local_rank_was_announced(world: flexcomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    with flexcomm.connect(timeout_s=30) as other:
        assert other.topology == world.topology


def test_mpi_is_not_asked_where_the_launcher_told(world: flexcomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_: object) -> tuple[int, int, int]:
        raise AssertionError("Split_type was called though the launcher announced local ranks")

    monkeypatch.setattr(world_module, "place_in_shared_memory", forbidden)
    with flexcomm.connect(timeout_s=30) as other:
        assert other.topology == world.topology


@pytest.mark.mpi(min_size=2)
def test_a_disagreement_is_named_on_every_rank(world: flexcomm.World) -> None:
    last = world.topology.size - 1
    with pytest.raises(ConfigMismatchError, match=rf"k: 32 on .*; 16 on rank {last}"):
        world.agree({"k": 16 if world.topology.rank == last else 32, "chunk": 64})
    world.agree({"k": 32, "chunk": 64})


@pytest.mark.mpi(min_size=2)
def test_an_mpi_that_is_not_the_launchers_is_refused(world: flexcomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    rank_info = read_launcher({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "99"})
    monkeypatch.setattr(world_module, "read_rank_info", lambda: rank_info)
    with pytest.raises(TopologyError, match=rf"rank 0 of 99, but the MPI .* of {world.topology.size}"):
        flexcomm.connect(timeout_s=30)
