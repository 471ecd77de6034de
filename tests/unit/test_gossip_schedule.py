"""A schedule is a checked value: what cannot average is refused by name, and equal ones are equal in every process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcomm.errors import InvalidArgumentError
from flexcomm.gossip import Edge, Group, Phase, Round, Schedule, round_of
from flexcomm.gossip.schedule import MOST_NODES, product_of

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
PAIRS_OF_FOUR = (Phase((Group((0, 1)), Group((2, 3)))), Phase((Group((1, 2)), Group((3, 0)))))
# Node 0 sends to two and receives from one: column stochastic only.
LOPSIDED = Schedule(
    "lopsided", 3, (Phase(edges=(Edge(0, 1, 0.25), Edge(0, 2, 0.25), Edge(1, 2, 0.5), Edge(2, 0, 0.5))),)
)


def test_a_group_takes_the_same_of_every_peer() -> None:
    assert np.array_equal(
        Phase((Group((0, 1, 2), self_weight=0.5),)).matrix(4),
        [[0.5, 0.25, 0.25, 0], [0.25, 0.5, 0.25, 0], [0.25, 0.25, 0.5, 0], [0, 0, 0, 1]],
    )


def test_members_without_a_self_weight_count_alike_to_the_bit() -> None:
    group = Group((0, 1, 2))
    assert group.own_weight == group.peer_weight == 1 / 3


def test_a_target_adds_what_its_edges_carry_and_a_source_keeps_what_they_leave() -> None:
    assert np.array_equal(
        LOPSIDED.phase(0).matrix(3),
        [[0.5, 0, 0.5], [0.25, 0.5, 0], [0.25, 0.5, 0.5]],
    )


def test_a_node_finds_its_round_in_a_phase() -> None:
    phase = Phase((Group((5, 4)), Group((6,))), (Edge(2, 0, 0.125), Edge(1, 0, 0.25), Edge(1, 2, 0.25)))
    idle, pair = Round(), (0.5, (0.5,))
    assert [round_of(phase, node) for node in range(7)] == [
        Round((), (1, 2), 1.0, (0.25, 0.125)),
        Round((0, 2), (), 0.5),
        Round((0,), (1,), 0.875, (0.25,)),
        idle,
        Round((5,), (5,), *pair),
        Round((4,), (4,), *pair),
        idle,  # A group of one has no peers.
    ]
    assert phase.most_peers == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Group(()), ["members ()", "at least one"]),
        (lambda: Group((1, 2, 1)), ["1, 1, 2", "each once"]),
        (lambda: Group((-1, 2)), ["-1, 2", "from 0 on"]),
        (lambda: Group((0, 1.5)), ["1.5", "whole number"]),
        (lambda: Group((0, 1), 1.0), ["self_weight 1.0", "between 0 and 1", "1/2"]),
        (lambda: Group((0, 1), 0.0), ["self_weight 0.0", "swap"]),
        (lambda: Group((0, 1), float("nan")), ["self_weight nan"]),
        (lambda: Group((0, 1), "half"), ["'half'", "number"]),
        (lambda: Edge(1, 1, 0.5), ["from node 1 to node 1", "two different nodes"]),
        (lambda: Edge(0, -1, 0.5), ["to node -1", "from 0 on"]),
        (lambda: Edge(0, None, 0.5), ["target", "None"]),
        (lambda: Edge(0, 1, 0.0), ["weight 0.0", "Leave out"]),
        (lambda: Edge(0, 1, 1.0), ["weight 1.0", "between 0 and 1"]),
        (lambda: Edge(0, 1, float("inf")), ["weight inf"]),
        (lambda: Phase((Group((0, 1)), Group((1, 2)))), ["nodes [1]", "two groups", "two phases"]),
        (lambda: Phase((Group((0, 1)),), (Edge(1, 2, 0.5),)), ["nodes [1]", "a group and on an edge"]),
        (lambda: Phase(edges=(Edge(0, 1, 0.5), Edge(0, 1, 0.25))), ["from node 0 to node 1", "0.5 and 0.25"]),
        (
            lambda: Phase(edges=(Edge(0, 1, 0.5), Edge(0, 2, 0.5))),
            ["edges of node 0", "sum to 1", "leaves 0", "less than 1"],
        ),
        (
            lambda: Phase(edges=tuple(Edge(0, n, 0.1) for n in range(1, 11))),
            ["edges of node 0 have weights that sum to 1"],
        ),
        (lambda: Schedule("none", 0, (Phase(),)), ["none", "0 nodes", "at least one"]),
        (lambda: Schedule("half", 2.5, (Phase(),)), ["half", "2.5", "whole number"]),
        (lambda: Schedule("empty", 1, ()), ["empty", "no phases", "Phase()"]),
        (
            lambda: Schedule("far", 2, (Phase((Group((0, 1)),)), Phase((Group((0, 2)),)))),
            ["phase 1", "node 2", "0 to 1"],
        ),
        (lambda: Schedule("idle", 3, (Phase(),)), ["the value of node 0 never reaches [1, 2]"]),
        (
            lambda: Schedule("alone", 3, (Phase((Group((0, 1)), Group((2,)))),)),
            ["the value of node 0 never reaches [2]"],
        ),
        (lambda: Schedule("two", 4, PAIRS_OF_FOUR[:1]), ["the value of node 0 never reaches [2, 3]"]),
        (
            lambda: Schedule("away", 2, (Phase(edges=(Edge(0, 1, 0.5),)),)),
            ["node 0 never receives the values of [1]"],
        ),
        (lambda: Schedule("to", 2, (Phase(edges=(Edge(1, 0, 0.5),)),)), ["the value of node 0 never reaches [1]"]),
        (
            lambda: Schedule("many", 30, (Phase((Group((0, 1)), Group(tuple(range(2, 30))))),)),
            ["[2, 3, 4, 5, 6, 7, ...]"],
        ),
        (lambda: Phase((Group((0, 5)),)).matrix(4), ["4 nodes", "node 5", "at least 6"]),
    ],
)
def test_what_cannot_mix_is_refused_by_name(make: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_steps_repeat_the_phases() -> None:
    schedule = Schedule("pairs", 4, PAIRS_OF_FOUR)
    assert [schedule.phase(step) for step in range(4)] == [*PAIRS_OF_FOUR, *PAIRS_OF_FOUR]
    assert (schedule.period, schedule.is_fixed) == (2, False)


def test_a_schedule_may_rest_for_a_step() -> None:
    resting = Schedule("resting", 2, (Phase(), Phase((Group((0, 1)),))))
    assert resting.is_exact
    assert resting.most_peers == 1


def test_edges_that_return_what_they_take_are_doubly_stochastic() -> None:
    round_trip = Schedule("round", 3, (Phase(edges=tuple(Edge(n, (n + 1) % 3, 0.5) for n in range(3))),))
    mutual = Schedule("mutual", 2, (Phase(edges=(Edge(0, 1, 0.25), Edge(1, 0, 0.25))),))
    pairs = Schedule("pairs", 4, PAIRS_OF_FOUR)
    assert [s.is_doubly_stochastic for s in (pairs, mutual, round_trip, LOPSIDED)] == [True, True, True, False]


def test_contraction_is_the_largest_singular_value_away_from_the_mean() -> None:
    schedule = Schedule("pairs", 4, (*PAIRS_OF_FOUR, Phase((Group((0, 1, 2), 0.75),))))
    product = np.linalg.multi_dot([phase.matrix(4) for phase in reversed(schedule.phases)])
    assert schedule.contraction == pytest.approx(np.linalg.norm(product - 0.25, 2), abs=1e-12)


def test_push_sum_contracts_as_promised_where_rows_do_not_sum_to_one() -> None:
    """With settled weights w, the distance of x/w from the mean, weighted by w, shrinks by the contraction at least."""
    matrix = LOPSIDED.phase(0).matrix(3)
    weight = np.linalg.matrix_power(matrix, 200) @ np.ones(3)
    x = np.array([3.0, -1.0, 0.5]) * weight
    distances = []
    for _ in range(12):
        shown = x / weight
        distances.append(np.sqrt((weight * (shown - x.sum() / 3) ** 2).sum()))
        x = matrix @ x
    ratios = np.array(distances[1:]) / distances[:-1]
    assert 0.0 < LOPSIDED.contraction < 1.0
    assert ratios.max() <= LOPSIDED.contraction + 1e-12
    assert not LOPSIDED.is_exact


def test_push_sum_is_exact_where_all_columns_are_alike() -> None:
    columns = Schedule("alike", 2, (Phase(edges=(Edge(0, 1, 0.25), Edge(1, 0, 0.75))),))
    assert not columns.is_doubly_stochastic
    assert columns.is_exact
    assert columns.contraction == 0.0


@given(st.integers(2, 9), st.randoms(use_true_random=False))
def test_phases_multiply_as_their_matrices_do(nodes: int, random: object) -> None:
    draw = np.random.default_rng(random.randrange(2**32))  # type: ignore[attr-defined]
    order = draw.permutation(nodes).tolist()
    grouped, loose = order[: nodes // 2], order[nodes // 2 :]
    edges = [Edge(a, b, 0.5 / nodes) for a in loose for b in loose if a != b and draw.random() < 0.7]
    phases = [
        Phase((Group(tuple(grouped), 0.3),), tuple(edges)),
        Phase((Group(tuple(order[:1])), Group(tuple(order[1:])))),
    ]
    expected = phases[1].matrix(nodes) @ phases[0].matrix(nodes)
    # Sums in another order than matmul's round differently.
    assert np.allclose(product_of(phases, nodes), expected, rtol=0, atol=1e-14)
    assert np.allclose(expected.sum(axis=0), 1.0, rtol=0, atol=1e-14)


def test_a_matrix_of_too_many_nodes_is_refused_but_reported() -> None:
    large = Schedule("large", MOST_NODES + 1, (Phase((Group(tuple(range(MOST_NODES + 1))),)),))
    with pytest.raises(InvalidArgumentError, match=r"4097 nodes .* 4096 nodes at most"):
        _ = large.contraction
    assert str(large.report()) == (
        "large: 4097 nodes, 1 phase, at most 4096 peers at a time, too many nodes to compute the contraction"
    )


def test_a_schedule_prints_as_one_line() -> None:
    schedule = Schedule("pairs", 4, PAIRS_OF_FOUR)
    assert str(schedule) == "pairs: 4 nodes, 2 phases, at most 1 peer at a time"
    assert str(schedule.report()) == f"{schedule}, averages exactly in 2 phases"
    assert str(LOPSIDED.report()).startswith("lopsided: 3 nodes, 1 phase, at most 2 peers at a time, contraction 0.")
    assert repr(schedule) == f"Schedule('pairs', nodes=4, period=2, digest={schedule.digest})"


def test_order_and_kind_of_number_are_no_difference() -> None:
    one = Schedule("x", 4, (Phase((Group((0, 1), 0.5),), (Edge(2, 3, 0.5), Edge(3, 2, 0.25))), PAIRS_OF_FOUR[1]))
    other = Schedule(
        "x",
        np.int64(4),
        [
            Phase(
                (Group((np.int32(1), 0), np.float32(0.5)),), (Edge(np.int64(3), 2, np.float64(0.25)), Edge(2, 3, 0.5))
            ),
            PAIRS_OF_FOUR[1],
        ],  # type: ignore[arg-type]
    )
    assert one == other
    assert hash(one) == hash(other)
    assert one.digest == other.digest
    assert repr(one) == repr(other)


def test_any_difference_shows_in_the_digest() -> None:
    schedules = [
        Schedule("x", 4, PAIRS_OF_FOUR),
        Schedule("y", 4, PAIRS_OF_FOUR),
        Schedule("x", 4, PAIRS_OF_FOUR[::-1]),
        Schedule("x", 4, (*PAIRS_OF_FOUR, Phase())),
        Schedule("x", 4, (Phase((Group((0, 1), 0.25), Group((2, 3)))), PAIRS_OF_FOUR[1])),
        Schedule("x", 4, (Phase((Group((0, 1)),), (Edge(2, 3, 0.5), Edge(3, 2, 0.5))), PAIRS_OF_FOUR[1])),
    ]
    assert len({schedule.digest for schedule in schedules}) == len(set(schedules)) == len(schedules)


def test_looking_at_a_schedule_leaves_it_equal() -> None:
    looked_at, fresh = Schedule("x", 4, PAIRS_OF_FOUR), Schedule("x", 4, PAIRS_OF_FOUR)
    looked_at.report(), round_of(looked_at.phase(0), 1), hash(looked_at), hash(looked_at.phase(0))
    assert looked_at == fresh
    copied = pickle.loads(pickle.dumps(looked_at))  # noqa: S301  (our own bytes)
    assert copied == fresh
    assert hash(copied.phase(0)) == hash(fresh.phase(0))


def test_the_digest_is_the_same_in_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "from flexcomm.gossip.graphs import alternating_exponential_ring, fixed_ring; "
        "from flexcomm.gossip.graphs import random_matching; "
        "print(repr(alternating_exponential_ring(6)), repr(fixed_ring(5)), "
        "random_matching(9, 4).digest, random_matching(9, 4).phase(7))"
    )
    exec(program)  # noqa: S102
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.check_output(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, text=True
    )
    assert capsys.readouterr().out == other
