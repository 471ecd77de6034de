"""The runtime model against published figures: fitted ones are reproduced, predicted ones are close."""

from __future__ import annotations

import pytest

from flexcomm import InvalidArgumentError
from flexdemo.runtime import (
    Cluster,
    Horizon,
    all_reduce_schedule,
    simulate_all_reduce,
    simulate_decentralized,
)
from tests.slow import slow_but
from tests.unit.published_figures import (
    PUBLISHED,
    Alternating,
    Exponential,
    PublishedRow,
    WorkerLinks,
    find_winners,
    plan_published_workload,
    predict_row,
)

LAST = Horizon(iterations=420, warmup=20)


def label(row: PublishedRow) -> str:
    return f"{row.cluster} {row.gpus}"


@pytest.mark.parametrize("row", slow_but((row for row in PUBLISHED if row.gpus == 32), PUBLISHED), ids=label)
def test_the_model_names_the_published_winner(row: PublishedRow) -> None:
    predicted = predict_row(row).predicted_ms
    assert predicted["all-reduce"] == pytest.approx(row.all_reduce_ms, rel=1e-3)  # bisection
    fastest = min(predicted, key=lambda method: predicted[method])
    assert fastest in find_winners(row.published_ms)
    assert predicted["alternating"] == pytest.approx(row.alternating_ms, rel=0.05)


@pytest.mark.parametrize("row", [row for row in PUBLISHED if "A40" in row.cluster and row.gpus > 8], ids=label)
def test_what_is_predicted_on_slow_ethernet_is_within_five_percent(row: PublishedRow) -> None:
    prediction = predict_row(row)
    assert prediction.fitted == "T"
    assert prediction.predicted_ms["alternating"] == pytest.approx(row.alternating_ms, rel=0.05)


@pytest.mark.parametrize(
    ("sigma", "all_reduce_ms", "complete_ms", "alternating_ms"),
    [(0.0, 106, 100, 100), (0.05, 115, 101, 101), (0.10, 125, 102, 102), (0.20, 144, 107, 106)],
)
def test_stragglers_cost_all_reduce_most(
    sigma: float, all_reduce_ms: float, complete_ms: float, alternating_ms: float
) -> None:
    """32 workers, C = 100 ms, T = 60 ms among all and 50 ms between two nodes."""
    cluster = Cluster(32, WorkerLinks(all_s=0.06, slow_s=0.05, fast_s=0.0, crossing_pairs_s=0.0))
    workload = plan_published_workload(100.0, sigma)
    complete = simulate_decentralized(cluster, workload, all_reduce_schedule(32), horizon=LAST)
    alternating = simulate_decentralized(cluster, workload, Alternating(32, 4), horizon=LAST)
    assert 1e3 * simulate_all_reduce(cluster, workload, LAST).iteration_s == pytest.approx(all_reduce_ms, rel=0.03)
    assert 1e3 * complete.iteration_s == pytest.approx(complete_ms, rel=0.03)
    assert 1e3 * alternating.iteration_s == pytest.approx(alternating_ms, rel=0.03)


def test_aer_gives_every_worker_one_group_and_half_of_the_pairs_the_network() -> None:
    schedule = Alternating(32, 4)
    assert schedule.period == 6
    for step in range(schedule.period):
        groups = schedule.phase(step).groups
        assert sorted(worker for group in groups for worker in group.members) == list(range(32))
        assert sum(len(group.members) == 8 for group in groups) == 2
    joint = [group.members for step in (0, 1) for group in schedule.phase(step).groups if len(group.members) == 8]
    assert len(set(joint)) == 4


def test_two_nodes_alternate_between_inside_and_jointly() -> None:
    schedule = Alternating(8, 4)
    assert [[group.link for group in schedule.phase(step).groups] for step in (0, 1)] == [
        ["one node", "one node"],
        ["two nodes"],
    ]


def test_exponential_pairs_leave_the_node_when_the_hop_does() -> None:
    schedule = Exponential(16, 4)
    links = [{group.link for group in schedule.phase(step).groups} for step in range(schedule.period)]
    assert links == [{"pairs inside"}, {"pairs inside"}, {"pairs that cross"}, {"pairs that cross"}]


def test_methods_within_one_percent_are_a_tie() -> None:
    assert find_winners({"all-reduce": 120.0, "exponential": 101.0, "alternating": 100.0}) == {
        "exponential",
        "alternating",
    }
    assert find_winners({"all-reduce": 120.0, "exponential": 101.1, "alternating": 100.0}) == {"alternating"}


def test_what_the_paper_does_not_have_is_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match="needed a power of two"):
        simulate_decentralized(
            Cluster(12, WorkerLinks(0, 0, 0, 0)), plan_published_workload(1.0, 0.0), Alternating(12, 4)
        )
    with pytest.raises(InvalidArgumentError, match="needed one of all-reduce, two nodes"):
        WorkerLinks(0, 0, 0, 0).tau("gather", 2, 1)
    lonely = PUBLISHED[-1]
    with pytest.raises(InvalidArgumentError, match="has two nodes"):
        predict_row(lonely, (lonely,))
