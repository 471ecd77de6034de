"""Ranks as real processes, with a time limit; the parent tells which rank failed first, and how.

They are forked from a server that has imported and loaded everything (``tests/ranks/preload.py``), so that a start of
four takes a fraction of a second.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GRACE_S = 10.0
"""How long the other ranks may go on after the first one failed: long enough to see what they make of it."""

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.ranks.preload", "pytest"])

Rank = tuple[Any, Connection]
"""A process (multiprocessing does not name the type of a context's processes) and what its reports come through."""


@dataclass
class Outcome:
    """What became of a rank: what its body returned, the traceback it ended with, or the signal that ended it."""

    rank: int
    ended_s: float
    value: Any = None
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None


def run_ranks(body: Callable[..., Any], size: int, *args: object, **options: Any) -> list[Any]:
    """What ``body(*args)`` returned on each of ``size`` ranks; the first rank that failed fails the test."""
    outcomes = observe_ranks(body, size, *args, **options)
    failures = failures_by_cause(outcomes)
    if failures:
        first = failures[0]
        others = [outcome.rank for outcome in failures[1:]]
        raise AssertionError(f"rank {first.rank} of {size} failed first (then {others}):\n{first.error}")
    return [outcome.value for outcome in outcomes]


def failures_by_cause(outcomes: list[Outcome]) -> list[Outcome]:
    """First come first, but a rank that lost a peer after the peer: on a busy machine we may hear of both at once."""
    failures = [outcome for outcome in outcomes if outcome.failed]
    return sorted(failures, key=lambda outcome: ("PeerLostError" in str(outcome.error), outcome.ended_s))


def observe_ranks(
    body: Callable[..., Any],
    size: int,
    *args: object,
    ranks_per_node: int | None = None,
    environ: Mapping[str, str] | None = None,
    limit_s: float = 60.0,
) -> list[Outcome]:
    """What became of each rank, failed or not. No process is left behind."""
    ranks = start_ranks(report_body, size, body, args, limit_s, ranks_per_node=ranks_per_node, environ=environ)
    try:
        outcomes = collect(ranks, limit_s)
        for outcome in outcomes:
            check_end(outcome, ranks[outcome.rank][0])
        return outcomes
    finally:
        end_ranks(ranks)


def start_ranks(
    target: Callable[..., None],
    size: int,
    *args: object,
    ranks_per_node: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Rank]:
    """Start ``target(pipe, *args)`` on each rank, in the environment that torchrun would give it."""
    port = free_port()
    ranks = []
    for rank in range(size):
        here, there = context.Pipe()
        variables = torchrun_variables(rank, size, ranks_per_node or size, port) | dict(environ or {})
        process = context.Process(target=be_rank, args=(target, variables, there, *args), daemon=True)
        process.start()
        there.close()
        ranks.append((process, here))
    return ranks


def end_ranks(ranks: list[Rank]) -> None:
    for process, pipe in ranks:
        process.kill()
        process.join()
        pipe.close()


def torchrun_variables(rank: int, size: int, ranks_per_node: int, port: int) -> dict[str, str]:
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank % ranks_per_node,
        "LOCAL_WORLD_SIZE": ranks_per_node,
        "GROUP_RANK": rank // ranks_per_node,
        "MASTER_PORT": port,
    }
    names = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test", "GLOO_SOCKET_IFNAME": "lo"}
    return {name: str(number) for name, number in numbers.items()} | names


def be_rank(target: Callable[..., None], variables: dict[str, str], pipe: Connection, *args: object) -> None:
    import torch

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ.update({name: value for name, value in variables.items() if value})
    for name in (name for name, value in variables.items() if not value):
        os.environ.pop(name, None)
    try:
        target(pipe, *args)
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        raise SystemExit(1) from None


def report_body(pipe: Connection, body: Callable[..., Any], args: tuple[object, ...], limit_s: float) -> None:
    faulthandler.dump_traceback_later(max(limit_s - 5, 1), file=sys.__stderr__)
    pipe.send((body(*args), None))


def collect(ranks: list[Rank], limit_s: float) -> list[Outcome]:
    """One report of every rank, or its end; later than the limit, or the grace after a first failure, there is none."""
    outcomes: dict[int, Outcome] = {}
    deadline_s = time.monotonic() + limit_s
    while len(outcomes) < len(ranks) and (left_s := deadline_s - time.monotonic()) > 0:
        pending = {pipe: rank for rank, (_, pipe) in enumerate(ranks) if rank not in outcomes}
        for pipe in wait(list(pending), timeout=left_s):
            rank = pending[pipe]  # type: ignore[index]
            outcomes[rank] = outcome = receive(rank, *ranks[rank])
            if outcome.failed:
                deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
    return [
        outcomes.get(rank) or Outcome(rank, deadline_s, error="did not finish in time") for rank in range(len(ranks))
    ]


def check_end(outcome: Outcome, process: Any) -> None:
    """A rank that returned must also end well: a crash when the interpreter ends is a crash."""
    if not outcome.failed:
        process.join(GRACE_S)
        if process.exitcode != 0:
            outcome.error = f"returned {outcome.value!r}, but then ended with exit code {process.exitcode}"


def receive(rank: int, process: Any, pipe: Connection) -> Outcome:
    now_s = time.monotonic()
    try:
        value, error = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        code = process.exitcode
        return Outcome(rank, now_s, error=signal.Signals(-code).name if code < 0 else f"exit code {code}")
    return Outcome(rank, now_s, value, error)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
