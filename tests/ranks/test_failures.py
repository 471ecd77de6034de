"""A rank that raises, dies or stalls becomes a named error on every other rank, within the deadline."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import flexcomm
from flexcomm.errors import DeadlineExceededError, PeerLostError
from tests.ranks.processes import observe_ranks, run_ranks

DEADLINE_S = 4.0


def lose_rank_one(how: str) -> str:
    world = flexcomm.connect(timeout_s=DEADLINE_S)
    world.intra.barrier().wait()
    if world.topology.rank == 1:
        if how == "raise":
            raise RuntimeError("this rank failed on purpose")
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        for _ in range(3):
            world.intra.all_gather(torch.ones(1000)).wait()
    assert time.monotonic() - start_s < DEADLINE_S + 1
    return str(caught.value)


@pytest.mark.parametrize(("how", "words"), [("raise", "failed on purpose"), ("kill", "SIGKILL")])
def test_survivors_of_a_lost_rank_raise_by_name_within_the_deadline(how: str, words: str) -> None:
    outcomes = observe_ranks(lose_rank_one, 3, how)
    assert words in str(outcomes[1].error)
    for survivor in (outcomes[0], outcomes[2]):
        assert not survivor.failed, survivor.error
        assert "a peer is gone" in survivor.value


def stall_rank_one(verb: str) -> str | None:
    world = flexcomm.connect(timeout_s=1.0)
    world.intra.barrier().wait()
    if world.topology.rank == 1:
        time.sleep(3.0)
        return None
    x = torch.ones(1000)
    with pytest.raises(DeadlineExceededError) as caught:
        if verb == "exchange":
            world.intra.exchange([], [(1, x)]).wait()
        else:
            world.intra.all_gather(x).wait()
    return str(caught.value)


@pytest.mark.parametrize("verb", ["all_gather", "exchange"])
def test_a_stalled_rank_ends_the_wait_of_the_others_at_the_deadline(verb: str) -> None:
    first, _, third = run_ranks(stall_rank_one, 3, verb)
    for text in (first, third):
        assert f"{verb} over gloo" in text
        assert "waited 1 s" in text
        assert "timeout_s" in text
