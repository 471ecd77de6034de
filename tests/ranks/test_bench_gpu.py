"""The laws that ``python -m bench gpu`` keeps on devices hold on hosts, too; and what it measures can be measured."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from bench.gpu.laws import LAWS
from bench.gpu.steps import measure_host_reads
from tests.ranks.laws import keep
from tests.ranks.shapes import Shape

if TYPE_CHECKING:
    from flexcomm import World

TWO_NODES = Shape(2, 1)


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, laws in LAWS.items() for number in range(len(laws))]
)
def test_the_law_holds_without_devices(name: str, number: int) -> None:
    keep(LAWS[name][number], TWO_NODES)


def a_step_without_devices_has_no_host_reads(world: World) -> None:
    figure, law = measure_host_reads(world)
    assert (figure.value, law.holds) == (0.0, True)
    assert figure.said == "0 host reads in a step of 4 buckets, over gloo"


def test_buckets_of_a_step_are_counted() -> None:
    keep(partial(a_step_without_devices_has_no_host_reads), TWO_NODES)
