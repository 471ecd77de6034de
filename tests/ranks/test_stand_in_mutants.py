"""The library with one thing left out is reported on the stand-in: what orders streams and keeps memory is needed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest

import flexcomm
from flexcomm.sync.algorithms import LEGS
from flexcomm.transport import TorchTransport
from tests.ranks import device_laws, hook_laws
from tests.ranks.shapes import Shape
from tests.ranks.sync_laws import handles_give_what_blocking_calls_give
from tests.ranks.test_stand_in import HOST_TOUCHES, OVERWRITTEN, RACE, USED_ANEW
from tests.stand_in.laws import keep_on_stand_in
from tests.stand_in.placement import Placed

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import World


@dataclass(frozen=True)
class Mutated:
    """A law, kept while a name of a module means something else; ``change`` gets what it meant."""

    law: Callable[[World], object]
    module: str
    name: str
    change: Callable[[Any], Any]

    def __call__(self, world: World) -> None:
        *owners, name = self.name.split(".")
        owner = attrgetter(".".join(owners))(import_module(self.module)) if owners else import_module(self.module)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, self.change(getattr(owner, name)))
            self.law(world)


def nothing(_: Any) -> Callable[..., None]:
    return do_nothing


def do_nothing(*_: Any, **__: Any) -> None:
    return


def of_devices(wait: Any) -> Callable[..., None]:
    """Return a wait that does nothing for work of devices."""
    return lambda request, timeout_s: None if is_of_device(request) else wait(request, timeout_s)


def is_of_device(request: Any) -> bool:
    return bool(request._transport.device_type != "cpu")


def without_waiting(switch: Any) -> Callable[..., Any]:
    return lambda stream, *_: switch(stream)


def on_host(_: Any) -> Callable[[Any], bool]:
    return lambda _: True


def lazily(_: Any) -> Callable[..., Any]:
    return lambda factory, group, backend: TorchTransport(group, backend, factory.timeout_s)


def in_threads(_: Any) -> Callable[..., Any]:
    return lambda *_: LEGS


def sync(world: World) -> None:
    handles_give_what_blocking_calls_give(world, flexcomm.demo(k=4, chunk=16))


def new_groups(world: World) -> None:
    del world
    with flexcomm.connect(inter="gloo", timeout_s=60) as other:
        sync(other)


NODES, ODD = Shape(2, 2), Shape(3, 1)
ENGINE, GROUPS = "flexcomm.sync.engine", "flexcomm.bootstrap.groups"
MIXED_PRECISION = Placed(hook_laws.mixed_precision_is_exchanged_as_reduced)
MUTANTS: dict[str, tuple[Mutated, Shape, str]] = {
    "work is not waited for": (
        Mutated(sync, "flexcomm.transport.torch_distributed", "TorchRequest.wait", of_devices),
        NODES,
        RACE,
    ),
    "inputs are not waited for": (Mutated(sync, ENGINE, "switch_stream", without_waiting), NODES, RACE),
    "words are read at once": (
        Mutated(sync, "flexcomm.sync.algorithms", "synchronize_event", nothing),
        NODES,
        HOST_TOUCHES,
    ),
    "staged tensors are sent at once": (
        Mutated(new_groups, "flexcomm.transport.staging", "synchronize_event", nothing),
        NODES,
        HOST_TOUCHES,
    ),
    "the next call is not ordered": (
        Mutated(device_laws.calls_follow_the_streams_of_their_caller, ENGINE, "order_stream", nothing),
        NODES,
        OVERWRITTEN,
    ),
    "communicators are made when needed": (
        Mutated(device_laws.a_first_round_may_leave_nodes_out, GROUPS, "GroupFactory._transport_of", lazily),
        ODD,
        "did not come to make their communicator",
    ),
    "comm threads start collectives of devices": (
        Mutated(device_laws.a_first_round_may_leave_nodes_out, "flexcomm.gossip.plan", "legs_of_threads", in_threads),
        NODES,
        "were enqueued by thread flexcomm-",
    ),
    "FSDP's gradient is not kept": (
        Mutated(MIXED_PRECISION, "flexdemo.hooks.fsdp", "record_stream", nothing),
        NODES,
        USED_ANEW,
    ),
    "DDP's future has no device": (
        Mutated(
            device_laws.a_hooks_future_orders_the_stream_that_waits_for_it, "flexdemo.hooks.ddp", "is_on_host", on_host
        ),
        NODES,
        RACE,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_left_out_is_missed(name: str) -> None:
    mutated, shape, said = MUTANTS[name]
    with pytest.raises(AssertionError, match=said):
        keep_on_stand_in(mutated, shape, devices=4)
