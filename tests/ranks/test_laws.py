"""Each law gets a verdict of its own, and a broken one names the rank, whether it raised, died or hung."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from tests.ranks.laws import Verdicts, judge
from tests.ranks.shapes import Shape

if TYPE_CHECKING:
    from flexcomm import World


def sum_ones(world: World) -> None:
    assert world.control.all_reduce(torch.ones(3)).wait().tolist() == [float(world.topology.size)] * 3


def know_the_place(world: World) -> None:
    topology = world.topology
    assert (topology.nodes, topology.local_size) == (2, 1)


def raise_on_rank_one(world: World) -> None:
    assert world.topology.rank != 1, "this rank failed on purpose"


def die_on_rank_one(world: World) -> None:
    if world.topology.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def hang_on_rank_one(world: World) -> None:
    if world.topology.rank == 1:
        threading.Event().wait()


LAWS = {law.__name__: law for law in (sum_ones, raise_on_rank_one, die_on_rank_one, know_the_place)}


@pytest.fixture(scope="module")
def verdicts() -> Verdicts:
    return judge(LAWS, Shape(2, 1))


@pytest.mark.parametrize("law", ["sum_ones", "know_the_place"])
def test_a_law_before_or_after_broken_ones_is_judged_for_itself(verdicts: Verdicts, law: str) -> None:
    verdicts.check(law)


@pytest.mark.parametrize(
    ("law", "words"), [("raise_on_rank_one", "this rank failed on purpose"), ("die_on_rank_one", "SIGKILL")]
)
def test_a_broken_law_is_named_with_the_rank_and_its_end(verdicts: Verdicts, law: str, words: str) -> None:
    with pytest.raises(AssertionError, match=f"{law} on 2x1: rank 1 failed first .*(?s:.*){words}"):
        verdicts.check(law)


def test_a_law_that_hangs_ends_and_shows_where() -> None:
    """The limit of a second ends a hang; the law that hangs is alone, so that no other has to be as quick."""
    broken = judge({"hang_on_rank_one": hang_on_rank_one}, Shape(2, 1), law_limit_s=1).broken["hang_on_rank_one"]
    assert "rank 1 was still here" in broken
    assert "in hang_on_rank_one" in broken


def test_laws_that_were_not_reached_in_time_are_not_kept() -> None:
    with pytest.raises(AssertionError, match="not reached on 1x1"):
        judge({"sum_ones": sum_ones}, Shape(1, 1), limit_s=0).check("sum_ones")
