"""``bench optimizer`` reports what it measured, and ratios of that."""

from __future__ import annotations

import pytest

from bench.optimizer.command import FIGURES, compare, measure_alone

OURS = {"main_cpu_s": 0.1, "all_cpu_s": 0.2, "sent_nbytes": 30.0, "gradients_of_shard": 1.0}
THEIRS = {"main_cpu_s": 0.4, "all_cpu_s": 0.6, "sent_nbytes": 100.0, "gradients_of_shard": 2.0}


def test_a_step_alone_is_compared_with_adamws_and_state_is_counted() -> None:
    adamw, *others = measure_alone([(64, 128), (64,)], steps=2)
    assert (adamw.ratio, adamw.state) == (1.0, 2.0)
    assert len(others) == 9
    for row in others:
        assert row.ratio == pytest.approx(row.step_s / adamw.step_s)
        assert row.state == (2.0 if "AdamW" in row.name else 1.0)


def test_figures_are_ratios_to_the_peer() -> None:
    figures = compare({"FlexDeMo": OURS, "detonation": THEIRS})
    assert figures == {"gradients_of_shard": 1.0, "cpu_of_detonation": 0.25, "bytes_of_detonation": 0.3}
    assert figures.keys() <= FIGURES


def test_without_the_peer_nothing_is_said_of_it() -> None:
    assert compare({"FlexDeMo": OURS}) == {"gradients_of_shard": 1.0}
