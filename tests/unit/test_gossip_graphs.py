"""Every recipe keeps the mean, reaches all nodes, and averages as exactly as it says."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pytest

from flexcomm.errors import InvalidArgumentError
from flexcomm.gossip.graphs import (
    alternating,
    alternating_exponential_ring,
    base,
    complete,
    directed_exponential,
    fixed_ring,
    one_peer_exponential,
    random_matching,
    ring,
    static_exponential,
)
from flexcomm.gossip.phase import Edge, Group, Phase, Round, round_of
from flexcomm.gossip.schedule import RandomSchedule, Schedule, from_edges, from_matrix

if TYPE_CHECKING:
    from collections.abc import Callable

    AnySchedule = Schedule | RandomSchedule

NUMBERS = [*range(1, 18), 24, 32, 64]
POWERS = [nodes for nodes in NUMBERS if nodes & (nodes - 1) == 0]
ANY_NUMBER = (
    complete,
    ring,
    fixed_ring,
    static_exponential,
    directed_exponential,
    alternating_exponential_ring,
    base,
    random_matching,
)
EXACT = (complete, one_peer_exponential, alternating_exponential_ring, base)
RECIPES = (*ANY_NUMBER, one_peer_exponential)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def schedules_of(recipe: Callable[[int], AnySchedule]) -> list[AnySchedule]:
    return [recipe(nodes) for nodes in (POWERS if recipe is one_peer_exponential else NUMBERS)]


def matrices(schedule: AnySchedule) -> list[np.ndarray]:
    return [schedule.phase(step).matrix(schedule.nodes) for step in range(schedule.period or 8)]


@every_recipe
def test_rows_and_columns_of_every_phase_sum_to_one(recipe: Callable[[int], AnySchedule]) -> None:
    for schedule in schedules_of(recipe):
        for matrix in matrices(schedule):
            assert matrix.shape == (schedule.nodes, schedule.nodes)
            assert np.all(matrix >= 0), schedule
            assert np.all(np.diag(matrix) > 0), schedule
            assert np.allclose(matrix.sum(axis=0), 1.0, rtol=0, atol=1e-14), schedule
            assert np.allclose(matrix.sum(axis=1), 1.0, rtol=0, atol=1e-14), schedule
            if recipe not in (static_exponential, directed_exponential):
                assert np.array_equal(matrix, matrix.T), schedule
        assert schedule.is_doubly_stochastic, schedule


@every_recipe
def test_a_schedule_has_as_many_nodes_as_were_asked_for(recipe: Callable[[int], AnySchedule]) -> None:
    assert [schedule.nodes for schedule in schedules_of(recipe)] == (
        POWERS if recipe is one_peer_exponential else NUMBERS
    )


@every_recipe
def test_the_mean_stays_to_the_bit_where_weights_are_halves(recipe: Callable[[int], AnySchedule]) -> None:
    for schedule in schedules_of(recipe):
        x = np.arange(schedule.nodes, dtype=np.float64) ** 2 - 7
        total = x.sum()
        for matrix in matrices(schedule):
            if np.array_equal(matrix * 64, np.round(matrix * 64)):
                x = matrix @ x
                assert x.sum() == total, schedule
                x = np.round(x * 64) % 1024  # Few bits, so that the next product is exact, too.
                total = x.sum()


@every_recipe
def test_every_node_has_peers_and_comes_closer_to_the_mean(recipe: Callable[[int], AnySchedule]) -> None:
    for schedule in schedules_of(recipe):
        phases = [schedule.phase(step) for step in range(schedule.period or 64)]
        nodes = range(schedule.nodes)
        assert all(any(not round_of(phase, node).is_idle for phase in phases) for node in nodes) or len(nodes) == 1, (
            schedule
        )
        assert max(phase.most_peers for phase in phases) == schedule.most_peers, schedule
        assert 0.0 <= schedule.contraction < 1.0, schedule
        assert schedule.report().contraction == schedule.contraction, schedule


@every_recipe
def test_a_period_is_exact_if_and_only_if_the_schedule_says_so(recipe: Callable[[int], AnySchedule]) -> None:
    for schedule in schedules_of(recipe):
        nodes = schedule.nodes
        if isinstance(schedule, RandomSchedule):
            assert schedule.is_exact == (nodes <= 2)
            continue
        product = np.eye(nodes)
        for matrix in matrices(schedule):
            product = matrix @ product
        assert schedule.is_exact == bool(np.abs(product - 1 / nodes).max() < 1e-9), schedule
        assert schedule.is_exact == (schedule.contraction == 0.0), schedule
        assert schedule.is_exact or recipe not in EXACT, schedule
        largest = np.linalg.norm(product - 1 / nodes, 2)
        assert schedule.contraction == pytest.approx(0.0 if schedule.is_exact else largest, abs=1e-12), schedule


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_node_has_nothing_to_do(recipe: Callable[[int], AnySchedule]) -> None:
    schedule = recipe(1)
    for step in range(4):
        assert round_of(schedule.phase(step), 0) == Round()
    assert schedule.is_exact
    assert schedule.contraction == 0.0
    assert "averages exactly" in str(schedule.report())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("nodes", [0, -2, 2.0, "4"])
def test_a_number_of_nodes_that_cannot_be_is_refused(recipe: Callable[[object], AnySchedule], nodes: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        recipe(nodes)
    assert recipe.__name__ in str(caught.value)
    assert str(nodes) in str(caught.value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_numpy_counts_nodes_as_python_does(recipe: Callable[[int], AnySchedule]) -> None:
    assert repr(recipe(np.int64(8))) == repr(recipe(8))  # type: ignore[arg-type]


def test_published_contractions_are_met() -> None:
    assert [round(ring(nodes).contraction, 2) for nodes in (8, 16, 32)] == [0.71, 0.92, 0.98]
    assert [round(directed_exponential(nodes).contraction, 2) for nodes in (6, 12)] == [0.22, 0.21]
    assert all(directed_exponential(nodes).is_exact for nodes in POWERS)


@pytest.mark.parametrize("nodes", NUMBERS[2:])
def test_a_ring_takes_every_link_and_leaves_at_most_one_node_alone(nodes: int) -> None:
    schedule = ring(nodes)
    links = {group.members for phase in schedule.phases for group in phase.groups}
    assert links == {tuple(sorted((node, (node + 1) % nodes))) for node in range(nodes)}
    assert schedule.period == 2 + nodes % 2
    assert all(len(phase.groups) == nodes // 2 for phase in schedule.phases)


def test_an_even_ring_alternates_between_neighbours() -> None:
    assert ring(6).phases == (
        Phase((Group((0, 1)), Group((2, 3)), Group((4, 5)))),
        Phase((Group((5, 0)), Group((1, 2)), Group((3, 4)))),
    )
    assert ring(2).period == 1


def test_a_fixed_ring_takes_thirds() -> None:
    assert fixed_ring(5).is_fixed
    assert np.allclose(fixed_ring(5).phase(0).matrix(5)[0], [1 / 3, 1 / 3, 0, 0, 1 / 3], rtol=0, atol=1e-16)
    assert np.array_equal(fixed_ring(2).phase(0).matrix(2), [[0.5, 0.5], [0.5, 0.5]])


@pytest.mark.parametrize("nodes", [nodes for nodes in NUMBERS if nodes not in POWERS])
def test_one_peer_exponential_recommends_others_where_it_cannot_be(nodes: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{nodes} nodes.*base\({nodes}\).*directed_exponential\({nodes}\)"):
        one_peer_exponential(nodes)


def test_one_peer_exponential_pairs_nodes_that_differ_in_one_bit() -> None:
    assert [sorted(group.members for group in phase.groups) for phase in one_peer_exponential(4).phases] == [
        [(0, 1), (2, 3)],
        [(0, 2), (1, 3)],
    ]


def test_a_static_exponential_sends_to_all_powers_of_two() -> None:
    schedule = static_exponential(6)
    assert schedule.is_fixed
    assert round_of(schedule.phase(0), 5) == Round((0, 1, 3), (1, 3, 4), 0.25, (0.25, 0.25, 0.25))


def test_a_directed_exponential_sends_half_to_one() -> None:
    assert [round_of(phase, 5) for phase in directed_exponential(6).phases] == [
        Round((0,), (4,), 0.5, (0.5,)),
        Round((1,), (3,), 0.5, (0.5,)),
        Round((3,), (1,), 0.5, (0.5,)),
    ]


def published_aer(nodes: int, ranks: int) -> list[list[list[int]]]:
    """Groups of ranks, phase by phase, as published: in round r even pairs stay inside first, odd ones join first."""
    own = [list(range(node * ranks, (node + 1) * ranks)) for node in range(nodes)]
    phases: list[list[list[int]]] = []
    for distance in (1 << r for r in range(nodes.bit_length() - 1)):
        halves: tuple[list[list[int]], list[list[int]]] = ([], [])
        pairs = [(node, node ^ distance) for node in range(nodes) if node < node ^ distance]
        for counter, (one, other) in enumerate(pairs):
            halves[counter % 2].extend([own[one], own[other]])
            halves[1 - counter % 2].append(own[one] + own[other])
        phases += halves
    return phases


def rank_matrix(groups: list[list[int]]) -> np.ndarray:
    matrix = np.zeros((sum(map(len, groups)),) * 2)
    for group in groups:
        matrix[np.ix_(group, group)] = 1 / len(group)
    return matrix


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 4), (4, 2), (4, 4), (8, 1), (8, 4)])
def test_alternating_exponential_ring_is_the_published_one_with_the_halves_of_a_round_swapped(
    nodes: int, ranks: int
) -> None:
    schedule = alternating_exponential_ring(nodes)
    published = [rank_matrix(groups) for groups in published_aer(nodes, ranks)]
    inside_a_node = np.full((ranks, ranks), 1 / ranks)
    assert schedule.period == len(published) == 2 * int(math.log2(nodes))
    for number, phase in enumerate(schedule.phases):
        assert np.array_equal(np.kron(phase.matrix(nodes), inside_a_node), published[number ^ 1])


@pytest.mark.parametrize(
    "schedule",
    [one_peer_exponential(8), base(7), base(11, k=2), ring(9), complete(4), directed_exponential(6)],
    ids=lambda schedule: schedule.name,
)
def test_alternating_does_the_same_with_half_of_the_links_at_a_time(schedule: Schedule) -> None:
    halved = alternating(schedule)
    assert halved.period == 2 * schedule.period
    for number, phase in enumerate(schedule.phases):
        even, odd = halved.phases[2 * number], halved.phases[2 * number + 1]
        together = odd.matrix(schedule.nodes) @ even.matrix(schedule.nodes)
        assert np.array_equal(together, phase.matrix(schedule.nodes))
        talking = [{node for node in range(schedule.nodes) if not round_of(half, node).is_idle} for half in (even, odd)]
        assert talking[0].isdisjoint(talking[1])


def test_alternating_counts_talks_by_their_lowest_node() -> None:
    mutual = (Edge(0, 6, 0.25), Edge(6, 0, 0.25), Edge(6, 3, 0.25), Edge(3, 6, 0.25))
    mixed = Phase((Group((1, 2)), Group((4, 5)), Group((7,))), mutual)
    all_nodes = Phase((Group(tuple(range(8))),))
    phases = alternating(Schedule("mixed", 8, (mixed, all_nodes))).phases
    assert phases == (Phase((Group((4, 5)),), mutual), Phase((Group((1, 2)),)), all_nodes, Phase())


@pytest.mark.parametrize("nodes", NUMBERS)
def test_a_random_matching_pairs_all_nodes_but_the_odd_one(nodes: int) -> None:
    for step in range(20):
        paired = list(chain.from_iterable(group.members for group in random_matching(nodes).phase(step).groups))
        assert len(paired) == len(set(paired)) == nodes - nodes % 2
        assert set(paired) <= set(range(nodes))


def test_a_random_matching_is_a_function_of_seed_and_step() -> None:
    schedule = random_matching(16, seed=3)
    drawn = [schedule.phase(step) for step in range(40)]
    np.random.default_rng().random(5)
    assert [random_matching(16, seed=3).phase(step) for step in reversed(range(40))] == drawn[::-1]
    assert len(set(drawn)) == 40
    assert random_matching(16, seed=4).phase(0) != drawn[0]
    assert schedule.phase(np.int64(5)) == drawn[5]  # type: ignore[arg-type]


def test_random_pairs_are_drawn_as_ever() -> None:
    """Ranks of one job, and a job and its restart, may run different versions of numpy."""
    assert [group.members for group in random_matching(7, seed=1).phase(2).groups] == [(0, 4), (1, 6), (2, 5)]


def test_every_pair_is_drawn_about_as_often() -> None:
    schedule, steps = random_matching(6), 1500
    pairs = [group.members for step in range(steps) for group in schedule.phase(step).groups]
    often = [pairs.count((one, other)) for one in range(6) for other in range(one + 1, 6)]
    # Each pair is in a fifth of the steps; six standard deviations of sqrt(1500 * 1/5 * 4/5) = 15.5.
    assert max(abs(count - steps / 5) for count in often) < 93


def test_a_random_matching_is_a_value_without_period() -> None:
    schedule = random_matching(12, seed=5)
    assert schedule == RandomSchedule(12, 5)
    assert hash(schedule) == hash(random_matching(12, seed=5))
    assert schedule.digest == random_matching(12, seed=5).digest
    assert len({random_matching(n, seed=s).digest for n, s in ((12, 5), (12, 6), (13, 5), (1, 25))}) == 4
    assert schedule.period is None
    assert not schedule.is_fixed
    assert str(schedule.report()).startswith(
        "random_matching(12, seed=5): 12 nodes, random phases, at most 1 peer at a time, contraction 0.0"
    )
    assert str(schedule.report()).endswith("in 16 phases")


def test_a_graph_of_the_users_own_mixes_with_metropolis_weights() -> None:
    star = from_edges(4, [(0, 1), (2, 0), (0, 3), (3, 0)], name="star")
    assert np.array_equal(
        star.phase(0).matrix(4),
        [[0.25, 0.25, 0.25, 0.25], [0.25, 0.75, 0, 0], [0.25, 0, 0.75, 0], [0.25, 0, 0, 0.75]],
    )
    assert star.is_fixed
    with pytest.raises(InvalidArgumentError, match=r"in from_edges the value of node 0 never reaches \[2\]"):
        from_edges(3, [(0, 1)])


def test_matrices_of_the_users_own_come_back_as_they_were() -> None:
    first, second = np.array([[0.5, 0, 0.25], [0.5, 0.75, 0], [0, 0.25, 0.75]]), ring(3).phase(0).matrix(3)
    schedule = from_matrix(first, second.astype(np.float32), name="mine")
    assert schedule.nodes == 3
    assert np.array_equal(schedule.phase(0).matrix(3), first)
    assert np.array_equal(schedule.phase(1).matrix(3), second)
    assert from_matrix([[1.0]]).nodes == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), ["shapes []", "at least one"]),
        (([[0.5, 0.5]],), ["(1, 2)", "[nodes, nodes]"]),
        (([[1.0]], np.eye(2)), ["(1, 1), (2, 2)"]),
        (([[0.5, 0.5], [0.25, 0.5]],), ["column 0 of matrix 0", "0.75", "transpose"]),
        (([[1.5, 0.5], [-0.5, 0.5]],), ["from node 0 to node 1", "weight -0.5"]),
        (([[float("nan"), 0.5], [0.5, 0.5]],), ["column 0 of matrix 0", "sums to nan"]),
        (([[0.0, 1.0], [1.0, 0.0]],), ["weight 1.0"]),
    ],
)
def test_matrices_that_cannot_mix_are_refused_by_name(given: tuple[object, ...], words: list[str]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        from_matrix(*given)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ANY_NUMBER)
def test_ten_thousand_nodes_can_be(recipe: Callable[[int], AnySchedule]) -> None:
    schedule = recipe(10_000)
    phase = schedule.phase(3)
    assert schedule.nodes == 10_000
    assert len(schedule.digest) == 32
    assert len(repr(schedule)) < 120
    assert len(round_of(phase, 9_999, reduces=False).sends_to) <= 9_999
    assert schedule.report().contraction is None
