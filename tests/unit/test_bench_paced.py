"""How long a paced operation takes, by a clock that only the link moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

import flexcomm
from bench.paced import Link, PacedTransport, pace
from flexcomm.errors import DeadlineExceededError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

BITS_PER_S = 8000.0
"""A kilobyte a second."""
KILOBYTE = torch.zeros(1000, dtype=torch.uint8)


@dataclass
class Clock:
    """A clock that stands still unless somebody sleeps."""

    now_s: float = 100.0

    def read(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class Arrived:
    """A handle of what arrived at once, or never."""

    arrived: bool = True

    def wait(self) -> None: ...

    def done(self) -> bool:
        return self.arrived


@dataclass
class Instant:
    """A transport of four ranks that moves nothing, at once."""

    name: str = "instant"
    rank: int = 1
    size: int = 4
    timeout_s: float = 60.0
    handle: Arrived = field(default_factory=Arrived)

    # Any: whatever verb it is, it is over.
    def __getattr__(self, _verb: str) -> Callable[..., Any]:
        return lambda *_: self.handle


def paced(clock: Clock, *, sharers: int = 1, **instant: Any) -> PacedTransport:
    return PacedTransport(Instant(**instant), Link(BITS_PER_S, clock.read, clock.sleep), sharers=sharers)


@pytest.mark.parametrize(
    ("start", "seconds"),
    [
        (lambda transport: transport.all_gather(KILOBYTE), 3.0),
        (lambda transport: transport.all_gatherv(KILOBYTE, [500, 1000, 0, 0]), 3.0),
        (lambda transport: transport.all_gatherv(KILOBYTE[:10], [4000, 10, 0, 0]), 4.0),
        (lambda transport: transport.all_reduce(KILOBYTE), 1.5),
        (lambda transport: transport.reduce_scatter(KILOBYTE.view(4, 250)), 0.75),
        (lambda transport: transport.broadcast(KILOBYTE, 0), 1.0),
        (lambda transport: transport.broadcast(KILOBYTE, 1), 1.0),
        (lambda transport: transport.send_recv([(0, KILOBYTE), (2, KILOBYTE)], [(0, KILOBYTE)]), 2.0),
        (lambda transport: transport.send_recv([(1, KILOBYTE)], [(1, KILOBYTE)]), 0.0),
        (lambda transport: transport.barrier(), 0.0),
    ],
)
def test_an_operation_takes_its_bytes_over_the_rate(
    start: Callable[[PacedTransport], flexcomm.transport.Handle[object]], seconds: float
) -> None:
    clock = Clock()
    start(paced(clock)).wait()
    assert clock.now_s == 100.0 + seconds


def test_ranks_of_a_node_share_its_link() -> None:
    clock = Clock()
    paced(clock, sharers=2).all_reduce(KILOBYTE).wait()
    assert clock.now_s == 103.0


def test_time_on_the_link_passes_while_the_rank_computes() -> None:
    clock = Clock()
    handle = paced(clock).all_gather(KILOBYTE)
    clock.sleep(2.0)
    assert not handle.done()
    handle.wait()
    assert (clock.now_s, handle.done()) == (103.0, True)
    overlapped = paced(clock).all_gather(KILOBYTE)
    clock.sleep(3.0)
    assert overlapped.done()
    overlapped.wait()
    assert clock.now_s == 106.0


def test_operations_queue_behind_each_other_whichever_is_waited_for_first() -> None:
    clock = Clock()
    transport = paced(clock)
    first, second = transport.all_gather(KILOBYTE), transport.all_gather(KILOBYTE)
    second.wait()
    assert clock.now_s == 106.0
    assert first.done()
    clock.sleep(10.0)
    # An idle link saves nothing up.
    transport.all_gather(KILOBYTE).wait()
    assert clock.now_s == 119.0


def test_transports_of_one_rank_share_its_link() -> None:
    clock = Clock()
    link = Link(BITS_PER_S, clock.read, clock.sleep)
    one, other = PacedTransport(Instant(), link), PacedTransport(Instant(), link)
    one.all_gather(KILOBYTE)
    other.all_gather(KILOBYTE).wait()
    assert clock.now_s == 106.0


def test_the_two_directions_do_not_wait_for_each_other() -> None:
    clock = Clock()
    transport = paced(clock)
    sent, received = transport.send_recv([(0, KILOBYTE)], []), transport.send_recv([], [(0, KILOBYTE)])
    sent.wait()
    assert clock.now_s == 101.0
    assert received.done()


def test_what_is_through_the_link_but_not_there_is_not_done() -> None:
    clock = Clock()
    handle = paced(clock, handle=Arrived(arrived=False)).barrier()
    assert not handle.done()


def test_no_wait_blocks_longer_than_the_deadline() -> None:
    clock = Clock()
    handle = paced(clock, timeout_s=2.0).all_gather(KILOBYTE)
    with pytest.raises(DeadlineExceededError, match="all_gather over instant paced to"):
        handle.wait()
    assert clock.now_s == 102.0
    handle.wait()
    assert clock.now_s == 103.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_what_is_no_rate_is_refused(rate: float) -> None:
    with flexcomm.connect() as world, pytest.raises(InvalidArgumentError, match="rate_bits_per_s"):
        pace(world, rate_bits_per_s=rate)


def test_a_world_of_one_node_has_no_link() -> None:
    with flexcomm.connect() as world:
        assert pace(world, rate_bits_per_s=1e6) is world
