"""A rank that raises, dies or stalls becomes a named error on every other rank, within the deadline."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import flexcomm
from flexcomm.errors import DeadlineExceededError, PeerLostError
from flexcomm.transport import TorchTransport
from tests.ranks.processes import observe_ranks, run_ranks


def lose_rank_one(how: str) -> str:
    """That it is ``PeerLostError`` says it came before the deadline, which has an error of its own."""
    world = flexcomm.connect(timeout_s=30)
    world.intra.barrier().wait()
    if world.topology.rank == 1:
        if how == "raise":
            raise RuntimeError("this rank failed on purpose")
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        for _ in range(3):
            world.intra.all_gather(torch.ones(1000)).wait()
    return str(caught.value)


@pytest.mark.parametrize(("how", "words"), [("raise", "failed on purpose"), ("kill", "SIGKILL")])
def test_survivors_of_a_lost_rank_raise_by_name_within_the_deadline(how: str, words: str) -> None:
    outcomes = observe_ranks(lose_rank_one, 3, how)
    assert words in str(outcomes[1].error)
    for survivor in (outcomes[0], outcomes[2]):
        assert "a peer is gone" in str(survivor.value), survivor.error


def stall_rank_one(verb: str) -> str | None:
    """Rank 1 stays away until the others have given up on it."""
    world = flexcomm.connect(timeout_s=30)
    impatient = TorchTransport(world.intra._group, "gloo", timeout_s=0.5)  # type: ignore[attr-defined]
    text = None
    if world.topology.rank != 1:
        x = torch.ones(1000)
        with pytest.raises(DeadlineExceededError) as caught:
            if verb == "send_recv":
                impatient.send_recv([], [(1, x)]).wait()
            else:
                impatient.all_gather(x).wait()
        text = str(caught.value)
    world.control.barrier().wait()
    return text


@pytest.mark.parametrize("verb", ["all_gather", "send_recv"])
def test_a_stalled_rank_ends_the_wait_of_the_others_at_the_deadline(verb: str) -> None:
    first, _, third = run_ranks(stall_rank_one, 3, verb)
    for text in (first, third):
        assert f"{verb} over gloo" in text
        assert "waited 0.5 s" in text
        assert "timeout_s" in text
