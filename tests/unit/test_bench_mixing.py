"""``bench mixing``: what is left of processor time once training and communication are taken out."""

from __future__ import annotations

import pytest

from bench.mixing.command import compare
from bench.mixing.rank import Spent, build, flat_buckets, rows_of

SPENT = {
    "AdamW": Spent(0.020, 0.020),
    "sent to peers": Spent(0.050, 0.030),
    "sent to all": Spent(0.060, 0.031),
    "DecentralizedAdam": Spent(0.058, 0.034),
    "decent-dp": Spent(0.100, 0.051),
}


def test_overhead_is_what_sending_the_same_bytes_does_not_cost() -> None:
    rows = rows_of(SPENT)
    assert rows["DecentralizedAdam"]["overhead_s"] == pytest.approx(0.008)
    assert rows["decent-dp"]["overhead_s"] == pytest.approx(0.040)
    assert "overhead_s" not in rows["AdamW"]


def test_figures_compare_with_the_peer() -> None:
    figures = compare(rows_of(SPENT))
    assert figures == {
        "overhead_of_decent_dp": pytest.approx(0.2),
        "main_thread_of_decent_dp": pytest.approx(0.2),
    }


def test_without_the_peer_there_is_nothing_to_compare() -> None:
    assert compare(rows_of({name: one for name, one in SPENT.items() if name != "decent-dp"})) == {}


def test_buckets_hold_the_whole_model() -> None:
    model = build(810)
    buckets = flat_buckets(model)
    assert sum(bucket.numel() for bucket in buckets) == sum(param.numel() for param in model.parameters())
    assert len(buckets) == 2
