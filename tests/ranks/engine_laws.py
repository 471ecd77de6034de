"""Laws of the engine: what comm threads do depends on the order of calls alone, and never blocks the caller."""

from __future__ import annotations

import hashlib
import random
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import flexcomm
from flexcomm import device
from flexcomm.sync.engine import engine_of
from tests.ranks.sync_laws import require_same_everywhere

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from flexcomm import Handle, Transport, World

GATE_S = 20.0
MOST_DELAY_S = 0.004
INTERRUPTED_S = 0.2


@dataclass
class WaitingHandle:
    """A handle that does something before it waits."""

    handle: Handle[Any]
    before: Callable[[], None]

    def wait(self) -> Any:
        self.before()
        return self.handle.wait()

    def done(self) -> bool:
        return self.handle.done()


@dataclass
class ObservedTransport:
    """A transport that notes which collectives are started, and lets others interfere with their timing."""

    transport: Transport
    before_start: Callable[[str], None] = lambda _: None
    before_wait: Callable[[str], None] = lambda _: None
    started: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.transport, name)
        if name not in ("all_gather", "all_gatherv", "all_reduce", "reduce_scatter", "send_recv"):
            return found

        def start(*args: Any) -> WaitingHandle:
            self.before_start(name)
            # The output's: with all_gatherv, inputs differ in length.
            *_, last = [tuple(one.shape) for one in args if isinstance(one, torch.Tensor)] or [()]
            self.started.append(f"{name} {last}")
            return WaitingHandle(found(*args), lambda: self.before_wait(name))

        return start


@dataclass
class Observed:
    """A world whose transports, and clones of them, are observed."""

    world: World
    groups: dict[str, ObservedTransport]


def observe(world: World, observed: Callable[[Transport], ObservedTransport]) -> Observed:
    groups = {"intra": observed(world.intra), "inter": observed(world.inter)}

    def clone() -> Any:
        number, cloned = len(groups) // 2, world.clone_groups()
        groups[f"intra {number}"], groups[f"inter {number}"] = observed(cloned.intra), observed(cloned.inter)
        return groups[f"intra {number}"], groups[f"inter {number}"]

    intra: Any = groups["intra"]
    inter: Any = groups["inter"]
    return Observed(replace(world, intra=intra, inter=inter, _clone=clone, _closers=ExitStack()), groups)


def digest_of(lines: list[str]) -> Tensor:
    return torch.frombuffer(
        bytearray(hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()), dtype=torch.uint8
    )


def collectives_start_in_one_order_whatever_the_timing(world: World) -> None:
    """Every rank sleeps at random before it starts or waits for anything; each group sees one order all the same."""
    chance = random.Random(world.topology.rank)

    def sleep(_: str) -> None:
        time.sleep(chance.uniform(0.0, MOST_DELAY_S))

    observed = observe(world, lambda transport: ObservedTransport(transport, sleep, sleep))
    compressors = (
        flexcomm.demo(k=4),
        flexcomm.threshold(1.0, capacity=None),
        flexcomm.random_k(0.25),
        flexcomm.top_k(0.5),
        flexcomm.dense(),
    )
    outs, schedule = [], flexcomm.gossip.complete(world.topology.nodes)
    for step in range(3):
        handles = []
        for number, compressor in enumerate(compressors):
            algorithm = "two_phase" if number == 3 else "auto"
            generator = torch.Generator().manual_seed(world.topology.rank + 7 * number)
            xs = [torch.randn(40 + number, 64, generator=generator), torch.randn(100 * number, generator=generator)]
            verb = flexcomm.start_exchange if number == 2 else flexcomm.start_sync
            handles.append(
                verb(xs, compressor, world=observed.world, step=step, bucket_bytes=8192, algorithm=algorithm)
            )
            handles.append(flexcomm.start_mix(xs, schedule, step, world=observed.world))
        # Odd ranks wait in another order than even ones.
        order = list(range(len(handles)))[:: -1 if world.topology.rank % 2 else 1]
        found = {number: handles[number].wait() for number in order}
        # Every second one is a mix, and shards may differ from rank to rank.
        mixed = [found[number].tensors for number in range(1, len(handles), 2)]
        synced = [found[number] for number in range(0, len(handles), 2) if number != 4]
        outs += [x for xs in (*synced, *mixed) for x in xs]
    require_same_everywhere(world, outs, "all ranks hold the same bits")
    engine = engine_of(observed.world)
    threads = [driver.threads for driver in engine.drivers.values() if driver.threads is not None]
    assert len(threads) == len(engine.drivers) > 1, "something was not driven in the background"
    for one in threads:
        one.join()
    assert len(observed.groups) == 8
    for name, group in observed.groups.items():
        assert not name.startswith("inter ") or group.started or group.transport.size == 1, f"{name} was not used"
        digests = group.transport.all_gather(digest_of(group.started)).wait()
        assert all(torch.equal(digest, digests[0]) for digest in digests), f"{name}: ranks differ: {group.started}"


def a_slow_leg_inside_a_node_does_not_delay_the_caller(world: World) -> None:
    """No reduce-scatter ends before all calls were started: one that the caller waited for would never end."""
    gate = threading.Event()

    def wait_for_gate(verb: str) -> None:
        if verb == "reduce_scatter" and not gate.wait(GATE_S):
            raise AssertionError("start_sync waited for the reduce-scatter inside the node")

    observed = observe(world, lambda transport: ObservedTransport(transport, before_wait=wait_for_gate))
    xs = [torch.full((300,), float(number)) for number in range(3)]
    handles = [flexcomm.start_sync(x, flexcomm.dense(), world=observed.world) for x in xs]
    gate.set()
    for x, handle in zip(xs, handles, strict=True):
        assert torch.equal(handle.wait(), x)
    (driver,) = engine_of(observed.world).drivers.values()
    assert driver.threads is not None
    driver.threads.join()


def a_call_that_fails_in_the_background_leaves_the_others(world: World) -> None:
    """A NaN on one rank fails one call on all ranks; those before and after it succeed, and outputs stay untouched."""
    last = world.topology.rank == world.topology.size - 1
    good = torch.ones(3000)
    bad = torch.full((3000,), torch.nan if last else 1.0)
    out = torch.full((3000,), 7.0)
    residuals = flexcomm.Residuals()
    first = flexcomm.start_sync(good, flexcomm.top_k(1.0, values="fp32"), world=world)
    broken = flexcomm.start_sync(
        [bad], flexcomm.demo(k=8), world=world, out=[out], residuals=residuals, bucket_bytes=4096
    )
    after = flexcomm.start_sync(good, flexcomm.top_k(1.0, values="fp32"), world=world)
    assert torch.equal(first.wait(), good)
    try:
        broken.wait()
    except flexcomm.NonFiniteError:
        pass
    else:
        raise AssertionError("a NaN passed")
    assert torch.equal(out, torch.full((3000,), 7.0)), "an output of a failed call was written"
    assert residuals.names() == []
    assert torch.equal(after.wait(), good)


def out_is_untouched_where_one_bucket_of_many_fails(world: World) -> None:
    """Also the outputs of buckets that were fine."""
    last = world.topology.rank == world.topology.size - 1
    xs = [torch.ones(2000), torch.full((2000,), torch.nan if last else 1.0), torch.ones(2000)]
    for verb in (flexcomm.hierarchical_sync, lambda *args, **options: flexcomm.start_sync(*args, **options).wait()):
        for compressor in (flexcomm.demo(k=8), flexcomm.dense(), flexcomm.random_k(0.5)):
            outs = [torch.full((2000,), 7.0) for _ in xs]
            try:
                verb(xs, compressor, world=world, out=outs, bucket_bytes=8000)
            except flexcomm.NonFiniteError:
                assert all(torch.equal(out, torch.full((2000,), 7.0)) for out in outs), f"{compressor}: out was written"
            else:
                raise AssertionError("a NaN passed")


def a_world_that_is_closed_refuses_new_calls(world: World) -> None:
    """Comm threads have ended by then: a call that was handed to them would never be done."""
    x, schedule = torch.ones(100), flexcomm.gossip.complete(world.topology.nodes)
    with flexcomm.connect(ranks_per_node=world.topology.local_size) as other:
        # More than once, so that the next call needs no comparison of settings, which would refuse it.
        for _ in range(3):
            assert torch.equal(flexcomm.start_sync(x, flexcomm.dense(), world=other).wait(), x)
            assert torch.equal(flexcomm.mix(x, schedule, 0, world=other).tensors, x)
    with pytest.raises(flexcomm.TransportError, match="closed"):
        flexcomm.start_sync(x, flexcomm.dense(), world=other).wait()
    with pytest.raises(flexcomm.TransportError, match="closed"):
        flexcomm.mix(x, schedule, 0, world=other)


def a_mix_is_done_when_it_was_started_if_no_thread_may_send(world: World) -> None:
    """As over an MPI without THREAD_MULTIPLE."""
    with pytest.MonkeyPatch.context() as patch, flexcomm.connect(ranks_per_node=world.topology.local_size) as other:
        patch.setattr("flexcomm.sync.engine._may_use_threads", lambda _: False)
        schedule, x = flexcomm.gossip.base(world.topology.nodes), torch.randn(1000)
        handles = [flexcomm.start_mix(x, schedule, step, world=other) for step in range(3)]
        assert all(handle.done() for handle in handles)
        for step, handle in enumerate(handles):
            assert torch.equal(handle.wait().tensors, flexcomm.mix(x, schedule, step, world=world).tensors)


def a_wait_that_is_interrupted_can_be_repeated(world: World) -> None:
    """Comm threads go on meanwhile, for the peers that count on them."""
    x, schedule = torch.full((3000,), float(world.topology.node)), flexcomm.gossip.complete(world.topology.nodes)
    flexcomm.mix(x, schedule, 0, world=world)
    barrier = world.control.barrier
    if world.topology.rank > 0:
        barrier().wait()  # Only now do they start what rank 0 waits for.
    handle = flexcomm.start_mix(x, schedule, 1, world=world)
    if world.topology.rank == 0 and not handle.done():
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, INTERRUPTED_S)
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
        signal.signal(signal.SIGALRM, before)
    if world.topology.rank == 0:
        barrier().wait()
    mixed = handle.wait().tensors
    assert torch.allclose(mixed, torch.full_like(x, (world.topology.nodes - 1) / 2))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def ranks_agree_on_the_kind_of_device(world: World) -> None:
    """Before data moves: transports for host tensors and for devices' wait for each other for ever."""
    last, schedule = world.topology.size - 1, flexcomm.gossip.complete(world.topology.nodes)
    row = device.DeviceKind("meta", "reference", backend=None, has_streams=False, has_pinned_memory=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device.KINDS, "meta", row)
        x = torch.ones(123, device="meta" if world.topology.rank == last else "cpu")
        calls: list[Callable[[], object]] = [
            lambda: flexcomm.hierarchical_sync(x, flexcomm.demo(), world=world),
            lambda: flexcomm.start_sync(x, flexcomm.dense(), world=world).wait(),
            lambda: flexcomm.mix(x, schedule, 0, world=world),
        ]
        for call in calls:
            with pytest.raises(flexcomm.ConfigMismatchError, match=f"device: cpu on .*; meta on rank {last}"):
                call()
    assert torch.equal(flexcomm.hierarchical_sync(torch.ones(123), flexcomm.dense(), world=world), torch.ones(123))


LAWS = {
    law.__name__: law
    for law in (
        collectives_start_in_one_order_whatever_the_timing,
        a_slow_leg_inside_a_node_does_not_delay_the_caller,
        a_call_that_fails_in_the_background_leaves_the_others,
        out_is_untouched_where_one_bucket_of_many_fails,
        a_world_that_is_closed_refuses_new_calls,
        ranks_agree_on_the_kind_of_device,
        a_wait_that_is_interrupted_can_be_repeated,
        a_mix_is_done_when_it_was_started_if_no_thread_may_send,
    )
}
