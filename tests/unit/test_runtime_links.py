"""How long exchanges take: formulas, tables, and what is carried over from one to the other."""

from __future__ import annotations

import math

import pytest

from flexcomm import InvalidArgumentError
from flexdemo.runtime import AlphaBeta, LinkTable, MeasuredLinks

NETWORK = AlphaBeta(bytes_per_s=1e6, latency_s=1e-3, intra_bytes_per_s=1e8, intra_latency_s=1e-5)


@pytest.mark.parametrize(
    ("link", "k", "seconds"),
    [
        ("group", 1, 0.0),
        ("group", 2, 1.001),
        ("group", 4, 1.502),
        ("all-reduce", 1, 0.0),
        ("all-reduce", 2, 1.001),
        ("all-reduce", 8, 1.753),
        ("gather", 1, 0.0),
        ("gather", 5, 4.003),
        ("edges", 0, 0.0),
        ("edges", 1, 1.001),
        ("edges", 3, 3.001),
        ("intra", 1, 0.0),
        ("intra", 4, 0.01502),
    ],
)
def test_formulas_count_crossings_and_rounds(link: str, k: int, seconds: float) -> None:
    assert NETWORK.tau(link, k, 1_000_000) == pytest.approx(seconds)


def table(link: str, k: int, network: AlphaBeta = NETWORK, factor: float = 1.0) -> LinkTable:
    sizes = (1 << 16, 1 << 18, 1 << 20)
    return LinkTable(link, k, sizes, tuple(factor * network.tau(link, k, size) for size in sizes))


def test_tables_are_lines_between_and_beyond_their_sizes() -> None:
    measured = LinkTable("group", 2, (100, 200, 400), (2.0, 3.0, 4.0))
    assert [measured.at(size) for size in (100, 150, 200, 300, 400, 800)] == [2.0, 2.5, 3.0, 3.5, 4.0, 6.0]
    assert measured.at(50) == 1.5
    assert measured.at(0) == 1.0
    assert LinkTable("group", 2, (100,), (2.0,)).at(300) == 6.0
    # Noise can make a larger message look faster; a line that falls would end below zero.
    assert LinkTable("group", 2, (100, 200), (2.0, 1.0)).at(1000) == 2.0


def test_the_fit_returns_the_formula_that_made_the_tables() -> None:
    fitted = MeasuredLinks((table("group", 2), table("all-reduce", 4), table("gather", 4), table("intra", 2))).fitted
    assert fitted.bytes_per_s == pytest.approx(1e6)
    assert fitted.latency_s == pytest.approx(1e-3)
    assert fitted.intra_bytes_per_s == pytest.approx(1e8)
    assert fitted.intra_latency_s == pytest.approx(1e-5)
    assert MeasuredLinks((LinkTable("group", 2, (1000,), (0.001,)),)).fitted == AlphaBeta(1e6)


def test_measured_times_are_used_as_they_are() -> None:
    links = MeasuredLinks((table("group", 2), table("all-reduce", 4, factor=3.0)))
    assert links.tau("group", 2, 1 << 18) == pytest.approx(NETWORK.tau("group", 2, 1 << 18))
    assert links.tau("all-reduce", 4, 1 << 18) == pytest.approx(3 * NETWORK.tau("all-reduce", 4, 1 << 18))
    assert links.tau("group", 1, 1 << 18) == 0.0


def test_what_was_not_measured_is_carried_over_by_the_formula() -> None:
    links = MeasuredLinks((table("group", 2), table("all-reduce", 4)))
    for link, k in (("all-reduce", 64), ("group", 4), ("group", 16), ("edges", 1), ("edges", 5), ("gather", 3)):
        assert links.tau(link, k, 1 << 18) == pytest.approx(NETWORK.tau(link, k, 1 << 18), rel=1e-6), link
    assert links.tau("intra", 4, 1 << 18) == 0.0


def test_what_no_table_resembles_takes_the_nearest_kind() -> None:
    # Measured sums took twice what the formula says, so swaps are expected to: else one method would look better.
    sums = MeasuredLinks((table("all-reduce", 4), table("gather", 4)))
    slow_sums = MeasuredLinks((table("all-reduce", 4, factor=2.0), table("gather", 4, factor=2.0)))
    assert slow_sums.tau("group", 2, 1 << 18) == pytest.approx(2 * sums.tau("group", 2, 1 << 18))
    only_swaps = MeasuredLinks((table("group", 2),))
    assert only_swaps.tau("all-reduce", 8, 1 << 18) == pytest.approx(NETWORK.tau("all-reduce", 8, 1 << 18))


def test_another_bandwidth_changes_the_wire_and_not_the_work() -> None:
    # Both tables lie on one line, so the fit is exact for their mean: swaps at 2 s, gathers at 1 s per megabyte.
    links = MeasuredLinks((LinkTable("group", 2, (10**6,), (2.0,)), LinkTable("gather", 2, (10**6,), (1.0,))))
    fitted_s = links.fitted.tau("group", 2, 10**6)
    assert 1.0 < fitted_s < 2.0
    rate = links.fitted.bytes_per_s
    assert links.at_bandwidth(rate).tau("group", 2, 10**6) == pytest.approx(2.0)
    # Faster: everything shrinks. Slower: what exceeds the formula stays.
    assert links.at_bandwidth(4 * rate).tau("group", 2, 10**6) == pytest.approx(0.5)
    assert links.at_bandwidth(rate / 4).tau("group", 2, 10**6) == pytest.approx(2.0 + 3 * fitted_s)
    assert links.at_bandwidth(rate / 4).tau("gather", 2, 10**6) == pytest.approx(4.0)
    assert NETWORK.at_bandwidth(2e6).tau("group", 2, 10**6) == pytest.approx(0.501)


def test_tables_that_cannot_be_are_errors() -> None:
    with pytest.raises(InvalidArgumentError, match="needed one of group, edges"):
        LinkTable("pigeon", 2, (1,), (1.0,))
    with pytest.raises(InvalidArgumentError, match="1 sizes and 2 times"):
        LinkTable("group", 2, (1,), (1.0, 2.0))
    with pytest.raises(InvalidArgumentError, match="ascending order"):
        LinkTable("group", 2, (2, 1), (1.0, 2.0))
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InvalidArgumentError, match="needed more than 0"):
            LinkTable("group", 2, (1,), (seconds,))
    with pytest.raises(InvalidArgumentError, match="Measure on at least two nodes"):
        MeasuredLinks((table("intra", 2),))
    with pytest.raises(InvalidArgumentError, match="got bytes_per_s = 0"):
        AlphaBeta(0)
    with pytest.raises(InvalidArgumentError, match="needed one of group"):
        NETWORK.tau("pigeon", 2, 1)
