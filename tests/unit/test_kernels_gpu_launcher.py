"""What a device would be given: programs sorted into levels, and chunks shared out among blocks."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flexcomm.kernels import Selection, TensorPlan, ValueCode
from flexcomm.kernels.butterflies import plan_dct, plan_inverse_dct
from flexcomm.kernels.gpu.launcher import plan_chunk_launch, plan_levels, rows_of_step


@pytest.mark.parametrize("length", [1, 2, 7, 12, 20, 64, 140])
def test_steps_of_one_level_can_be_done_in_any_order(length: int) -> None:
    for program in (plan_dct(length), plan_inverse_dct(length)):
        order, bounds = plan_levels(program)
        assert sorted(order.tolist()) == list(range(len(program.steps)))
        for first, last in pairwise(bounds.tolist()):
            rows = [rows_of_step(*program.steps[number].tolist()) for number in order[first:last]]
            written = [row for rows_written, _ in rows for row in rows_written]
            assert len(written) == len(set(written))
            assert not set(written) & {row for _, rows_read in rows for row in rows_read}


def test_chunks_of_64_by_64_fit_the_shared_memory_every_device_has() -> None:
    plan = TensorPlan(70, 65, 64, 64, True, Selection.TOP_K, 32, ValueCode.BF16)
    config = plan_chunk_launch(plan, 256, 48 << 10)
    assert (config.threads, config.workspace_words) == (256, 0)


def test_large_chunks_ask_for_global_memory_within_bounds() -> None:
    plan = TensorPlan(1, 1 << 26, 1, 1 << 20, False, Selection.TOP_K, 1000, ValueCode.BF16)
    config = plan_chunk_launch(plan, 256, 227 << 10)
    assert 0 < config.workspace_words <= 1 << 26
    assert config.shared_nbytes <= 48 << 10
