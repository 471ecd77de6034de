"""Laws of ranks on devices: streams, memory and groups, of which hosts have nothing. All ranks call them together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import flexcomm
from bench.gpu.laws import make_model
from flexcomm import ConfigMismatchError, World, gossip
from flexcomm.device import switch_stream
from flexcomm.sync.plan import MOST_SPARE
from flexdemo import CompressionState, attach_to_ddp, compression_hook
from tests.ranks.hook_laws import require_replicas
from tests.ranks.sync_laws import shards_are_averaged_over_nodes

if TYPE_CHECKING:
    from collections.abc import Callable

SPARSE = flexcomm.demo(k=4, chunk=16)
SHAPE = (70, 33)


def a_first_round_may_leave_nodes_out(world: World) -> None:
    """In a matching of an odd number of nodes one has nobody to talk to; it is done before the others begin."""
    schedule = gossip.random_matching(world.topology.nodes, seed=3)
    x = numbers_of(world)
    expected = flexcomm.mix(x.cpu(), schedule, 0, world=world).tensors
    got = flexcomm.mix(x, schedule, 0, world=world, communicator="never used before").tensors
    assert torch.equal(got.cpu(), expected)


def more_calls_at_once_than_buffers_are_kept(world: World) -> None:
    """What is not kept is freed, and the caller's next tensors are where it was."""
    schedule, x = gossip.complete(world.topology.nodes), numbers_of(world)
    starts: list[Callable[[], flexcomm.SyncHandle[Tensor] | flexcomm.MixHandle[Tensor]]] = [
        partial(flexcomm.start_sync, x, SPARSE, world=world, names=["x"], step=0),
        partial(flexcomm.start_sync, x, flexcomm.dense(), world=world, names=["x"], step=0),
        partial(flexcomm.start_mix, x, schedule, 0, world=world),
        partial(flexcomm.start_mix, x, schedule, 0, world=world, sharded=True),
    ]
    for start in starts:
        for _ in range(2):
            handles = [start() for _ in range(2 * MOST_SPARE + 1)]
            fill_memory(world)
            results = [handle.wait() for handle in handles]
            del handles
            fill_memory(world)
            assert all(torch.equal(averaged(one), averaged(results[0])) for one in results)


def calls_follow_the_streams_of_their_caller(world: World) -> None:
    """Started on one stream and waited for on another, which it need not wait for again."""
    first, second = (torch.Stream(world.device) for _ in range(2))
    device = torch.get_device_module(world.device)
    schedule, residuals = gossip.complete(world.topology.nodes), flexcomm.Residuals()
    expected = flexcomm.hierarchical_sync(numbers_of(world) + 1, SPARSE, world=world, names=["x"], step=0)
    for _ in range(3):
        with device.stream(first):
            x = numbers_of(world) + 1
            sync = flexcomm.start_sync(x, SPARSE, world=world, names=["x"], step=0, residuals=residuals)
            mix = flexcomm.start_mix(x, schedule, 0, world=world)
        second.wait_stream(first)
        with device.stream(second):
            synced, mixed = sync.wait(), mix.wait().tensors
            out = synced + mixed
        # Tensors of the first stream, as torch has it: averages are allocated when a call is started.
        for one in (x, synced, mixed):
            one.record_stream(second)
    torch.accelerator.current_stream(world.device).wait_stream(second)
    assert bool(out.isfinite().all())
    again = flexcomm.hierarchical_sync(numbers_of(world) + 1, SPARSE, world=world, names=["x"], step=0)
    assert torch.equal(again, expected)


def tensors_may_be_on_another_device_than_the_worlds(world: World) -> None:
    other = torch.device(world.device.type, world.device.index + world.topology.local_size)
    schedule = gossip.complete(world.topology.nodes)
    for _ in range(2):
        x = numbers_of(world)
        for call in (
            partial(flexcomm.hierarchical_sync, compressor=SPARSE, world=world, names=["x"], step=0),
            lambda x: flexcomm.mix(x, schedule, 0, world=world).tensors,
        ):
            expected, there = call(x), call(x.to(other) + 0)
            assert there.device == other
            assert torch.equal((there + 0).cpu(), expected.cpu())


def calls_under_way_are_apart(world: World) -> None:
    """Others wait for one node in every exchange but the first: what that one used must not be written too early."""
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


def the_default_device_may_be_the_ranks_own(world: World) -> None:
    """As ``torch.set_default_device`` has it: what the library makes for the host says so."""
    x, schedule = numbers_of(world), gossip.complete(world.topology.nodes)
    calls = {
        "sync": partial(
            flexcomm.hierarchical_sync, x, flexcomm.top_k(1 / 16), world=world, names=["of this law"], step=0
        ),
        "mix": lambda: flexcomm.mix(x, schedule, 0, world=world, communicator="of this law").tensors,
    }
    for name, call in calls.items():
        with world.device:
            got = call()
        assert torch.equal(got, call()), name


def a_wait_is_for_one_call_alone(world: World) -> None:
    """What the caller enqueued after a call was started need not be done when it has been waited for."""
    x, stream = numbers_of(world), torch.accelerator.current_stream(world.device)
    for _ in range(2):
        handle = flexcomm.start_sync(x, SPARSE, world=world, names=["x"], step=0)
        _ = x + 1
        later = stream.record_event()
        assert not later.query(), "events are not done when they are first asked"
        handle.verify()
        waits = torch.get_device_module(world.device).native.host_waits()
        later.synchronize()
        assert torch.get_device_module(world.device).native.host_waits() == waits + 1
        handle.wait()


def a_mesh_of_devices_carries_exchanges_and_host_tensors(world: World) -> None:
    """Its groups refuse what is on the host, such as settings, and parameters that FSDP keeps there."""
    mesh = DeviceMesh(world.device.type, world.topology.members, mesh_dim_names=("replicate", "shard"))
    with flexcomm.connect_mesh(mesh, timeout_s=60) as meshed:
        for compressor in (SPARSE, flexcomm.threshold(1.0, capacity=None), flexcomm.dense()):
            shards_are_averaged_over_nodes(meshed, compressor)
        with meshed.clone_groups() as spare:
            for leg in (
                meshed.intra,
                meshed.inter,
                meshed.intra_control,
                meshed.inter_control,
                spare.intra,
                spare.inter,
            ):
                assert leg.all_reduce(torch.ones(2)).wait().tolist() == [float(leg.size)] * 2
        if world.topology.nodes > 1:
            with pytest.raises(ConfigMismatchError, match="node: 0 on rank 0; 1 on rank 1"):
                meshed.agree_inter({"node": meshed.topology.node})
        x = numbers_of(world)
        got = flexcomm.hierarchical_sync(x, SPARSE, world=meshed, names=["x"], step=0)
        assert torch.equal(got, flexcomm.hierarchical_sync(x, SPARSE, world=world, names=["x"], step=0))


def ddp_trains_on_a_stream_of_the_callers(world: World) -> None:
    """Both passes are on a side stream, the optimizer is on the default one."""
    own, side = torch.accelerator.current_stream(world.device), torch.Stream(world.device)
    side.wait_stream(own)
    with torch.get_device_module(world.device).stream(side):
        model = DistributedDataParallel(make_model(world), bucket_cap_mb=0.01)
    own.wait_stream(side)
    attach_to_ddp(model, SPARSE, world=world)
    optimizer = torch.optim.SGD(model.parameters(), 0.25)
    for step in range(3):
        draw = torch.Generator().manual_seed(1000 * step + world.topology.rank)
        batch = torch.randn(4, 40, generator=draw).to(world.device)
        optimizer.zero_grad()
        side.wait_stream(own)
        with torch.get_device_module(world.device).stream(side):
            loss = model(batch).square().mean()
        own.wait_stream(side)
        batch.record_stream(side)
        loss.backward()
        optimizer.step()
    require_replicas(world, model, "replicas stay alike")


def a_hooks_future_orders_the_stream_that_waits_for_it(world: World) -> None:
    model = DistributedDataParallel(make_model(world), bucket_cap_mb=0.01)
    state = CompressionState(SPARSE, world)
    futures: list[torch.futures.Future[Tensor]] = []

    def hook(state: CompressionState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        futures.append(compression_hook(state, bucket))
        return futures[-1]

    hook.__annotations__ |= compression_hook.__annotations__
    model.register_comm_hook(state, hook)
    model(torch.ones(4, 40, device=world.device)).square().mean().backward()
    other = torch.Stream(world.device)
    with torch.get_device_module(world.device).stream(other):
        for future in futures:
            future.wait().sum()
    torch.accelerator.current_stream(world.device).wait_stream(other)


def numbers_of(world: World) -> Tensor:
    draw = torch.Generator().manual_seed(world.topology.rank)
    return (torch.randint(-64, 64, SHAPE, generator=draw) / 8).to(world.device)


def averaged(result: Tensor | flexcomm.MixResult[Tensor]) -> Tensor:
    out = result if isinstance(result, Tensor) else result.tensors
    assert isinstance(out, Tensor)
    return out


def fill_memory(world: World) -> None:
    """Write new tensors, as large as those of calls."""
    for numel in (16, 500, 2310, 2310, 4620):
        _ = [torch.full((numel,), 7.0, device=world.device) for _ in range(4)]


LAWS = {
    law.__name__: law
    for law in (
        a_first_round_may_leave_nodes_out,
        more_calls_at_once_than_buffers_are_kept,
        calls_follow_the_streams_of_their_caller,
        tensors_may_be_on_another_device_than_the_worlds,
        the_default_device_may_be_the_ranks_own,
        a_wait_is_for_one_call_alone,
        a_mesh_of_devices_carries_exchanges_and_host_tensors,
        ddp_trains_on_a_stream_of_the_callers,
        a_hooks_future_orders_the_stream_that_waits_for_it,
    )
}

BETWEEN_LAWS = {law.__name__: law for law in (calls_overlap, calls_under_way_are_apart)}
"""Of nodes that are joined through the host, where nothing waits for other ranks before it must."""
