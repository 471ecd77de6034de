"""The Base-(k+1) graph is exact for every number of nodes, with few peers and few phases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexcomm.errors import InvalidArgumentError
from flexcomm.gossip.graphs import base
from flexcomm.gossip.phase import Edge, Group, Phase


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_period_averages_any_number_of_nodes(k: int) -> None:
    for nodes in range(1, 65):
        schedule = base(nodes, k)
        product = np.eye(nodes)
        for phase in schedule.phases:
            product = phase.matrix(nodes) @ product
            assert np.allclose(phase.matrix(nodes), phase.matrix(nodes).T, rtol=0, atol=1e-12), nodes
        assert np.abs(product - 1 / nodes).max() < 1e-12, nodes
        assert schedule.is_exact, nodes


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_no_node_has_more_than_k_peers_at_a_time(k: int) -> None:
    assert all(base(nodes, k).most_peers <= k for nodes in range(1, 65))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 9])
def test_a_period_is_logarithmic(k: int) -> None:
    for nodes in (*range(2, 65), 97, 210, 997, 1000, 1023):
        assert base(nodes, k).period <= 2 * math.log(nodes, k + 1) + 2, nodes


def test_as_many_phases_as_factors_where_primes_are_small() -> None:
    assert [base(nodes).period for nodes in (2, 4, 8, 64, 1024)] == [1, 2, 3, 6, 10]
    assert [base(nodes, k=2).period for nodes in (3, 6, 9, 12, 81)] == [1, 2, 2, 3, 4]
    assert base(24, k=5).period == 2
    # 6 * 6 * 6; to begin with the largest factor, 8, would leave 3 * 3 * 3.
    assert base(216, k=7).period == 3
    assert base(7, k=6).phases == (Phase((Group(tuple(range(7))),)),)


def test_splitting_off_factors_shortens_where_it_can() -> None:
    # Six nodes as two times three take four phases; as 4 + 2 they would take five.
    assert [base(nodes).period for nodes in (3, 5, 6, 7, 12)] == [3, 5, 4, 5, 5]


def test_three_nodes_average_as_published() -> None:
    """Two average; one of them gives the third so much that it has the mean, and makes up for it with the other."""
    assert base(3).phases == (
        Phase((Group((0, 1)),)),
        Phase(edges=(Edge(0, 2, 2 / 3), Edge(2, 0, 2 / 3))),
        Phase((Group((0, 1)),)),
    )


@pytest.mark.parametrize(("nodes", "k", "words"), [(0, 1, "0 nodes"), (4, 0, "0 peers"), (4, 1.5, "1.5")])
def test_impossible_numbers_are_refused(nodes: int, k: int, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"base.*{words}|{words}.*"):
        base(nodes, k)
