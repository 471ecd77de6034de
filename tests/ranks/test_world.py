"""Ranks find their nodes, sum inside and between them, and agree before data moves."""

from __future__ import annotations

import logging
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import flexcomm
from flexcomm import world as world_module
from flexcomm.bootstrap import groups
from flexcomm.errors import ConfigMismatchError, TopologyError, TransportError, TransportUnavailableError
from tests.ranks.processes import observe_ranks, run_ranks


def place_and_sum(ranks_per_node: int | None) -> tuple[str, list[float], list[float], list[float]]:
    with flexcomm.connect(ranks_per_node=ranks_per_node, timeout_s=30) as world:
        rank = torch.tensor([float(2**world.topology.rank)])
        inside = world.intra.all_reduce(rank.clone()).wait().tolist()
        between = world.inter.all_reduce(rank.clone()).wait().tolist()
        everywhere = world.control.all_reduce(rank.clone()).wait().tolist()
        return str(world.topology), inside, between, everywhere


def test_the_launchers_nodes_are_found_and_joined() -> None:
    first, second, third, fourth = run_ranks(place_and_sum, 4, None, ranks_per_node=2)
    assert first == ("rank 0 of 4: node 0 of 2, local rank 0 of 2 (torchrun)", [3.0], [5.0], [15.0])
    assert second == ("rank 1 of 4: node 0 of 2, local rank 1 of 2 (torchrun)", [3.0], [10.0], [15.0])
    assert third == ("rank 2 of 4: node 1 of 2, local rank 0 of 2 (torchrun)", [12.0], [5.0], [15.0])
    assert fourth == ("rank 3 of 4: node 1 of 2, local rank 1 of 2 (torchrun)", [12.0], [10.0], [15.0])


def test_ranks_per_node_overrides_the_launcher() -> None:
    places = run_ranks(place_and_sum, 3, 1, ranks_per_node=3)
    assert [place[0] for place in places] == [
        f"rank {rank} of 3: node {rank} of 3, local rank 0 of 1 (torchrun)" for rank in range(3)
    ]
    assert [place[1:] for place in places] == [([float(2**rank)], [7.0], [7.0]) for rank in range(3)]


def test_the_environment_overrides_the_launcher_too() -> None:
    places = run_ranks(place_and_sum, 2, None, environ={"FLEXCOMM_RANKS_PER_NODE": "1"})
    assert places[1][0] == "rank 1 of 2: node 1 of 2, local rank 0 of 1 (torchrun)"


def connect_by_hand(ranks_per_node: int | None) -> str:
    with flexcomm.connect(ranks_per_node=ranks_per_node, timeout_s=30) as world:
        return str(world.topology)


BY_HAND = {"TORCHELASTIC_RUN_ID": "", "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": "", "GROUP_RANK": ""}


def test_rank_and_size_by_hand_do_when_nodes_are_told() -> None:
    places = run_ranks(connect_by_hand, 2, 1, environ=BY_HAND)
    assert places[1] == "rank 1 of 2: node 1 of 2, local rank 0 of 1 (environment)"


def test_rank_and_size_by_hand_do_not_tell_the_nodes() -> None:
    outcomes = observe_ranks(connect_by_hand, 2, None, environ=BY_HAND)
    assert all("TopologyError" in str(outcome.error) for outcome in outcomes)
    assert all("ranks_per_node=" in str(outcome.error) for outcome in outcomes)


def connect_to_a_started_torch() -> tuple[str, bool]:
    dist.init_process_group("gloo")
    with flexcomm.connect(timeout_s=30) as world:
        total = world.inter.all_reduce(torch.ones(1)).wait().tolist()
        assert total == [2.0]
    still_there = dist.is_initialized()
    dist.destroy_process_group()
    return str(world.topology), still_there


def test_a_process_group_that_is_there_is_used_and_left_open() -> None:
    places = run_ranks(connect_to_a_started_torch, 4, ranks_per_node=2)
    assert places[3] == ("rank 3 of 4: node 1 of 2, local rank 1 of 2 (torchrun)", True)


def connect_twice() -> list[float]:
    with flexcomm.connect(timeout_s=30) as world:
        first = world.intra.all_reduce(torch.ones(1)).wait().tolist()
    assert not dist.is_initialized()
    with flexcomm.connect(timeout_s=30) as world:
        return first + world.intra.all_reduce(torch.ones(1)).wait().tolist()


def test_a_closed_world_can_be_connected_again() -> None:
    assert run_ranks(connect_twice, 2) == [[2.0, 2.0]] * 2


def connect_mesh(names: tuple[str, str]) -> tuple[str, list[float], list[float], list[float]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    rank = torch.tensor([float(2 ** dist.get_rank())])
    with flexcomm.connect_mesh(mesh, timeout_s=30) as world:
        inside = world.intra.all_reduce(rank.clone()).wait().tolist()
        between = world.inter.all_reduce(rank.clone()).wait().tolist()
        everywhere = world.control.all_reduce(rank.clone()).wait().tolist()
    dist.destroy_process_group()
    return str(world.topology), inside, between, everywhere


def test_a_mesh_is_a_world_whichever_axis_comes_first() -> None:
    rows = run_ranks(connect_mesh, 4, ("replicate", "shard"))
    assert rows[1] == ("rank 1 of 4: node 0 of 2, local rank 1 of 2 (mesh)", [3.0], [10.0], [15.0])
    columns = run_ranks(connect_mesh, 4, ("shard", "replicate"))
    assert columns[1] == ("rank 1 of 4: node 1 of 2, local rank 0 of 2 (mesh)", [10.0], [3.0], [15.0])


def connect_on_one_device() -> tuple[str, str, list[str], str, list[float]]:
    """NCCL need not be there: it is not even tried."""
    groups.native_backend = world_module.native_backend = lambda: "nccl"
    world_module.identify = lambda _: "the only one"
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("flexcomm").addHandler(handler)
    with flexcomm.connect(timeout_s=30) as world:
        warned = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
        # Any type of device: gloo gets a copy in host memory.
        total = world.inter.all_reduce(torch.ones(1)).wait().tolist()
        with pytest.raises(TransportUnavailableError) as caught:
            flexcomm.connect(inter="nccl", timeout_s=30)
        return world.intra.name, world.inter.name, warned, str(caught.value), total


def test_ranks_that_share_a_device_meet_in_host_memory() -> None:
    found = run_ranks(connect_on_one_device, 4, ranks_per_node=2)
    for rank, (intra, inter, warned, refused, total) in enumerate(found):
        assert (intra, inter, total) == ("gloo", "gloo", [2.0])
        said = "ranks 0-3 share devices, so nccl cannot join them: {} goes over gloo, through host memory"
        assert warned == ([said.format("intra"), said.format("inter")] if rank == 0 else [])
        assert "inter cannot be joined by nccl, because ranks 0-3 share devices" in refused
        assert "connect(inter='auto')" in refused


def connect_mesh_with_other_axes() -> str:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(TopologyError) as caught:
        flexcomm.connect_mesh(mesh, timeout_s=30)
    dist.barrier()
    dist.destroy_process_group()
    return str(caught.value)


def test_a_mesh_with_other_axes_is_refused_by_name() -> None:
    assert all("axes ('dp', 'tp')" in text for text in run_ranks(connect_mesh_with_other_axes, 4))


def connect_slices_of_a_larger_mesh() -> tuple[str, list[float]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    with flexcomm.connect_mesh(mesh["replicate", "shard"], timeout_s=30) as world:
        everywhere = world.control.all_reduce(torch.tensor([float(2 ** dist.get_rank())])).wait().tolist()
        world.agree({"tensor-parallel rank": mesh.get_local_rank("tp")})
    dist.barrier()
    dist.destroy_process_group()
    return str(world.topology), everywhere


def test_two_axes_sliced_out_of_a_larger_mesh_are_a_world_of_their_own() -> None:
    places = run_ranks(connect_slices_of_a_larger_mesh, 8)
    assert places[6] == ("rank 3 of 4: node 1 of 2, local rank 1 of 2 (mesh)", [85.0])
    assert places[3] == ("rank 1 of 4: node 0 of 2, local rank 1 of 2 (mesh)", [170.0])


def disagree_on_a_shape() -> tuple[str, list[float]]:
    with flexcomm.connect(timeout_s=30) as world:
        rows = 4 if world.topology.rank == 2 else 3
        fields = {"shape of layer.weight": (rows, 5), "dtype of layer.weight": torch.float32, "step": 7}
        with pytest.raises(ConfigMismatchError) as caught:
            world.agree(fields)
        return str(caught.value), world.intra.all_reduce(torch.ones(1)).wait().tolist()


def test_a_mismatched_shape_is_named_on_every_rank_and_the_world_goes_on() -> None:
    texts = run_ranks(disagree_on_a_shape, 3)
    line = "shape of layer.weight: (3, 5) on ranks 0-1; (4, 5) on rank 2"
    assert all(line in text and "dtype" not in text and total == [3.0] for text, total in texts)


def disagree_on_one_of_many_fields() -> str:
    with flexcomm.connect(timeout_s=30) as world:
        fields: dict[str, object] = {f"shape of tensor {i}": (i, i) for i in range(20_000)}
        if world.topology.rank == 1:
            fields |= {"shape of tensor 19999": (1, 1), "only here": True}
        with pytest.raises(ConfigMismatchError) as caught:
            world.agree(fields)
        return str(caught.value)


def test_one_field_of_twenty_thousand_that_differs_is_named_alone() -> None:
    for text in run_ranks(disagree_on_one_of_many_fields, 2):
        assert "shape of tensor 19999: (19999, 19999) on rank 0; (1, 1) on rank 1" in text
        assert "only here: (not set) on rank 0; True on rank 1" in text
        assert text.count("shape of tensor") == 1


def use_two_worlds() -> list[float]:
    first = flexcomm.connect(timeout_s=30)
    second = flexcomm.connect(timeout_s=30)
    first.close()
    total = second.intra.all_reduce(torch.ones(1)).wait().tolist()
    assert dist.is_initialized()
    with pytest.raises(TransportError, match="this world is closed"):
        first.intra.all_reduce(torch.ones(1))
    second.close()
    assert not dist.is_initialized()
    second.close()
    return total


def test_closing_one_world_leaves_the_other_open_and_the_last_one_closes_torch() -> None:
    assert run_ranks(use_two_worlds, 2) == [[2.0], [2.0]]


def connect_to_torch_started_without_a_launcher(ranks_per_node: int | None) -> str:
    rank, size, port = (int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        with flexcomm.connect(ranks_per_node=ranks_per_node, timeout_s=30) as world:
            return str(world.topology)
    except TopologyError as error:
        return str(error)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def test_torch_started_by_hand_needs_to_be_told_the_nodes() -> None:
    places = run_ranks(connect_to_torch_started_without_a_launcher, 2, 1, environ=BY_HAND)
    assert places[1] == "rank 1 of 2: node 1 of 2, local rank 0 of 1 (torch)"
    refusals = run_ranks(connect_to_torch_started_without_a_launcher, 2, None, environ=BY_HAND)
    assert all("did not tell which ranks share a node" in text for text in refusals)


def connect_mesh_after_uneven_groups() -> list[float]:
    dist.init_process_group("gloo")
    dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with flexcomm.connect_mesh(mesh, timeout_s=30) as world:
        total = world.control.all_reduce(torch.ones(1)).wait().tolist()
    dist.barrier()
    dist.destroy_process_group()
    return total


def test_a_mesh_of_all_ranks_does_not_mind_other_groups() -> None:
    assert run_ranks(connect_mesh_after_uneven_groups, 4) == [[4.0]] * 4


def connect_with_other_settings(option: str) -> str:
    odd = os.environ["RANK"] == "1"
    with pytest.raises(ConfigMismatchError) as caught:
        if option == "ranks_per_node":
            flexcomm.connect(ranks_per_node=2 if odd else 1, timeout_s=30)
        else:
            flexcomm.connect(inter="gloo" if odd else "auto", timeout_s=30)
    return str(caught.value)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("ranks_per_node", "ranks_per_node: 1 on rank 0; 2 on rank 1"),
        ("inter", "inter: auto on rank 0; gloo on rank 1"),
    ],
)
def test_ranks_that_connect_with_other_settings_all_hear_of_it(option: str, line: str) -> None:
    assert all(line in text for text in run_ranks(connect_with_other_settings, 2, option))


def connect_with_impossible_nodes() -> str:
    with pytest.raises(TopologyError) as caught:
        flexcomm.connect(ranks_per_node=2, timeout_s=30)
    assert not dist.is_initialized()
    return str(caught.value)


def test_ranks_per_node_that_does_not_divide_is_refused_everywhere_and_nothing_stays_open() -> None:
    assert all(
        "ranks_per_node=2 does not divide the 3 ranks" in text for text in run_ranks(connect_with_impossible_nodes, 3)
    )


def connect_on_unequal_nodes() -> str:
    rank = int(os.environ["RANK"])
    places = {0: (0, 0, 1), 1: (1, 0, 2), 2: (1, 1, 2), 3: (2, 0, 3), 4: (2, 1, 3), 5: (2, 2, 3)}
    for name, number in zip(("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), places[rank], strict=True):
        os.environ[name] = str(number)
    with pytest.raises(TopologyError) as caught:
        flexcomm.connect(timeout_s=30)
    return str(caught.value)


def test_nodes_of_unequal_size_are_refused_on_every_rank_even_where_the_numbers_could_be_right() -> None:
    assert all("node 0: 1, node 1: 2, node 2: 3" in text for text in run_ranks(connect_on_unequal_nodes, 6))
