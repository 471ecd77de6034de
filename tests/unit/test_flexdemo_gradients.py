"""Buckets hold every wanted parameter once, last ones first, and never mix what cannot travel together."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from flexdemo.gradients import Bucket, bucket_parameters
from flexdemo.parameters import Group, names_of


def group(*sizes: int, **settings: object) -> Group:
    return {"params": [Parameter(torch.zeros(size)) for size in sizes], **settings}


def wanted(param: Parameter) -> bool:
    return param.requires_grad


def sizes_of(buckets: list[Bucket]) -> list[list[int]]:
    return [[param.numel() for param in bucket.params] for bucket in buckets]


def test_buckets_are_filled_from_the_last_parameter_on() -> None:
    buckets = bucket_parameters([group(1, 2, 3, 4)], 4 * 6, wanted)
    assert sizes_of(buckets) == [[4], [3, 2, 1]]
    assert [bucket.names for bucket in buckets] == [("3",), ("2", "1", "0")]


def test_a_bucket_holds_one_dtype() -> None:
    mixed = group(1, 2, 3)
    mixed["params"][1] = torch.nn.Parameter(mixed["params"][1].to(torch.bfloat16))
    assert sizes_of(bucket_parameters([mixed], 1 << 20, wanted)) == [[2], [3, 1]]


def test_groups_do_not_mix_and_numbers_count_through_them() -> None:
    buckets = bucket_parameters([group(1, 2), group(3)], 1 << 20, wanted)
    assert sorted((bucket.group, bucket.names) for bucket in buckets) == [(0, ("1", "0")), (1, ("2",))]


def test_what_is_averaged_in_the_node_travels_apart() -> None:
    buckets = bucket_parameters(
        [group(1, node_averaged=True), group(2, node_averaged=False), group(3)], 1 << 20, wanted
    )
    assert {bucket.group: bucket.node_averaged for bucket in buckets} == {0: True, 1: False, 2: False}


def test_what_is_not_wanted_is_left_out() -> None:
    one = group(1, 2)
    one["params"][0].requires_grad_(False)
    assert sizes_of(bucket_parameters([one], 1 << 20, wanted)) == [[2]]
    assert sizes_of(bucket_parameters([one], 1 << 20, lambda _: True)) == [[2, 1]]


def test_parameters_are_called_as_the_user_named_them() -> None:
    assert names_of([group(1, 2), group(3, param_names=["head"])]) == [["0", "1"], ["head"]]
