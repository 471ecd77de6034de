"""The host waits for a device once a bucket, and for nothing else."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim import SGD

import flexcomm
from bench.gpu.laws import make_model, shard, train
from flexcomm import gossip
from flexdemo import FlexDeMo, attach_to_fsdp
from tests.ranks.shapes import Shape
from tests.stand_in.laws import keep_on_stand_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import World

TENSORS, BUCKETS = 8, 2
WARM_UP = 2
SPARSE = flexcomm.demo(k=4, chunk=16)


def require_reads(world: World, needed: int, what: str, call: Callable[[], object]) -> None:
    """Raise unless the host waits so often in a call, once memory and tables of earlier calls are there."""
    native: Any = torch.get_device_module(world.device).native
    for _ in range(WARM_UP):
        call()
    before = native.host_waits()
    call()
    waits = native.host_waits() - before
    assert waits == needed, f"{what}: the host waited {waits} times for the device, needed {needed}"


def a_bucket_is_read_once(world: World) -> None:
    """Twice, where lengths depend on the data."""
    xs = [torch.ones(17, 48, device=world.device) for _ in range(TENSORS)]
    size = sum(x.nbytes for x in xs[: TENSORS // BUCKETS])
    for compressor, algorithm, reads in (
        (SPARSE, "gather", 1),
        (flexcomm.threshold(0.5, capacity=None), "gatherv", 2),
        (flexcomm.random_k(1 / 16), "reduce", 1),
        (flexcomm.top_k(1 / 16), "two_phase", 1),
        (flexcomm.dense(), "dense", 1),
    ):
        residuals, options = flexcomm.Residuals(), {"algorithm": algorithm, "bucket_bytes": size}
        call = partial(flexcomm.hierarchical_sync, xs, compressor, world=world, residuals=residuals, **options)
        require_reads(world, BUCKETS * reads, f"{BUCKETS} buckets of {compressor} by {algorithm}", call)


def a_mix_is_read_once(world: World) -> None:
    """Twice with push-sum, whose weights are the host's."""
    xs = [torch.ones(40, 30, device=world.device) for _ in range(5)]
    int8, nodes = flexcomm.dense(values="int8"), world.topology.nodes
    residuals, push_sum = flexcomm.MixResiduals(), flexcomm.PushSum()
    for name, schedule, options, reads in (
        ("groups", gossip.complete(nodes), {}, 1),
        ("peers", gossip.fixed_ring(nodes), {}, 1),
        ("changes", gossip.fixed_ring(nodes), {"compressor": int8, "residuals": residuals}, 1),
        ("push-sum", gossip.directed_exponential(nodes), {"push_sum": push_sum}, 2),
    ):
        call = partial(flexcomm.mix, xs, schedule, 0, world=world, **options)
        require_reads(world, reads, name, call)


def a_step_is_read_once_a_bucket(world: World) -> None:
    model = make_model(world)
    optimizer = FlexDeMo(model.named_parameters(), 0.25, compressor=SPARSE, world=world, bucket_bytes=20_000)
    train(model, optimizer, world, range(1))
    before = world.stats()["inter_collectives"]
    optimizer.step()
    buckets = int(world.stats()["inter_collectives"] - before)
    assert buckets > 1
    require_reads(world, buckets, f"a step of {buckets} buckets", optimizer.step)


def a_backward_pass_is_read_once_a_unit(world: World) -> None:
    model = shard(make_model(world), world)
    attach_to_fsdp(model, SPARSE, world=world)
    optimizer, batch = SGD(model.parameters(), 0.25), torch.ones(4, model[0][0].in_features, device=world.device)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    require_reads(world, len(model), "FSDP2's hook", step)


@pytest.mark.parametrize(
    "law",
    [a_bucket_is_read_once, a_mix_is_read_once, a_step_is_read_once_a_bucket, a_backward_pass_is_read_once_a_unit],
    ids=lambda law: law.__name__,
)
def test_the_host_waits_once(law: Callable[[World], None]) -> None:
    keep_on_stand_in(law, Shape(2, 2))
