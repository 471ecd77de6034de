"""The runtime model: its recursions, beside a plain one written here, and what they come to in cases that are known."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from flexcomm import InvalidArgumentError
from flexcomm.gossip import Edge, Group, Phase
from flexdemo.runtime import (
    AlphaBeta,
    Cluster,
    Compression,
    Horizon,
    PhasePlan,
    Straggler,
    Timing,
    Workload,
    all_reduce_schedule,
    choose_algorithm,
    explain_speedup,
    find_break_evens,
    plan_workload,
    sent_nbytes,
    simulate_all_reduce,
    simulate_decentralized,
    simulate_flexdemo,
)
from tests.unit.closed_forms import (
    all_reduce_seconds,
    alternating_lower_bound,
    decentralized_seconds,
    expected_wait,
    most_overlap_gains,
)

if TYPE_CHECKING:
    from flexdemo.runtime import Updates

SHORT = Horizon(iterations=12, warmup=2)
SETTLED = Horizon(iterations=60, warmup=40)
"""After a start without anything under way it takes a while until every exchange is as late as it will be."""
LINKS = AlphaBeta(bytes_per_s=1024.0)


@dataclass(frozen=True)
class Fixed:
    """A schedule of given phases, over and over."""

    nodes: int
    phases: tuple[Phase, ...]

    @property
    def period(self) -> int:
        return len(self.phases)

    def phase(self, step: int) -> Phase:
        return self.phases[step % len(self.phases)]


@dataclass(frozen=True)
class Drawn:
    """A matching drawn anew in every step: a schedule without a period."""

    nodes: int
    period: None = None

    def phase(self, step: int) -> Phase:
        order = list(range(self.nodes))
        random.Random(step).shuffle(order)
        return Phase(tuple(Group(tuple(order[i : i + 2])) for i in range(0, self.nodes, 2)))


def one_peer_exponential(nodes: int) -> Fixed:
    hops = [1 << r for r in range(nodes.bit_length() - 1)]
    return Fixed(nodes, tuple(Phase(tuple(Group((a, a ^ hop)) for a in range(nodes) if a < a ^ hop)) for hop in hops))


def ring(nodes: int) -> Fixed:
    return Fixed(
        nodes,
        tuple(Phase(tuple(Group(((a + p) % nodes, (a + p + 1) % nodes)) for a in range(0, nodes, 2))) for p in (0, 1)),
    )


def load(**changes: object) -> Workload:
    """Two buckets of a second each on ``LINKS``; F = 1, B = 2, o = 0.5 seconds."""
    base = Workload((1024, 1024), forward_s=1.0, backward_s=(1.0, 1.0), optimizer_s=(0.25, 0.25))
    return replace(base, **changes)  # type: ignore[arg-type]


# What is simulated, as plain loops over nodes: the oracle.


def naive_decentralized(
    cluster: Cluster, workload: Workload, schedule: Fixed | Drawn, updates: Updates, horizon: Horizon
) -> list[float]:
    n, buckets = cluster.nodes, len(workload.bucket_nbytes)
    ready, engine = [0.0] * n, [0.0] * n
    arrived = [[-math.inf] * n for _ in range(buckets)]
    finished = []
    for t in range(horizon.iterations):
        factor = workload.draw(n, t, horizon.seed)
        phase = schedule.phase(t)
        whole_backward = sum(workload.backward_s) if updates == "step" else 0.0
        for i in range(n):
            ready[i] += factor[i] * (workload.forward_s + whole_backward)
        for b in range(buckets):
            for i in range(n):
                computed = ready[i] + (factor[i] * workload.backward_s[b] if updates == "backward" else 0.0)
                ready[i] = max(computed, arrived[b][i]) + workload.optimizer_s[b]
            arrived[b] = naive_exchange(cluster, workload, phase, b, ready, engine)
        finished.append(max(ready))
    return finished


def naive_exchange(
    cluster: Cluster, workload: Workload, phase: Phase, b: int, ready: list[float], engine: list[float]
) -> list[float]:
    size, n = workload.bucket_nbytes[b], cluster.nodes
    legs = cluster.intra_legs_s(workload, size)
    free = [max(u, q) for u, q in zip(ready, engine, strict=True)]
    end = [-math.inf] * n
    for group in phase.groups:
        start = max(free[i] for i in group.members)
        for i in group.members:
            end[i] = start + legs + cluster.links.tau("group", len(group.members), size)
    for i in range(n):
        sources = [edge.source for edge in phase.edges if edge.target == i]
        targets = [edge.target for edge in phase.edges if edge.source == i]
        peers = max(len(sources), len(targets))
        if peers:
            end[i] = max(free[j] for j in (i, *sources)) + legs + cluster.links.tau("edges", peers, size)
        elif not any(i in group.members for group in phase.groups) and legs:
            end[i] = free[i] + legs
    for i in range(n):
        engine[i] = max(engine[i], end[i])
    return end


def naive_all_reduce(cluster: Cluster, workload: Workload, horizon: Horizon) -> list[float]:
    now, finished = 0.0, []
    for t in range(horizon.iterations):
        factors = workload.draw(cluster.nodes, t, horizon.seed)
        gradients = [now + f * workload.forward_s for f in factors]
        end = now
        for b, size in enumerate(workload.bucket_nbytes):
            gradients = [g + f * workload.backward_s[b] for g, f in zip(gradients, factors, strict=True)]
            legs = cluster.intra_legs_s(workload, size)
            end = max(*gradients, end) + legs + cluster.links.tau("all-reduce", cluster.nodes, size)
        now = max(end, *gradients) + sum(workload.optimizer_s)
        finished.append(now)
    return finished


def random_case(seed: int) -> tuple[Cluster, Workload, Fixed]:
    draw = random.Random(seed)
    nodes, buckets = draw.randint(2, 7), draw.randint(1, 4)
    seconds = [tuple(draw.uniform(0, 1) for _ in range(buckets)) for _ in range(2)]
    workload = Workload(
        bucket_nbytes=tuple(draw.randint(1, 4096) for _ in range(buckets)),
        forward_s=draw.uniform(0, 1),
        backward_s=seconds[0],
        optimizer_s=seconds[1],
        sigma=draw.choice([0.0, 0.3]),
        slowness=draw.choice([(), tuple(draw.uniform(0.5, 2) for _ in range(nodes))]),
        straggler=draw.choice([Straggler(), Straggler(0.2, 3.0)]),
        sharded=draw.random() >= 0.5,
    )
    phases = tuple(random_phase(draw, nodes) for _ in range(draw.randint(1, 3)))
    links = AlphaBeta(draw.uniform(500, 5000), draw.uniform(0, 0.1), draw.uniform(5000, 9000), 0.01)
    return Cluster(nodes, links, draw.randint(1, 3)), workload, Fixed(nodes, phases)


def random_phase(draw: random.Random, nodes: int) -> Phase:
    """Some nodes in groups of one to three, some of the others joined by directed edges, some silent."""
    order = draw.sample(range(nodes), nodes)
    groups = []
    while order and draw.random() < 0.6:
        size = draw.randint(1, 3)
        groups.append(Group(tuple(order[:size])))
        order = order[size:]
    edges = {Edge(a, b, 0.1) for a in order for b in order if a != b and draw.random() < 0.5}
    return Phase(tuple(groups), tuple(edges))


@pytest.mark.parametrize("updates", ["backward", "step"])
@pytest.mark.parametrize("seed", range(40))
def test_the_recursion_over_arrays_is_the_recursion_over_nodes(seed: int, updates: Updates) -> None:
    cluster, workload, schedule = random_case(seed)
    timing = simulate_decentralized(cluster, workload, schedule, updates=updates, horizon=SHORT)
    # Sums of seconds in another order: rounding only.
    assert timing.finished_s == pytest.approx(
        naive_decentralized(cluster, workload, schedule, updates, SHORT), rel=1e-12
    )


@pytest.mark.parametrize("seed", range(20))
def test_all_reduce_over_the_slowest_is_all_reduce_over_all(seed: int) -> None:
    cluster, workload, _ = random_case(seed)
    timing = simulate_all_reduce(cluster, workload, SHORT)
    assert timing.finished_s == pytest.approx(naive_all_reduce(cluster, workload, SHORT), rel=1e-12)


def test_schedules_without_a_period_are_planned_step_by_step() -> None:
    cluster, workload = Cluster(6, LINKS), load(sigma=0.25)
    timing = simulate_decentralized(cluster, workload, Drawn(6), horizon=SHORT)
    assert timing.finished_s == pytest.approx(
        naive_decentralized(cluster, workload, Drawn(6), "backward", SHORT), rel=1e-12
    )


def test_all_reduce_on_two_nodes_and_two_buckets_by_hand() -> None:
    # Gradients at 2 and 3 s; a bucket crosses once (2 * 1/2) in 1 s: ends at 3 and 4 s; the optimizer takes 0.5 s.
    timing = simulate_all_reduce(Cluster(2, LINKS), load(), SHORT)
    assert timing.finished_s[:3] == (4.5, 9.0, 13.5)
    assert timing.iteration_s == 4.5


def test_all_reduce_that_is_slower_than_the_backward_pass_by_hand() -> None:
    # 3 s a bucket: ends at 2 + 3 = 5 and 8 s.
    assert simulate_all_reduce(Cluster(2, AlphaBeta(1024 / 3)), load(), SHORT).iteration_s == pytest.approx(8.5)


@pytest.mark.parametrize("updates", ["backward", "step"])
@pytest.mark.parametrize(
    "phase", [Phase(), Phase(tuple(Group((i,)) for i in range(4))), Phase((Group((2,)),))], ids=["none", "ones", "one"]
)
def test_without_communication_an_iteration_takes_its_compute_time(phase: Phase, updates: Updates) -> None:
    timing = simulate_decentralized(Cluster(4, LINKS), load(), Fixed(4, (phase,)), updates=updates, horizon=SHORT)
    assert timing.iteration_s == load().compute_s == 3.5


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.75, 2.0, 3.0, 8.0])
@pytest.mark.parametrize("updates", ["backward", "step"])
def test_an_exchange_is_hidden_up_to_a_whole_iteration(seconds: float, updates: Updates) -> None:
    pairs = Fixed(2, (Phase((Group((0, 1)),)),))
    cluster = Cluster(2, AlphaBeta(1024 / seconds))
    timing = simulate_decentralized(cluster, load(), pairs, updates=updates, horizon=SETTLED)
    assert timing.iteration_s == pytest.approx(decentralized_seconds(3.5, 2 * seconds))


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_one_node_has_nobody_to_wait_for(nodes: int) -> None:
    fast = Cluster(nodes, AlphaBeta(math.inf))
    assert simulate_all_reduce(fast, load(), SHORT).iteration_s == 3.5
    assert simulate_flexdemo(fast, load(), Compression(), horizon=SHORT).iteration_s == 3.5
    slow = Cluster(1, AlphaBeta(1e-9))
    assert simulate_all_reduce(slow, load(), SHORT).iteration_s == 3.5
    assert simulate_flexdemo(slow, load(), Compression(), horizon=SHORT).iteration_s == 3.5


def test_a_directed_edge_makes_its_target_wait_and_not_its_source() -> None:
    chain = Fixed(2, (Phase(edges=(Edge(0, 1, 0.5),)),))
    backward = Fixed(2, (Phase(edges=(Edge(1, 0, 0.5),)),))
    cluster, slow_source = Cluster(2, AlphaBeta(math.inf)), load(slowness=(4.0, 1.0))
    plan = PhasePlan(chain.phase(0), cluster, slow_source)
    assert plan.targets.tolist() == [1]
    coupled = simulate_decentralized(cluster, slow_source, chain, horizon=SHORT)
    free = simulate_decentralized(cluster, slow_source, backward, horizon=SHORT)
    assert coupled.iteration_s == free.iteration_s == 12.5
    # When the slow node only receives, the fast one runs ahead: nobody ever waits for a node of slowness 1.
    ahead = simulate_decentralized(cluster, load(slowness=(0.5, 4.0)), Fixed(2, (Phase(edges=(Edge(0, 1, 0.5),)),)))
    assert ahead.iteration_s == pytest.approx(12.5)


def test_a_node_pays_for_each_of_its_peers() -> None:
    star = Fixed(4, (Phase(edges=tuple(Edge(0, i, 0.25) for i in (1, 2, 3))),))
    assert simulate_decentralized(Cluster(4, LINKS), load(), star, horizon=SHORT).iteration_s == pytest.approx(6.0)


def test_intra_node_legs_are_part_of_every_exchange_unless_the_model_is_sharded() -> None:
    cluster = Cluster(2, AlphaBeta(math.inf, intra_bytes_per_s=256.0), ranks_per_node=2)  # 4 s a bucket
    assert simulate_all_reduce(cluster, load(), SHORT).iteration_s == 3.5
    assert simulate_all_reduce(cluster, load(sharded=False), SHORT).iteration_s == 10.5
    pairs = Fixed(2, (Phase((Group((0, 1)),)),))
    assert simulate_decentralized(cluster, load(), pairs, horizon=SHORT).iteration_s == 3.5
    assert simulate_decentralized(cluster, load(sharded=False), pairs, horizon=SHORT).iteration_s == pytest.approx(8.0)
    alone = Fixed(2, (Phase(),))
    assert simulate_decentralized(cluster, load(sharded=False), alone, horizon=SHORT).iteration_s == pytest.approx(8.0)


@pytest.mark.parametrize(
    "schedule", [all_reduce_schedule(8), one_peer_exponential(8), ring(8)], ids=["all", "exp", "ring"]
)
def test_more_bandwidth_never_costs_time(schedule: Fixed) -> None:
    workload = load(sigma=0.2)
    taken = [
        [
            simulate_all_reduce(Cluster(8, AlphaBeta(rate)), workload, SHORT).iteration_s,
            simulate_decentralized(Cluster(8, AlphaBeta(rate)), workload, schedule, horizon=SHORT).iteration_s,
            simulate_flexdemo(Cluster(8, AlphaBeta(rate)), workload, Compression(), horizon=SHORT).iteration_s,
        ]
        for rate in (16.0, 64.0, 256.0, 1024.0, 4096.0, 1e9)
    ]
    for slower, faster in pairwise(taken):
        assert all(a >= b for a, b in zip(slower, faster, strict=True))


def test_a_straggler_delays_all_reduce_by_all_it_loses_and_its_peers_by_what_exceeds_their_slack() -> None:
    cluster, late = Cluster(16, AlphaBeta(math.inf)), load(straggler=Straggler(0.02, 1.0))
    steady_s = late.steady().compute_s
    all_reduce = simulate_all_reduce(cluster, late, Horizon(220, 20)).iteration_s
    gossip = simulate_decentralized(cluster, late, one_peer_exponential(16), horizon=Horizon(220, 20)).iteration_s
    assert steady_s < gossip < all_reduce
    assert simulate_all_reduce(cluster, load(straggler=Straggler(1.0, 1.0)), SHORT).iteration_s == 6.5


def test_draws_depend_on_seed_and_iteration_alone() -> None:
    noisy = load(sigma=0.1, straggler=Straggler(0.5, 1.0))
    assert noisy.draw(5, 3, 1).tolist() == noisy.draw(5, 3, 1).tolist()
    assert noisy.draw(5, 3, 1).tolist() != noisy.draw(5, 4, 1).tolist()
    assert noisy.draw(5, 3, 1).tolist() != noisy.draw(5, 3, 2).tolist()
    assert load().draw(3, 0, 0).tolist() == [1.0, 1.0, 1.0]
    assert load(sigma=0.1).draw(100_000, 0, 0).std() == pytest.approx(0.1, rel=0.02)  # of 100,000 draws
    assert load(sigma=50.0).draw(1000, 0, 0).min() == 0.0


def test_a_thousand_nodes_are_simulated() -> None:
    nodes, horizon = 1024, Horizon(200, 20)
    workload = plan_workload(
        260_000_000, bucket_nbytes=26_000_000, forward_s=0.03, backward_s=0.06, optimizer_s=0.01, sigma=0.05
    )
    cluster = Cluster(nodes, AlphaBeta(3e9, 5e-5))
    gossip = simulate_decentralized(cluster, workload, one_peer_exponential(nodes), horizon=horizon)
    assert len(gossip.finished_s) == 200
    # An exchange takes 87 ms of an iteration of 100 ms: late nodes are waited for, but not by all.
    assert 0.1 < gossip.iteration_s < 0.13 < simulate_all_reduce(cluster, workload, horizon).iteration_s


def test_ten_thousand_nodes_are_simulated() -> None:
    cluster, horizon = Cluster(10_000, AlphaBeta(1024.0)), Horizon(20, 4)
    assert simulate_decentralized(cluster, load(), ring(10_000), horizon=horizon).iteration_s == 3.5


# FlexDeMo


def test_a_payload_is_as_long_as_its_coefficients() -> None:
    half = Compression(k=2048, chunk=64, bits_per_coefficient=32.0)
    assert half.coefficients(16384) == 2048
    assert half.payload_nbytes(16384) == 8192


def test_flexdemo_by_hand() -> None:
    # 256 elements a bucket. Payloads are a quarter of it: 0.25 s from the other node. Encode 0.5 s, decode 0.25 s.
    packed = Compression(
        k=4, chunk=4, bits_per_coefficient=8.0, encode_s_per_element=1 / 512, decode_s_per_element=1 / 2048,
        decode_s_per_coefficient=1 / 4096, averaged_bits_per_coefficient=8.0,
    )  # fmt: skip
    packed = replace(packed, k=16)  # all 256: sent by two nodes, 512 additions are 0.125 s
    cluster = Cluster(2, LINKS)
    assert choose_algorithm(2, packed, 1024) == "gather"
    assert sent_nbytes("gather", 2, packed, 1024) == 256
    # Overlapped: encoded at 2.5 and 4, there at 2.75 and 4.25; decoded and stepped at 4.5, then 5.0.
    assert simulate_flexdemo(cluster, load(), packed, horizon=SHORT).iteration_s == pytest.approx(5.0)
    # Exposed: encoded at 3.5 and 4.0, there at 3.75 and 4.25; decoded and stepped at 4.5, then 5.0.
    exposed = simulate_flexdemo(cluster, load(), packed, overlap=False, horizon=SHORT)
    assert exposed.iteration_s == pytest.approx(5.0)
    # On a link eight times as slow, 2 s: overlapped 4.5 and 6.5, exposed 5.5 and 7.5; decoding the last takes 0.5.
    slow = Cluster(2, AlphaBeta(128.0))
    assert simulate_flexdemo(slow, load(), packed, horizon=SHORT).iteration_s == pytest.approx(7.0)
    assert simulate_flexdemo(slow, load(), packed, overlap=False, horizon=SHORT).iteration_s == pytest.approx(8.0)


def test_ranks_of_a_node_share_the_work() -> None:
    packed = Compression(encode_s_per_element=1 / 256)
    alone = simulate_flexdemo(Cluster(2, AlphaBeta(1e12)), load(), packed, horizon=SHORT).iteration_s
    four = simulate_flexdemo(Cluster(2, AlphaBeta(1e12), 4), load(), packed, horizon=SHORT).iteration_s
    assert alone == pytest.approx(5.5)
    assert four == pytest.approx(4.0)


def test_the_algorithm_between_nodes_follows_from_their_number() -> None:
    packed = Compression(k=32, chunk=64, bits_per_coefficient=25.0)  # 1/164 of the bytes
    algorithms = [choose_algorithm(nodes, packed, 1 << 20) for nodes in (2, 64, 1024, 10_000)]
    assert algorithms == ["gather", "gather", "two_phase", "two_phase"]
    assert choose_algorithm(2, Compression(k=4096, bits_per_coefficient=80.0), 1 << 20) == "dense"
    assert choose_algorithm(1, packed, 1 << 20) == "gather"


# What it means


def test_the_closed_form_of_all_reduce_is_the_simulation_where_nothing_varies() -> None:
    for rate in (64.0, 700.0, 1024.0, 8192.0):
        cluster = Cluster(4, AlphaBeta(rate, 0.125))
        simulated = simulate_all_reduce(cluster, load(), SHORT).iteration_s
        assert all_reduce_seconds(cluster, load()) == pytest.approx(simulated)


def test_the_wait_for_the_slowest_is_of_the_right_size() -> None:
    # sqrt(2 ln n) is a bound that large n come near to: 2.07 sigma beside 2.63 for 32.
    noisy = load(sigma=0.1, optimizer_s=(0.0, 0.0))
    cluster = Cluster(32, AlphaBeta(math.inf))
    waited = simulate_all_reduce(cluster, noisy, Horizon(520, 20)).iteration_s - 3.0
    assert waited == pytest.approx(0.1 * 3.0 * 2.07, rel=0.03)  # of 500 iterations
    assert waited < expected_wait(0.1, 3.0, 32)


def test_alternating_phases_take_at_least_the_bound() -> None:
    for slow_s in (2.0, 4.0, 6.0, 10.0):
        cluster = Cluster(2, AlphaBeta(2048 / slow_s))
        alternating = Fixed(2, (Phase((Group((0, 1)),)), Phase()))
        timing = simulate_decentralized(cluster, load(), alternating, horizon=SHORT)
        assert timing.iteration_s >= alternating_lower_bound(load(), slow_s, 0.0) - 1e-9


def test_overlap_alone_gains_at_most_its_bound() -> None:
    many = plan_workload(100, bucket_nbytes=1, forward_s=1.0, backward_s=2.0, optimizer_s=0.0)
    gains = []
    for rate in (10.0, 20.0, 100 / 3, 40.0, 100.0, 1e5):
        cluster = Cluster(2, AlphaBeta(rate))
        gains.append(explain_speedup(cluster, many, all_reduce_schedule(2), horizon=SETTLED).overlap)
    assert most_overlap_gains(many) == pytest.approx(4 / 3)
    # The first bucket of a hundred must be computed before anything can travel.
    assert max(gains) == pytest.approx(4 / 3 + 0.02 / 3)


@pytest.mark.parametrize("updates", ["backward", "step"])
def test_the_three_factors_multiply_to_the_speedup(updates: Updates) -> None:
    cluster, schedule = Cluster(8, AlphaBeta(700.0, 0.01)), one_peer_exponential(8)
    workload = load(sigma=0.15, straggler=Straggler(0.05, 1.0))
    factors = explain_speedup(cluster, workload, schedule, updates=updates, horizon=SHORT)
    speedup = (
        simulate_all_reduce(cluster, workload, SHORT).iteration_s
        / simulate_decentralized(cluster, workload, schedule, updates=updates, horizon=SHORT).iteration_s
    )
    assert math.prod(vars(factors).values()) == pytest.approx(speedup)
    assert min(factors.overlap, factors.links) > 1


def test_factors_compare_with_all_reduce_in_its_own_buckets() -> None:
    cluster, schedule = Cluster(8, AlphaBeta(700.0, 0.01)), one_peer_exponential(8)
    ours, ddp = (
        plan_workload(4096, bucket_nbytes=size, forward_s=1.0, backward_s=2.0, sigma=0.15) for size in (512, 2048)
    )
    factors = explain_speedup(cluster, ours, schedule, all_reduce_workload=ddp, horizon=SHORT)
    assert math.prod(vars(factors).values()) == pytest.approx(
        simulate_all_reduce(cluster, ddp, SHORT).iteration_s
        / simulate_decentralized(cluster, ours, schedule, horizon=SHORT).iteration_s
    )


def test_each_factor_is_one_where_its_cause_is_absent() -> None:
    endless = Cluster(8, AlphaBeta(math.inf))
    factors = explain_speedup(endless, load(), one_peer_exponential(8), horizon=SHORT)
    assert (factors.overlap, factors.links, factors.variation) == pytest.approx((1.0, 1.0, 1.0))
    assert explain_speedup(endless, load(sigma=0.2), one_peer_exponential(8), horizon=SHORT).variation > 1.05
    assert explain_speedup(Cluster(8, LINKS), load(), all_reduce_schedule(8), horizon=SHORT).links == pytest.approx(1.0)


def test_break_even_is_where_both_take_the_same_time() -> None:
    packed = Compression(encode_s_per_element=1 / 1024)  # half a second of encoding

    def cluster(rate: float) -> Cluster:
        # These buckets are small: a byte stands for 100 kB.
        return Cluster(4, AlphaBeta(rate / 1e5))

    def all_reduce_s(rate: float) -> float:
        return simulate_all_reduce(cluster(rate), load(), SHORT).iteration_s

    def flexdemo_s(rate: float) -> float:
        return simulate_flexdemo(cluster(rate), load(), packed, horizon=SHORT).iteration_s

    (found,) = find_break_evens(flexdemo_s, all_reduce_s)
    assert found.faster_side == "below"
    assert flexdemo_s(found.bytes_per_s) == pytest.approx(all_reduce_s(found.bytes_per_s), rel=1e-3)  # 12 bisections
    assert flexdemo_s(found.bytes_per_s / 2) < all_reduce_s(found.bytes_per_s / 2)
    assert find_break_evens(lambda _: 1.0, lambda _: 2.0) == ()
    assert find_break_evens(lambda _: 2.0, lambda _: 1.0) == ()
    (twice_as_fast,) = find_break_evens(lambda _: 1.0, lambda rate: 1e6 / rate, speedup=2.0)
    assert twice_as_fast.bytes_per_s == pytest.approx(5e5, rel=1e-3)
    (above,) = find_break_evens(lambda rate: 1e6 / rate, lambda _: 1.0)
    assert above.faster_side == "above"
    band = find_break_evens(lambda rate: abs(math.log10(rate) - 8), lambda _: 1.0)
    assert [one.faster_side for one in band] == ["above", "below"]
    assert [one.bytes_per_s for one in band] == pytest.approx([1e7, 1e9], rel=1e-3)


# Errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backward_s": (1.0,)}, "2 buckets, 1 backward times"),
        ({"sigma": -1.0}, "got sigma = -1.0, needed 0.0 or more"),
        ({"forward_s": math.nan}, "got forward_s = nan"),
        ({"slowness": (1.0, -2.0)}, "slowness"),
    ],
)
def test_workloads_that_cannot_be_are_errors(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        load(**changes)


def test_what_does_not_fit_the_cluster_is_an_error() -> None:
    cluster = Cluster(2, LINKS)
    with pytest.raises(InvalidArgumentError, match="a schedule for 4 nodes, needed one for the cluster's 2"):
        simulate_decentralized(cluster, load(), ring(4))
    with pytest.raises(InvalidArgumentError, match="3 factors of slowness for 2 nodes"):
        simulate_all_reduce(cluster, load(slowness=(1.0, 1.0, 1.0)))
    with pytest.raises(InvalidArgumentError, match="names node 2, but there are 2 nodes"):
        simulate_decentralized(cluster, load(), Fixed(2, (Phase((Group((0, 2)),)),)))
    with pytest.raises(InvalidArgumentError, match="needed one of backward, step"):
        simulate_decentralized(cluster, load(), ring(2), updates="never")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="iterations = 5, needed 11"):
        Horizon(5, 10)
    with pytest.raises(InvalidArgumentError, match="probability"):
        Straggler(1.5)


def test_the_mean_is_over_whole_periods() -> None:
    # Iterations of 1 and 3 seconds in turn: any three of them would not come to 2.
    assert Timing((1.0, 4.0, 5.0, 8.0, 9.0, 12.0), warmup=1, period=2).iteration_s == 2.0
    assert Timing((1.0, 4.0), warmup=0, period=4).iteration_s == 2.0
