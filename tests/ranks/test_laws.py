"""A broken law is named with the rank, whether that raised, died or hung, and the next law is kept for itself."""

from __future__ import annotations

import gc
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.ranks.decentralized_laws import Net, made
from tests.ranks.laws import close_pools, keep
from tests.ranks.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import World

TWO = Shape(2, 1)


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


def write_own_process(folder: Path, world: World) -> None:
    (folder / f"{world.topology.rank}-{os.getpid()}").touch()


def leave_an_optimizer_in_a_cycle(folder: Path, world: World) -> None:
    """It has groups of its own, and only a collection ends it: none happens by itself."""
    gc.disable()
    optimizer = made(Net(), world)
    cycle: list[object] = [optimizer]
    cycle.append(cycle)
    (folder / f"{world.topology.rank}-{len(list(Path('/proc/self/task').iterdir()))}").touch()


@pytest.mark.parametrize(
    ("law", "words"), [(raise_on_rank_one, "this rank failed on purpose"), (die_on_rank_one, "SIGKILL")]
)
def test_a_broken_law_is_named_with_the_rank_and_its_end_and_the_next_is_kept(
    law: Callable[[World], object], words: str
) -> None:
    keep(sum_ones, TWO)
    with pytest.raises(AssertionError, match=f"{law.__name__} on 2x1: rank 1 failed first .*(?s:.*){words}"):
        keep(law, TWO)
    keep(know_the_place, TWO)


def test_a_law_that_hangs_ends_and_shows_where() -> None:
    with pytest.raises(AssertionError) as caught:
        keep(hang_on_rank_one, TWO, limit_s=1)
    assert "rank 1 was still here" in str(caught.value)
    assert "in hang_on_rank_one" in str(caught.value)


def test_ranks_are_kept_from_law_to_law_until_they_are_closed(tmp_path: Path) -> None:
    for law in (partial(write_own_process, tmp_path), sum_ones, partial(write_own_process, tmp_path)):
        keep(law, TWO)
    assert len(list(tmp_path.iterdir())) == 2
    close_pools()
    pids = [int(file.name.split("-")[1]) for file in tmp_path.iterdir()]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_law_leaves_no_groups_to_the_next(tmp_path: Path) -> None:
    close_pools()
    for _ in range(3):
        keep(partial(leave_an_optimizer_in_a_cycle, tmp_path), TWO)
    assert len(list(tmp_path.iterdir())) == 2, "every rank has as many threads in every law"
    close_pools()
