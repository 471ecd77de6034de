"""Every launcher's announcement is read without communication, and what cannot be true is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcomm.errors import TopologyError
from flexcomm.topology import (
    Members,
    RankInfo,
    Topology,
    arrange,
    blocks,
    expand_tasks_per_node,
    group_by_node,
    place_of,
    read_launcher,
)

if TYPE_CHECKING:
    from random import Random

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (OPENMPI, RankInfo("openmpi", 3, 4, None, 1, 2)),
        (HYDRA, RankInfo("mpich", 3, 4, None, 1, 2)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, RankInfo("mpich", 3, 4, None, None, None)),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
            RankInfo("mpich", 3, 4, None, 1, 2),
        ),
        (TORCHRUN, RankInfo("torchrun", 3, 4, 1, 1, 2)),
        (SRUN, RankInfo("slurm", 3, 4, 1, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, RankInfo("environment", 1, 2, None, None, None)),
        ({}, RankInfo("none", 0, 1, 0, 0, 1)),
    ],
)
def test_each_launcher_is_read_from_its_own_variables(environ: dict[str, str], expected: RankInfo) -> None:
    assert read_launcher(environ) == expected


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (SRUN | TORCHRUN | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}, "torchrun"),
        (OPENMPI | TORCHRUN | {"OMPI_COMM_WORLD_RANK": "0"}, "torchrun"),
        (SRUN | OPENMPI | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, "openmpi"),
        (SRUN | HYDRA | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, "mpich"),
        (SRUN | HYDRA, "mpich"),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, "slurm"),
        (OPENMPI | {"RANK": "3", "WORLD_SIZE": "4"}, "openmpi"),
    ],
    ids=[
        "srun torchrun",
        "mpirun torchrun",
        "mpirun in a step",
        "hydra in a step",
        "hydra, one rank a proxy",
        "srun --mpi=pmi2",
        "copied by hand",
    ],
)
def test_the_innermost_launcher_counts(environ: dict[str, str], launcher: str) -> None:
    assert read_launcher(environ).launcher == launcher


def test_a_batch_script_outside_srun_is_one_process() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    assert read_launcher(batch) == RankInfo("none", 0, 1, 0, 0, 1)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "RANK and WORLD_SIZE"]),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, ["MPI_LOCALRANKID=1", "PMI_RANK and PMI_SIZE"]),
        ({"PMIX_RANK": "1"}, ["PMIX_RANK=1", "mpirun or srun"]),
        ({"TORCHELASTIC_RUN_ID": "1"}, ["torchrun", "nothing", "RANK and WORLD_SIZE"]),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_RANK"]),
        (TORCHRUN | {"RANK": "4"}, ["RANK=4", "WORLD_SIZE=4", "unset"]),
        (TORCHRUN | {"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE=8"]),
        (TORCHRUN | {"RANK": "two"}, ["RANK='two'", "whole number"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK='-1'"]),
        (OPENMPI | {"RANK": "0", "WORLD_SIZE": "4"}, ["rank 3 of 4", "rank 0 of 4", "RANK and WORLD_SIZE"]),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, ["SLURM_LOCALID=1", "[1, 1, 1, 1]"]),
    ],
)
def test_partial_and_contradictory_variables_are_refused_by_name(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        read_launcher(environ)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_slurm_counts_are_expanded() -> None:
    assert expand_tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def numbered(*places: tuple[int, int]) -> list[RankInfo]:
    return [RankInfo("slurm", rank, len(places), node, local_rank) for rank, (node, local_rank) in enumerate(places)]


def counted(*places: tuple[int, int]) -> list[RankInfo]:
    return [
        RankInfo("openmpi", rank, len(places), None, local_rank, local_size)
        for rank, (local_rank, local_size) in enumerate(places)
    ]


def test_numbered_nodes_may_hold_ranks_in_any_order() -> None:
    assert arrange(numbered((0, 0), (1, 0), (0, 1), (1, 1))) == ((0, 2), (1, 3))
    assert arrange(numbered((7, 1), (7, 0), (9, 0), (9, 1))) == ((1, 0), (2, 3))


@given(st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_every_rank_is_found_where_it_was_announced(nodes: int, local_size: int, random: Random) -> None:
    places = [(node, local_rank) for node in range(nodes) for local_rank in range(local_size)]
    random.shuffle(places)
    members = arrange(numbered(*places))
    assert members is not None
    assert [members[node][local_rank] for node, local_rank in places] == list(range(len(places)))
    for rank, (node, local_rank) in enumerate(places):
        topology = Topology(rank, members, "slurm")
        assert (topology.node, topology.local_rank) == (node, local_rank)
        assert topology.inter_groups[local_rank][node] == rank


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_blocks_are_recognised_and_refused_exactly_when_their_sizes_differ(sizes: list[int]) -> None:
    members = arrange(counted(*((local_rank, size) for size in sizes for local_rank in range(size))))
    assert members is not None
    if len(set(sizes)) == 1:
        assert members == blocks(sum(sizes), sizes[0])
    else:
        with pytest.raises(TopologyError, match="different numbers of ranks"):
            Topology(0, members, "openmpi")


def test_blocks_of_ranks_need_no_node_numbers() -> None:
    assert arrange(counted((0, 2), (1, 2), (0, 2), (1, 2))) == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "rank_infos",
    [
        counted((0, 2), (0, 2), (1, 2), (1, 2)),
        counted((0, 3), (1, 3), (0, 3), (1, 3)),
        [RankInfo("mpich", rank, 2) for rank in range(2)],
    ],
    ids=["round robin", "counts that do not add up", "nothing announced"],
)
def test_what_only_an_mpi_can_tell_is_left_open(rank_infos: list[RankInfo]) -> None:
    assert arrange(rank_infos) is None


@pytest.mark.parametrize(
    "rank_infos",
    [counted((0, 3), (1, 3), (2, 3), (0, 1)), numbered((0, 0), (0, 1), (0, 2), (1, 0))],
    ids=["counted", "numbered"],
)
def test_nodes_of_unequal_size_are_refused_with_their_counts(rank_infos: list[RankInfo]) -> None:
    members = arrange(rank_infos)
    assert members is not None
    with pytest.raises(TopologyError, match="node 0: 3, node 1: 1"):
        Topology(0, members, "none")


def test_a_local_rank_announced_twice_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"node 1 announced local ranks \[0, 0\]"):
        arrange(numbered((0, 0), (0, 1), (1, 0), (1, 0)))


@pytest.mark.parametrize("ranks_per_node", [0, 3, 8])
def test_ranks_per_node_must_divide_and_the_error_names_what_would(ranks_per_node: int) -> None:
    with pytest.raises(TopologyError, match=rf"ranks_per_node={ranks_per_node} .* \[1, 2, 4\]"):
        blocks(4, ranks_per_node)


def test_a_topology_pairs_equal_local_ranks_between_nodes() -> None:
    place = Topology(rank=1, members=((0, 2), (1, 3), (4, 5)), launcher="slurm")
    assert (place.size, place.nodes, place.local_size) == (6, 3, 2)
    assert (place.node, place.local_rank) == (1, 0)
    assert place.inter_groups == ((0, 1, 4), (2, 3, 5))
    assert str(place) == "rank 1 of 6: node 1 of 3, local rank 0 of 2 (slurm)"


@pytest.mark.parametrize(
    ("rank", "members"), [(0, ((0, 1), (2,))), (0, ((0, 1), (1, 2))), (9, ((0, 1), (2, 3))), (0, ((),))]
)
def test_an_impossible_topology_cannot_be_made(rank: int, members: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(TopologyError):
        Topology(rank, members, "none")


HERE, THERE = 7, 8  # hosts


@pytest.mark.parametrize(
    ("places", "members"),
    [
        # Numbered nodes, whatever the hosts.
        ([(0, 0, HERE), (1, 0, HERE), (0, 1, HERE), (1, 1, HERE)], ((0, 2), (1, 3))),
        # Every mpirun: hosts tell nodes apart, and local ranks do where several nodes share a name.
        ([(-1, 0, HERE), (-1, 1, HERE), (-1, 0, THERE), (-1, 1, THERE)], ((0, 1), (2, 3))),
        ([(-1, 0, HERE), (-1, 1, HERE), (-1, 0, HERE), (-1, 1, HERE)], ((0, 1), (2, 3))),
        # Replicas of one shard, and the ranks of one node.
        ([(-1, 1, HERE), (-1, 1, HERE)], ((0,), (1,))),
        ([(-1, 0, HERE), (-1, 1, HERE)], ((0, 1),)),
        # No launcher: one host is one node.
        ([(-1, -1, HERE), (-1, -1, HERE), (-1, -1, THERE)], ((0, 1), (2,))),
    ],
)
def test_ranks_of_a_group_are_found_on_their_nodes(places: list[tuple[int, int, int]], members: Members) -> None:
    assert group_by_node(places) == members


def test_a_place_is_what_was_set_before_what_the_launcher_says() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "GROUP_RANK": "0"}
    local = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    assert place_of(3, torchrun | local) == (0, 3)
    assert place_of(3, torchrun | local | {"FLEXCOMM_RANKS_PER_NODE": "2"}) == (1, 1)
    assert place_of(0, {}) == (-1, -1)
