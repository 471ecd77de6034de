"""Lots hold every wanted parameter once, last ones first, and never mix what cannot travel together."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from flexdemo.lots import Lot, plan_lots
from flexdemo.parameters import Group, names_of


def group(*sizes: int, **settings: object) -> Group:
    return {"params": [Parameter(torch.zeros(size)) for size in sizes], **settings}


def wanted(param: Parameter) -> bool:
    return param.requires_grad


def sizes_of(lots: list[Lot]) -> list[list[int]]:
    return [[param.numel() for param in lot.params] for lot in lots]


def test_lots_are_filled_from_the_last_parameter_on() -> None:
    lots = plan_lots([group(1, 2, 3, 4)], 4 * 6, wanted)
    assert sizes_of(lots) == [[4, 3], [2, 1]]
    assert [lot.names for lot in lots] == [("3", "2"), ("1", "0")]


def test_groups_do_not_mix_and_numbers_count_through_them() -> None:
    lots = plan_lots([group(1, 2), group(3)], 1 << 20, wanted)
    assert sorted((lot.group, lot.names) for lot in lots) == [(0, ("1", "0")), (1, ("2",))]


def test_what_is_averaged_in_the_node_travels_apart() -> None:
    lots = plan_lots([group(1, node_averaged=True), group(2, node_averaged=False), group(3)], 1 << 20, wanted)
    assert {lot.group: lot.averaged for lot in lots} == {0: True, 1: False, 2: False}


def test_what_is_not_wanted_is_left_out() -> None:
    one = group(1, 2)
    one["params"][0].requires_grad_(False)
    assert sizes_of(plan_lots([one], 1 << 20, wanted)) == [[2]]
    assert sizes_of(plan_lots([one], 1 << 20, lambda _: True)) == [[2, 1]]


def test_parameters_are_called_as_the_user_named_them() -> None:
    assert names_of([group(1, 2), group(3, param_names=["head"])]) == [["0", "1"], ["head"]]
