"""The tables of selections and value codes: rows that agree with themselves, and no member that passes for another."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from flexcomm import InvalidArgumentError
from flexcomm.codec import plan_buffer
from flexcomm.compress import TensorSpec, demo, dense
from flexcomm.kernels import Selection, TensorPlan, ValueCode, ValueName
from flexcomm.kernels.plan import check_implemented
from flexcomm.kernels.reference.codes import CODES
from flexcomm.kernels.reference.kernels import SELECTIONS

DIGESTS = [
    292034237419708366,
    5156368949763331958,
    6130183468721778486,
    292034237419708366,
    16860751721992755636,
    10893984503389880228,
]
PLAN = TensorPlan(1, 64, 1, 32, False, Selection.TOP_K, 4, ValueCode.BF16)


def test_every_value_code_has_a_name_that_users_pass() -> None:
    assert get_args(ValueName) == (*(code.name.lower() for code in ValueCode), "native")


@pytest.mark.parametrize("code", list(ValueCode), ids=lambda code: code.name)
def test_a_value_codes_row_agrees_with_itself(code: ValueCode) -> None:
    row = code.format
    assert row.scales == 0 or row.sum_dtype is None, "scaled codes cannot be added"
    assert (row.rounding is None) == (row.sum_dtype is None)
    if row.sum_dtype is not None:
        assert (row.bits, ValueCode.of(row.sum_dtype)) == (8 * row.sum_dtype.itemsize, code)
        assert row.rounding == torch.finfo(row.sum_dtype).eps / 2
        infinity = torch.tensor([torch.inf, torch.nan], dtype=row.sum_dtype)
        integers = infinity.view(torch.int32 if row.bits == 32 else torch.int16).int()
        assert bool(((integers & row.nonfinite_mask) == row.nonfinite_mask).all())


@pytest.mark.parametrize("selection", list(Selection), ids=lambda selection: selection.name)
def test_a_selections_row_agrees_with_itself(selection: Selection) -> None:
    rule = selection.rule
    assert rule.sample_key is None or not rule.sends_indices
    assert not rule.variable_count or (rule.sends_indices and not rule.has_independent_chunks)


def test_the_reference_has_every_selection_and_every_value_code() -> None:
    assert (set(SELECTIONS), set(CODES)) == (set(Selection), set(ValueCode))


def test_a_member_that_a_kernel_set_lacks_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"the cpu kernels have no <ValueCode.BF16: 1>, only FP32: add it"):
        check_implemented("cpu", PLAN, Selection, [ValueCode.FP32])
    with pytest.raises(InvalidArgumentError, match=r"the gpu kernels have no <Selection.TOP_K: 1>"):
        check_implemented("gpu", PLAN, [Selection.EVERYTHING], ValueCode)
    check_implemented("reference", PLAN, Selection, ValueCode)


def test_members_compare_and_print_as_their_numbers_and_names() -> None:
    assert (int(ValueCode.INT8), ValueCode(3), ValueCode["INT8"]) == (3, ValueCode.INT8, ValueCode.INT8)
    assert repr(Selection.THRESHOLD) == "<Selection.THRESHOLD: 2>"
    assert len({*Selection}) == len(Selection) == 5


def test_digests_hold_the_names_that_selections_had_in_the_first_version() -> None:
    assert [one.rule.wire_name for one in Selection] == ["EVERYTHING", "LARGEST", "ABOVE", "SHUFFLED", "STRIDED"]


def test_the_digest_is_of_the_text_and_not_of_how_a_plan_prints() -> None:
    """docs/wire.md holds a text of the same form, and its digest."""
    specs = (TensorSpec("w", (300, 200), torch.float32), TensorSpec("b'\"q", (77,), torch.bfloat16))
    digests = [plan_buffer(specs[:count], compressor).digest for compressor in (demo(), dense()) for count in range(3)]
    assert digests == DIGESTS
