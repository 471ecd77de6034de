"""The laws of mixing. A law is a function of a world that all its ranks call together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import flexcomm
from flexcomm import (
    CompressorError,
    ConfigMismatchError,
    InvalidArgumentError,
    InvalidTensorError,
    MixResiduals,
    NonFiniteError,
    PushSum,
    SyncError,
    gossip,
)
from tests.ranks.shapes import ALWAYS, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from flexcomm import World
    from flexcomm.gossip import ScheduleLike

EIGHTHS = 8.0


def schedules(nodes: int) -> list[ScheduleLike]:
    power = nodes & (nodes - 1) == 0
    return [
        gossip.complete(nodes),
        gossip.ring(nodes),
        gossip.fixed_ring(nodes),
        gossip.base(nodes),
        gossip.base(nodes, k=2),
        gossip.alternating_exponential_ring(nodes),
        gossip.static_exponential(nodes),
        gossip.directed_exponential(nodes),
        gossip.random_matching(nodes, seed=3),
        *([gossip.Schedule("unequal", nodes, (gossip.Phase((group_of_all(nodes, 0.75),)),))] if nodes > 1 else []),
        *([gossip.one_peer_exponential(nodes)] if power else []),
    ]


def group_of_all(nodes: int, self_weight: float) -> gossip.Group:
    """A group of all nodes with a weight for each node's own value."""
    return gossip.Group(tuple(range(nodes)), self_weight)


def inputs(world: World, numel: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Every rank's tensor, ``[ranks, numel]``: small integers over powers of two, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-64, 64, (world.topology.size, numel), generator=generator)
    return (whole / EIGHTHS).to(dtype)


def weights_over_ranks(world: World, schedule: ScheduleLike, step: int) -> Tensor:
    """The matrix over ranks, in the order of nodes: that over nodes, and equal parts inside each."""
    place = world.topology
    inside = np.full((place.local_size, place.local_size), 1.0 / place.local_size)
    return torch.from_numpy(np.kron(schedule.phase(step).matrix(place.nodes), inside))


def expected(world: World, schedule: ScheduleLike, step: int, of_all_ranks: Tensor) -> Tensor:
    rows = torch.tensor([rank for node in world.topology.members for rank in node])
    mixed = weights_over_ranks(world, schedule, step).to(rows.device) @ of_all_ranks[rows].double()
    return mixed[rows.tolist().index(world.topology.rank)].to(of_all_ranks.dtype)


def mixing_is_the_dense_matrix_product(world: World) -> None:
    for schedule in schedules(world.topology.nodes):
        for step in range(4):
            of_all_ranks = inputs(world, 1003, step)
            x = of_all_ranks[world.topology.rank].clone()
            mixed = flexcomm.mix(x, schedule, step, world=world)
            want = expected(world, schedule, step, of_all_ranks)
            # Weights such as 1/3 are rounded, and sums of three in another order round differently.
            torch.testing.assert_close(mixed.tensors, want, rtol=0, atol=1e-13, msg=lambda m, s=schedule: f"{s}: {m}")
            assert torch.equal(x, of_all_ranks[world.topology.rank])


def dyadic_weights_mix_exactly_in_every_dtype(world: World) -> None:
    schedule = gossip.alternating_exponential_ring(world.topology.nodes)
    if world.topology.size & (world.topology.size - 1):
        return
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        of_all_ranks = (inputs(world, 37) * EIGHTHS).to(dtype)
        got = flexcomm.mix(of_all_ranks[world.topology.rank], schedule, 0, world=world).tensors
        assert got.dtype == dtype
        assert torch.equal(got, expected(world, schedule, 0, of_all_ranks))


def the_distance_is_how_far_this_rank_moved(world: World) -> None:
    for schedule in schedules(world.topology.nodes):
        of_all_ranks = inputs(world, 4096, 1)
        x = of_all_ranks[world.topology.rank]
        moved = flexcomm.mix(x, schedule, 0, world=world).squared_distance
        assert moved.dtype == torch.float64
        want = (expected(world, schedule, 0, of_all_ranks) - x).square().sum()
        torch.testing.assert_close(moved, want, rtol=1e-9, atol=1e-12)


def lists_shapes_and_strides_are_kept(world: World) -> None:
    schedule = gossip.complete(world.topology.nodes)
    shapes = [(3, 5), (), (0,), (2, 1, 7)]
    of_all_ranks = [inputs(world, max(1, torch.Size(shape).numel()), seed) for seed, shape in enumerate(shapes)]
    mine = [
        all_of[world.topology.rank][: torch.Size(shape).numel()].view(shape)
        for all_of, shape in zip(of_all_ranks, shapes, strict=True)
    ]
    mine[0] = mine[0].t().contiguous().t()
    mixed = flexcomm.mix(mine, schedule, 0, world=world).tensors
    for got, all_of, shape in zip(mixed, of_all_ranks, shapes, strict=True):
        want = expected(world, schedule, 0, all_of)[: torch.Size(shape).numel()].view(shape)
        assert got.shape == torch.Size(shape)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def the_result_may_be_written_over_the_tensors(world: World) -> None:
    schedule = gossip.ring(world.topology.nodes)
    of_all_ranks = inputs(world, 300)
    for parts in (1, 3):
        xs = [part.clone() for part in of_all_ranks[world.topology.rank].chunk(parts)]
        mixed = flexcomm.mix(xs, schedule, 0, world=world, out=xs)
        assert all(got is x for got, x in zip(mixed.tensors, xs, strict=True))
        torch.testing.assert_close(torch.cat(xs), expected(world, schedule, 0, of_all_ranks), rtol=0, atol=1e-13)


def shards_are_mixed_between_nodes_alone(world: World) -> None:
    place, schedule = world.topology, gossip.base(world.topology.nodes)
    of_all_ranks = inputs(world, 100)
    numel = 10 + 7 * place.local_rank
    own = of_all_ranks[place.rank][:numel].clone()
    before = world.stats()["intra_collectives"]
    got = flexcomm.mix(own, schedule, 0, world=world, sharded=True).tensors
    peers = torch.stack([of_all_ranks[ranks[place.local_rank]][:numel] for ranks in place.members])
    want = torch.from_numpy(schedule.phase(0).matrix(place.nodes)).to(peers.device) @ peers
    torch.testing.assert_close(got, want[place.node], rtol=0, atol=1e-13)
    assert world.stats()["intra_collectives"] == before


def mixes_may_be_under_way_beside_all_else(world: World) -> None:
    """Many at once, waited for backwards, with other collectives of the same ranks between: the same bits."""
    schedule, rank = gossip.base(world.topology.nodes), world.topology.rank
    tensors = [inputs(world, 5000 + seed, seed)[rank] for seed in range(6)]
    alone = [flexcomm.mix(x, schedule, step, world=world).tensors for step, x in enumerate(tensors)]
    handles = [flexcomm.start_mix(x, schedule, step, world=world) for step, x in enumerate(tensors)]
    total = world.inter.all_reduce(torch.ones(10)).wait()
    synced = flexcomm.hierarchical_sync(torch.ones(100), flexcomm.dense(), world=world)
    beside = [handle.wait().tensors for handle in reversed(handles)]
    assert total.tolist() == [float(world.topology.nodes)] * 10
    assert synced.tolist() == [1.0] * 100
    assert all(torch.equal(one, other) for one, other in zip(alone, reversed(beside), strict=True))
    assert all(handle.done() for handle in handles)


def all_nodes_of_a_uniform_group_hold_the_same_bits(world: World) -> None:
    x = torch.randn(999, generator=torch.Generator().manual_seed(world.topology.rank))
    mixed = flexcomm.mix(x, gossip.complete(world.topology.nodes), 0, world=world).tensors
    assert all(torch.equal(mixed, other) for other in world.control.all_gather(mixed).wait())


def gamma_goes_a_share_of_the_way_between_nodes(world: World) -> None:
    schedule = gossip.complete(world.topology.nodes)
    of_all_ranks = inputs(world, 64)
    got = flexcomm.mix(of_all_ranks[world.topology.rank], schedule, 0, world=world, gamma=0.25).tensors
    inside = of_all_ranks[list(world.topology.members[world.topology.node])].mean(dim=0)
    torch.testing.assert_close(got, 0.75 * inside + 0.25 * of_all_ranks.mean(dim=0), rtol=0, atol=1e-13)


def a_pair_sends_what_it_has_once(world: World) -> None:
    place = world.topology
    if place.nodes != 2:
        return
    before = world.stats()["inter_sent_bytes"]
    flexcomm.mix(torch.zeros(4096), gossip.base(2), 0, world=world)
    sent = world.stats()["inter_sent_bytes"] - before
    assert 4096 * 4 / place.local_size <= sent <= 4096 * 4 / place.local_size + 64


def directed(nodes: int) -> ScheduleLike:
    """A graph that is not doubly stochastic: node 0 sends to all others, every node to the next."""
    edges = [gossip.Edge(node, (node + 1) % nodes, 0.25) for node in range(nodes)]
    edges += [gossip.Edge(0, node, 0.25) for node in range(2, nodes)]
    return gossip.Schedule("lopsided", nodes, (gossip.Phase(edges=tuple(edges)),))


def push_sum_leads_to_the_mean_where_plain_mixing_would_not(world: World) -> None:
    if world.topology.nodes < 3:
        return
    schedule = directed(world.topology.nodes)
    assert not schedule.is_doubly_stochastic
    of_all_ranks = inputs(world, 50)
    x, push_sum = of_all_ranks[world.topology.rank].clone(), PushSum()
    with pytest.raises(InvalidArgumentError, match=r"not doubly stochastic.*push_sum"):
        flexcomm.mix(x, schedule, 0, world=world)
    for step in range(200):
        x = flexcomm.mix(x, schedule, step, world=world, push_sum=push_sum).tensors
    assert push_sum.weight != 1.0
    torch.testing.assert_close(x, of_all_ranks.mean(dim=0), rtol=0, atol=1e-12)


def compressed_distance(
    world: World, compressor: flexcomm.Compressor, schedule: ScheduleLike, rounds: int, gamma: float | None = None
) -> float:
    """How far this rank is from the mean after so many rounds, of how far it was."""
    of_all_ranks = torch.randn(world.topology.size, 200, generator=torch.Generator().manual_seed(5))
    mean, x, residuals = of_all_ranks.mean(dim=0), of_all_ranks[world.topology.rank].clone(), MixResiduals()
    push_sum = None if schedule.is_doubly_stochastic else PushSum()
    for step in range(rounds):
        options = {"gamma": gamma, "compressor": compressor, "residuals": residuals, "push_sum": push_sum}
        x = flexcomm.mix(x, schedule, step, world=world, **options).tensors
    return float((x - mean).norm() / (of_all_ranks[world.topology.rank] - mean).norm().clamp(min=1e-30))


def compressed_mixing_converges(
    world: World,
    compressor: flexcomm.Compressor,
    recipe: Callable[[int], ScheduleLike],
    rounds: int,
    gamma: float | None,
    distance: float = 1e-4,
) -> None:
    """float32 ends near 1e-6."""
    nodes = world.topology.nodes
    if nodes >= (3 if recipe is directed else 2):
        assert compressed_distance(world, compressor, recipe(nodes), rounds, gamma) < distance


# The cases of Koloskova et al. and Taheri et al., the latter by push-sum.
CONVERGENCES: dict[str, Callable[[World], object]] = {
    f"{compressed_mixing_converges.__name__}, {values}, {recipe.__name__}": partial(
        compressed_mixing_converges, compressor=flexcomm.dense(values=values), recipe=recipe, rounds=80, gamma=gamma
    )
    for values, gamma in (("sign2", 0.4), ("int8", 1.0))
    for recipe in (gossip.fixed_ring, gossip.complete, gossip.static_exponential)
}
CONVERGENCES |= {
    f"{compressed_mixing_converges.__name__}, {name}": partial(
        compressed_mixing_converges, compressor=compressor, recipe=recipe, rounds=rounds, gamma=gamma, distance=distance
    )
    for name, compressor, recipe, rounds, gamma, distance in (
        ("top_k", flexcomm.top_k(0.1, values="fp32"), gossip.complete, 250, 0.08, 1e-4),
        ("random_k", flexcomm.random_k(0.25), gossip.complete, 120, None, 1e-4),
        ("push-sum int8", flexcomm.dense(values="int8"), directed, 150, 1.0, 1e-4),
        ("push-sum top_k", flexcomm.top_k(0.2, values="fp32"), directed, 500, 0.2, 1e-3),
    )
}


def what_diverges_is_refused(world: World) -> None:
    nodes, x = world.topology.nodes, torch.zeros(4096)
    fixed, residuals = gossip.complete(nodes), MixResiduals()
    sign2 = {"compressor": flexcomm.dense(values="sign2"), "residuals": residuals}
    refused = [
        ({"compressor": flexcomm.top_k(0.1), "gamma": 1.0, "residuals": residuals}, fixed, "gamma=1 diverges"),
        ({"compressor": flexcomm.random_k(0.125), "gamma": 0.2, "residuals": residuals}, fixed, "at most gamma=0.125"),
        ({**sign2, "gamma": 1.0}, fixed, "gamma=1 diverges"),
        ({"residuals": residuals}, fixed, "pass compressor="),
        ({"compressor": flexcomm.top_k(0.1)}, fixed, "without residuals"),
        ({"gamma": 0.0}, fixed, "above 0"),
        ({}, gossip.complete(nodes + 1), f"for {nodes + 1} nodes"),
    ]
    if nodes > 2:
        moving = {"compressor": flexcomm.dense(values="int8"), "residuals": residuals}
        refused.append((moving, gossip.ring(nodes), "changes from step to step"))
    for options, schedule, words in refused:
        with pytest.raises(InvalidArgumentError, match=words):
            flexcomm.mix(x, schedule, 0, world=world, **options)
    for compressor, words in ((flexcomm.sign(), "one magnitude"), (flexcomm.threshold(0.1, None), "any length")):
        with pytest.raises(CompressorError, match=words):
            flexcomm.mix(x, fixed, 0, world=world, compressor=compressor, residuals=residuals)
    for tensors, words in (([x, x.double()], "one dtype"), ([x.int()], "torch.int32")):
        with pytest.raises(InvalidTensorError, match=words):
            flexcomm.mix(tensors, fixed, 0, world=world)


def disagreement_is_an_error_and_changes_nothing(world: World) -> None:
    rank, schedule = world.topology.rank, gossip.complete(world.topology.nodes)
    if world.topology.size == 1:
        return
    with pytest.raises(ConfigMismatchError, match="tensors to be mixed"):
        flexcomm.mix(torch.zeros(8 + rank), schedule, 0, world=world)
    x, residuals, push_sum = torch.ones(9) * rank, MixResiduals(), PushSum()
    before = x.clone()
    if world.topology.nodes > 1:
        int8 = {"compressor": flexcomm.dense(values="int8"), "residuals": residuals}
        for options in ({}, int8, {"push_sum": push_sum}):
            with pytest.raises(ConfigMismatchError, match="step"):
                flexcomm.mix(x, schedule, world.topology.node, world=world, out=x, sharded=True, **options)
    assert torch.equal(x, before)
    assert push_sum.weight == 1.0
    assert all(not kept.any() for kept in residuals.state_dict().values())


def calls_that_ranks_make_differently_are_found(world: World) -> None:
    """Also where both were agreed on before, and differ in length: no payload is received before its header."""
    schedule, node = gossip.complete(world.topology.nodes), world.topology.node
    lengths = (1000, 3000)
    for length in lengths:
        flexcomm.mix(torch.zeros(length), schedule, 0, world=world, sharded=True)
    if world.topology.nodes > 1:
        with pytest.raises(ConfigMismatchError, match="tensors, schedule or settings"):
            flexcomm.mix(torch.zeros(lengths[node > 0]), schedule, 0, world=world, sharded=True)


def empty_tensors_change_nothing_about_the_others(world: World) -> None:
    schedule, residuals = gossip.complete(world.topology.nodes), MixResiduals()
    of_all_ranks = inputs(world, 4, dtype=torch.float32)
    xs = [of_all_ranks[world.topology.rank].clone(), torch.zeros(0, 3)]
    got = flexcomm.mix(xs, schedule, 0, world=world, compressor=flexcomm.dense(), residuals=residuals).tensors
    torch.testing.assert_close(got[0], of_all_ranks.mean(dim=0), rtol=0, atol=1e-5)


def residuals_serve_one_mix_at_a_time(world: World) -> None:
    schedule, residuals = gossip.complete(world.topology.nodes), MixResiduals()
    options = {"world": world, "compressor": flexcomm.dense(values="int8"), "residuals": residuals}
    handle = flexcomm.start_mix(torch.ones(8), schedule, 0, **options)
    with pytest.raises(InvalidArgumentError, match="in use"):
        flexcomm.start_mix(torch.ones(8), schedule, 1, **options)
    handle.cancel()
    assert all(not kept.any() for kept in residuals.state_dict().values())
    handle.cancel()
    later = flexcomm.start_mix(torch.ones(8), schedule, 1, **options)
    with pytest.raises(InvalidArgumentError, match="cancelled"):
        handle.wait()
    with pytest.raises(InvalidArgumentError, match="in use"):
        flexcomm.start_mix(torch.ones(8), schedule, 2, **options)
    later.cancel()
    flexcomm.mix(torch.ones(8), schedule, 1, **options)


def communicators_need_no_common_order(world: World) -> None:
    """Ranks start the mixes of two communicators in opposite orders; of one, that would be a deadlock or an error."""
    schedule, rank = gossip.complete(world.topology.nodes), world.topology.rank
    xs = {name: inputs(world, 50, seed)[rank] for seed, name in enumerate("ab")}
    plain = {name: flexcomm.mix(x, schedule, 0, world=world, communicator=name).tensors for name, x in xs.items()}
    names = "ab" if rank % 2 else "ba"
    handles = {name: flexcomm.start_mix(xs[name], schedule, 1, world=world, communicator=name) for name in names}
    assert all(torch.equal(handle.wait().tensors, plain[name]) for name, handle in handles.items())


def if_one_rank_cannot_send_all_ranks_of_its_node_raise(world: World) -> None:
    schedule, residuals = gossip.complete(world.topology.nodes), MixResiduals()
    x = torch.full((64,), float("nan"))
    if world.topology.size > 1:
        with pytest.raises((NonFiniteError, SyncError)):
            flexcomm.mix(x, schedule, 0, world=world, compressor=flexcomm.dense(values="int8"), residuals=residuals)


def a_handle_can_be_waited_for_again(world: World) -> None:
    handle = flexcomm.start_mix(torch.ones(5), gossip.complete(world.topology.nodes), 0, world=world)
    handle.wait_received()
    first = handle.wait()
    assert handle.wait().tensors is first.tensors
    assert first.tensors.tolist() == [1.0] * 5


def a_mix_that_is_never_waited_for_blocks_no_other(world: World) -> None:
    """Also one that is under way when the world is closed, as this one's is last."""
    for step in range(3):
        flexcomm.start_mix(torch.ones(100_000), gossip.base(world.topology.nodes), step, world=world)
    mixed = flexcomm.mix(torch.ones(3), gossip.base(world.topology.nodes), 3, world=world)
    assert mixed.tensors.tolist() == [1.0] * 3
    flexcomm.start_mix(torch.ones(100_000), gossip.base(world.topology.nodes), 4, world=world)


LAWS: dict[str, Callable[[World], object]] = {
    law.__name__: law
    for law in (
        mixing_is_the_dense_matrix_product,
        dyadic_weights_mix_exactly_in_every_dtype,
        the_distance_is_how_far_this_rank_moved,
        lists_shapes_and_strides_are_kept,
        the_result_may_be_written_over_the_tensors,
        shards_are_mixed_between_nodes_alone,
        mixes_may_be_under_way_beside_all_else,
        all_nodes_of_a_uniform_group_hold_the_same_bits,
        gamma_goes_a_share_of_the_way_between_nodes,
        a_pair_sends_what_it_has_once,
        push_sum_leads_to_the_mean_where_plain_mixing_would_not,
        what_diverges_is_refused,
        disagreement_is_an_error_and_changes_nothing,
        calls_that_ranks_make_differently_are_found,
        empty_tensors_change_nothing_about_the_others,
        residuals_serve_one_mix_at_a_time,
        communicators_need_no_common_order,
        if_one_rank_cannot_send_all_ranks_of_its_node_raise,
        a_handle_can_be_waited_for_again,
        a_mix_that_is_never_waited_for_blocks_no_other,
    )
}
LAWS |= CONVERGENCES


def usual_laws(shape: Shape) -> list[str]:
    """Of the convergences, which take hundreds of rounds, two on three nodes."""
    if shape not in ALWAYS:
        return []
    usual = [name for name in CONVERGENCES if name.endswith((" sign2, fixed_ring", " push-sum int8"))]
    return [name for name in LAWS if name not in CONVERGENCES or (name in usual and shape.nodes > 2)]
