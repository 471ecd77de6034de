"""NCCL inside nodes and a host's transport between them: the model's thread enqueues, and comm threads exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import flexcomm
from flexcomm.device import switch_stream
from tests.ranks.shapes import Shape
from tests.stand_in.laws import keep_on_stand_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import World


def calls_under_way_are_apart(world: World) -> None:
    """One node is waited for in every exchange but the first: what that one used must not be written too early."""
    compressors = (flexcomm.threshold(0.5, capacity=None), flexcomm.top_k(1 / 16), flexcomm.dense())
    before = switch_stream(torch.Stream(world.device))
    for step, compressor in enumerate(compressors):
        xs = [torch.full((3000,), 1.0 + number, device=world.device) for number in range(3)]

        def start(x: torch.Tensor) -> flexcomm.SyncHandle[torch.Tensor]:
            return flexcomm.start_sync(x, compressor, world=world, step=step)  # noqa: B023  (called in this turn only)

        start(xs[0]).wait()  # Plans and process groups are made; what it frees is all that the next ones find.
        early = world.topology.node > 0
        handles = [start(x) for x in (xs if early else xs[:1])]
        first = handles[0].wait()
        del handles[0]
        world.control.all_reduce(torch.zeros(1, device="cpu")).wait()
        handles += [] if early else [start(x) for x in xs[1:]]
        for x, out in zip(xs, [first, *[handle.wait() for handle in handles]], strict=True):
            sent = out[out != 0]
            assert torch.equal(sent, x[: sent.numel()]), f"{compressor}: {sent} of {x}"
    switch_stream(before)


def calls_overlap(world: World) -> None:
    """The caller goes on while other nodes have not even started: else this would wait for itself."""
    xs = [torch.full((600,), 1.0 + number, device=world.device) for number in range(4)]
    handles = [flexcomm.start_sync(x, flexcomm.top_k(0.5), world=world) for x in xs[:2]]
    world.control.barrier().wait()
    handles += [flexcomm.start_sync(x, flexcomm.top_k(0.5), world=world) for x in xs[2:]]
    for x, handle in zip(xs, handles, strict=True):
        assert torch.equal(handle.wait()[:300], x[:300])


@dataclass(frozen=True)
class HostBetween:
    """A law of a world whose nodes meet in host memory."""

    law: Callable[[World], object]

    def __call__(self, world: World) -> None:
        with flexcomm.connect(inter="gloo", ranks_per_node=world.topology.local_size) as own:
            self.law(own)


def test_the_caller_goes_on_while_comm_threads_exchange() -> None:
    keep_on_stand_in(HostBetween(calls_overlap), Shape(2, 2))


def test_memory_is_used_anew_when_it_is_free() -> None:
    """With one rank a node, what was received is decoded after the host's last wait."""
    keep_on_stand_in(HostBetween(calls_under_way_are_apart), Shape(2, 1))
