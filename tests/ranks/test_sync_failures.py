"""A rank that stops or dies is an error on the others, and what they hold is complete, or as it was."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import flexcomm
from flexcomm.errors import DeadlineExceededError, PeerLostError
from flexcomm.sync.engine import engine_of
from flexcomm.transport import TorchTransport
from tests.ranks.processes import Outcome, observe_ranks, run_ranks
from tests.ranks.shapes import Shape
from tests.slow import slow_but

if TYPE_CHECKING:
    from flexcomm import Transport, World

LOST = 1
COMPRESSOR = flexcomm.top_k(1 / 4)
PATIENCE_S = 1.0
"""What the others have with a silent rank. Less than it takes to start would be an error of the test."""


def inputs(world: World) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(world.topology.rank)
    return [torch.randn(shape, generator=generator) for shape in ((200, 300), (5000,))]


def start(world: World, residuals: flexcomm.Residuals, step: int) -> flexcomm.SyncHandle[list[torch.Tensor]]:
    """Start a sync of two buckets."""
    return flexcomm.start_sync(
        inputs(world), COMPRESSOR, world=world, residuals=residuals, step=step, bucket_bytes=100_000
    )


def fall_silent(meeting: str) -> str:
    """All but one rank are in a sync; that one reads what they made of it."""
    world = flexcomm.connect(timeout_s=30)
    residuals = flexcomm.Residuals()
    for step in (0, 1):  # Twice: whoever calls for the first time, or after another call, is compared with the others.
        start(world, residuals, step).wait()
    before = copies(residuals)
    lose_patience(world.intra, world.inter)
    pipes = [Path(meeting) / str(rank) for rank in range(world.topology.size) if rank != LOST]
    if world.topology.rank == LOST:
        return "\n".join(pipe.read_text() for pipe in pipes)
    with pytest.raises(DeadlineExceededError) as caught:
        start(world, residuals, 2).wait()
    assert_states(residuals, before)
    (Path(meeting) / str(world.topology.rank)).write_text("given up")
    return str(caught.value)


def lose_patience(*transports: Transport) -> None:
    """From here on, deadlines are short; connecting may take its time. gloo's reduce_scatter asks its group alone."""
    for transport in transports:
        if isinstance(transport, TorchTransport):
            transport.timeout_s = PATIENCE_S
            transport._group.set_timeout(timedelta(seconds=PATIENCE_S))


@pytest.mark.parametrize("shape", slow_but([Shape(2, 2)], [Shape(2, 2), Shape(3, 1)]), ids=str)
def test_a_silent_rank_is_named_by_all_others_with_a_report(shape: Shape, tmp_path: Path) -> None:
    for rank in range(shape.size):
        os.mkfifo(tmp_path / str(rank))
    reports = tmp_path / "reports"
    told = run_ranks(
        fall_silent,
        shape.size,
        str(tmp_path),
        ranks_per_node=shape.ranks_per_node,
        environ={"FLEXCOMM_DUMP_DIR": str(reports)},
    )
    for rank in set(range(shape.size)) - {LOST}:
        assert f"No answer came from rank {LOST}: look there first." in told[rank]
        (path,) = reports.glob(f"flexcomm-rank{rank}-*.json")
        assert str(path) in told[rank]
        report = json.loads(path.read_text())
        assert report["reached"][str(LOST)] is None
        assert report["total"]["syncs"] == 2
        assert [one["step"] for one in report["recent"]] == [0, 1]


def fall_silent_between_mixes(meeting: str) -> str:
    """All but one rank are in a mix; that one reads what they made of it."""
    world = flexcomm.connect(timeout_s=30)
    x, schedule = torch.ones(1000), flexcomm.gossip.complete(world.topology.nodes)
    flexcomm.mix(x, schedule, 0, world=world)
    for driver in engine_of(world).drivers.values():
        lose_patience(*driver.transports.values())
    pipes = [Path(meeting) / str(rank) for rank in range(world.topology.size) if rank != LOST]
    if world.topology.rank == LOST:
        return "\n".join(pipe.read_text() for pipe in pipes)
    handle = flexcomm.start_mix(x, schedule, 1, world=world)
    for _ in range(2):
        with pytest.raises(DeadlineExceededError) as caught:
            handle.wait()
    (Path(meeting) / str(world.topology.rank)).write_text("given up")
    return str(caught.value)


def test_a_rank_that_is_silent_in_a_mix_is_named_with_a_report(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0")
    told = run_ranks(
        fall_silent_between_mixes,
        2,
        str(tmp_path),
        ranks_per_node=1,
        environ={"FLEXCOMM_DUMP_DIR": str(tmp_path / "reports")},
    )
    assert told[0].count(f"No answer came from rank {LOST}: look there first.") == 1
    (path,) = (tmp_path / "reports").glob("flexcomm-rank0-*.json")
    assert str(path) in told[0]


def miss_a_new_call(meeting: str) -> str:
    """All but one rank are in their first call, which ranks compare before data moves."""
    world = flexcomm.connect(timeout_s=PATIENCE_S)
    pipes = [Path(meeting) / str(rank) for rank in range(world.topology.size) if rank != LOST]
    if world.topology.rank == LOST:
        return "\n".join(pipe.read_text() for pipe in pipes)
    with pytest.raises(DeadlineExceededError) as caught:
        start(world, flexcomm.Residuals(), 0)
    (Path(meeting) / str(world.topology.rank)).write_text("given up")
    return str(caught.value)


def test_a_rank_that_misses_a_new_call_is_named_with_a_report(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0")
    told = run_ranks(
        miss_a_new_call, 2, str(tmp_path), ranks_per_node=1, environ={"FLEXCOMM_DUMP_DIR": str(tmp_path / "reports")}
    )
    assert f"No answer came from rank {LOST}: look there first." in told[0]
    (path,) = (tmp_path / "reports").glob("flexcomm-rank0-*.json")
    assert str(path) in told[0]


def lose_a_rank(when: str) -> str:
    """What a survivor has in the end: everything, as in the rehearsal, or an error and nothing changed."""
    world = flexcomm.connect(timeout_s=30)
    rehearsed, residuals = flexcomm.Residuals(), flexcomm.Residuals()
    start(world, rehearsed, 0).wait()
    start(world, residuals, 0).wait()
    expected, before = start(world, rehearsed, 1).wait(), copies(residuals)
    world.control.barrier().wait()
    die_if(world, it_is_time=when == "before")
    try:
        handle = start(world, residuals, 1)
        die_if(world, it_is_time=when == "during")
        outs = handle.wait()
    except (PeerLostError, DeadlineExceededError) as error:
        assert_states(residuals, before)
        return type(error).__name__
    assert all(map(torch.equal, outs, expected))
    assert_states(residuals, copies(rehearsed))
    if when != "after":
        return "complete"
    world.control.barrier().wait()
    die_if(world, it_is_time=True)
    with pytest.raises((PeerLostError, DeadlineExceededError)):
        start(world, residuals, 2).wait()
    assert_states(residuals, copies(rehearsed))
    assert all(map(torch.equal, outs, expected))
    return "complete"


def die_if(world: World, *, it_is_time: bool) -> None:
    if it_is_time and world.topology.rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("shape", slow_but([Shape(2, 2)], [Shape(2, 1), Shape(2, 2)]), ids=str)
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_survivors_of_a_sync_have_all_of_it_or_nothing(when: str, shape: Shape) -> None:
    outcomes = observe_ranks(lose_a_rank, shape.size, when, ranks_per_node=shape.ranks_per_node)
    assert outcomes[LOST].error == "SIGKILL"
    ends = {str(outcome.value) for outcome in outcomes if check_survivor(outcome)}
    assert ends == {"complete"} if when == "after" else ends <= {"PeerLostError", "DeadlineExceededError", "complete"}


def check_survivor(outcome: Outcome) -> bool:
    assert outcome.rank == LOST or not outcome.failed, outcome.error
    return outcome.rank != LOST


def copies(residuals: flexcomm.Residuals) -> dict[str, torch.Tensor]:
    return {name: state.clone() for name, state in residuals.state_dict().items()}


def assert_states(residuals: flexcomm.Residuals, expected: dict[str, torch.Tensor]) -> None:
    states = residuals.state_dict()
    assert list(states) == list(expected)
    assert all(torch.equal(state, expected[name]) for name, state in states.items())
