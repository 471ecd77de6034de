"""What fails on a device leaves what it was at alone, and is rolled back behind it."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import flexcomm
from flexcomm import gossip
from flexcomm.errors import DeadlineExceededError, InvalidArgumentError
from flexcomm.kernels.gpu.kernels import GpuEncoder
from flexcomm.sync import algorithms
from tests.ranks.shapes import Shape
from tests.stand_in.laws import keep_on_stand_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import World

SPARSE = flexcomm.demo(k=4, chunk=16)


def a_start_that_fails_is_rolled_back_behind_it(world: World) -> None:
    """On every rank, in the last of three buckets: the states of the first two are being written then."""
    xs = [torch.randn(16, 48, device=world.device) for _ in range(3)]
    residuals, encoded = flexcomm.Residuals(decay=0.875), []
    sync = partial(flexcomm.hierarchical_sync, xs, SPARSE, world=world, residuals=residuals, bucket_bytes=1)
    sync()
    before = {name: residuals[name].clone() for name in residuals.names()}
    encode = GpuEncoder.encode_

    def fail_at_last(self: GpuEncoder, *args: Any, **options: Any) -> Any:
        encoded.append(self)
        if len(encoded) == len(xs):
            raise torch.OutOfMemoryError("no memory")
        return encode(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuEncoder, "encode_", fail_at_last)
        with pytest.raises(torch.OutOfMemoryError):
            sync()
    for name, state in before.items():
        assert torch.allclose(residuals[name], state, rtol=0, atol=2.0**-18), f"{name} is not what it was"


def a_device_that_is_stuck_is_not_asked_again(world: World) -> None:
    """States that it may still write are nobody else's."""
    native: Any = torch.get_device_module(world.device).native
    x, residuals = torch.randn(16, 48, device=world.device), flexcomm.Residuals(decay=0.875)
    sync = partial(flexcomm.hierarchical_sync, x, SPARSE, world=world, residuals=residuals)
    sync()

    def never(*_: object) -> None:
        raise DeadlineExceededError("the device did not finish")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(algorithms, "synchronize_event", never)
        before = native.host_waits()
        with pytest.raises(DeadlineExceededError):
            sync()
        assert native.host_waits() == before, "the host waited for a device that is stuck"
    with pytest.raises(InvalidArgumentError, match="being synchronised"):
        sync()


def changes_are_mixed_with_nobody(world: World) -> None:
    """One node has no peer, but what its residuals hold must be read all the same."""
    x, residuals = torch.arange(40.0, device=world.device), flexcomm.MixResiduals()
    int8, ring = flexcomm.dense(values="int8"), gossip.fixed_ring(1)
    for step in range(2):
        mixed = flexcomm.mix(x, ring, step, world=world, sharded=True, compressor=int8, residuals=residuals).tensors
        assert torch.equal(mixed.cpu(), x.cpu())


def a_call_is_done_when_comm_threads_are_through(world: World) -> None:
    with flexcomm.connect(inter="gloo") as other:
        handle = flexcomm.start_sync(torch.randn(600, device=world.device), flexcomm.top_k(0.5), world=other)
        while not handle.done():
            os.sched_yield()
        handle.wait()


@pytest.mark.parametrize(
    ("law", "shape"),
    [
        (a_start_that_fails_is_rolled_back_behind_it, Shape(2, 1)),
        (a_device_that_is_stuck_is_not_asked_again, Shape(2, 1)),
        (changes_are_mixed_with_nobody, Shape(1, 1)),
        (changes_are_mixed_with_nobody, Shape(1, 2)),
        (a_call_is_done_when_comm_threads_are_through, Shape(2, 2)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_law_is_kept(law: Callable[[World], None], shape: Shape) -> None:
    keep_on_stand_in(law, shape)
