"""Laws that hold on hosts hold on devices, too, in an order in which a device would do all that it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import flexcomm
from bench.gpu.laws import LAWS as BENCHMARKED
from tests.ranks import (
    checkpoint_laws,
    decentralized_laws,
    device_laws,
    hook_laws,
    mixing_laws,
    optimizer_laws,
    recipes,
)
from tests.ranks.laws import TIMEOUT_S
from tests.ranks.shapes import Shape
from tests.stand_in.laws import keep_on_stand_in
from tests.stand_in.placement import Placed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flexcomm import World

    Law = Callable[[World], object]

NODES, ODD, PAIR, ONE_NODE = Shape(2, 2), Shape(3, 1), Shape(2, 1), Shape(1, 2)
ORDER = "ranks start calls in different orders, which one device cannot follow"
CHANGED = "what is being read is changed, to see that this is noticed"
REFUSED = {
    "communicators_need_no_common_order": ORDER,
    "two_optimizers_do_not_mix_with_each_other": ORDER,
    "calls_that_ranks_make_differently_are_found": "payloads are enqueued with their headers, not after them",
    "a_change_under_way_is_refused": CHANGED,
    "gradients_that_left_must_not_change": CHANGED,
    "a_grad_scaler_scales_and_skips_on_all_ranks_alike": "torch's scaler multiplies by one what is being read",
    "what_makes_no_sense_together_is_refused": "there are no sparse tensors on the stand-in",
}
"""Laws of hosts that devices cannot keep, and why."""


@dataclass(frozen=True)
class Way:
    """How device tensors travel: where ranks share a device, and where it is asked for, through the host."""

    devices: int = 4  # of a node, so that there are more than ranks
    inter: str = "auto"


@dataclass(frozen=True)
class Connected:
    """A law in a world that is connected in another way than the one its ranks are kept in."""

    law: Law
    inter: Any

    @property
    def __name__(self) -> str:
        return getattr(self.law, "__name__", str(self.law))

    def __call__(self, world: World) -> None:
        del world
        with flexcomm.connect(inter=self.inter, timeout_s=TIMEOUT_S) as other:
            self.law(other)


def placed(laws: dict[str, Law]) -> dict[str, Law]:
    return {name: Placed(law) for name, law in laws.items()}


def hooks_in(shape: Shape) -> dict[str, Law]:
    return placed({law.__name__: law for law in hook_laws.laws_for(shape.size, shape.ranks_per_node)})


def sync_in(shape: Shape, shift: int) -> dict[str, Law]:
    """Return every law of synchronisation for one recipe each, in another world or way for another one."""
    return {name: recipes.LAWS[name] for name in recipes.usual_laws(shape, shift)}


OPTIMIZERS: dict[str, Law] = {law.__name__: law for law in optimizer_laws.LAWS} | optimizer_laws.replicas_of()
MIXING, DEVICES = placed(mixing_laws.LAWS), dict(device_laws.LAWS)
DECENTRALIZED = placed(decentralized_laws.LAWS | decentralized_laws.TORCH_LAWS)
FEW = {law.__name__: law for laws in BENCHMARKED.values() for law in laws if law.__name__ != "carries_device_memory"}
ALL_NATIVE, HOST_INSIDE, HOST_BETWEEN, ALL_HOST = Way(), Way(devices=1), Way(inter="gloo"), Way(1, "gloo")
OF_TWO_DEVICES = (
    "tensors_may_be_on_another_device_than_the_worlds",
    "a_mesh_of_devices_carries_exchanges_and_host_tensors",
    "ddp_trains_on_a_stream_of_the_callers",
    "a_hooks_future_orders_the_stream_that_waits_for_it",
)
SHARING = {name: law for name, law in DEVICES.items() if name not in OF_TWO_DEVICES}
QUICK: list[tuple[str, Way, Shape, dict[str, Law]]] = [
    ("few", ALL_NATIVE, NODES, FEW),
    ("devices", ALL_NATIVE, NODES, DEVICES),
    *[("overlap", HOST_BETWEEN, shape, dict(device_laws.BETWEEN_LAWS)) for shape in (NODES, PAIR)],
]
SLOW: list[tuple[str, Way, Shape, dict[str, Law]]] = [
    *[("few", ALL_NATIVE, shape, FEW) for shape in (PAIR, ONE_NODE)],
    *[("devices", ALL_NATIVE, shape, DEVICES) for shape in (PAIR, ONE_NODE, ODD)],
    ("devices", HOST_BETWEEN, NODES, DEVICES),
    *[("devices", way, NODES, SHARING) for way in (HOST_INSIDE, ALL_HOST)],
    ("few", HOST_BETWEEN, NODES, FEW),
    ("sync", ALL_NATIVE, NODES, dict(recipes.LAWS)),
    ("sync", ALL_NATIVE, ODD, sync_in(ODD, 0)),
    ("sync", HOST_INSIDE, NODES, sync_in(NODES, 1)),
    ("sync", HOST_BETWEEN, NODES, sync_in(NODES, 2)),
    ("sync", ALL_HOST, NODES, sync_in(NODES, 3)),
    *[("hooks", ALL_NATIVE, shape, hooks_in(shape)) for shape in (NODES, PAIR)],
    ("hooks", HOST_BETWEEN, NODES, hooks_in(NODES)),
    ("optimizers", ALL_NATIVE, NODES, placed(OPTIMIZERS)),
    ("checkpoints", ALL_NATIVE, NODES, placed(checkpoint_laws.laws())),
    *[("mixing", ALL_NATIVE, shape, MIXING) for shape in (NODES, ODD)],
    *[("mixing", way, NODES, MIXING) for way in (HOST_INSIDE, HOST_BETWEEN, ALL_HOST)],
    *[("decentralized", ALL_NATIVE, shape, DECENTRALIZED) for shape in (NODES, ODD)],
]
WAYS = {ALL_NATIVE: "native", HOST_INSIDE: "host_inside", HOST_BETWEEN: "host_between", ALL_HOST: "all_host"}


def parameters() -> Iterator[Any]:
    for family, way, shape, laws in [*QUICK, *SLOW]:
        for name, law in laws.items():
            marks = [] if (family, way, shape, laws) in QUICK else [pytest.mark.slow]
            if name in REFUSED and way != ALL_HOST:
                marks.append(pytest.mark.skip(reason=REFUSED[name]))
            yield pytest.param(law, way, shape, id=f"{WAYS[way]}-{family}-{shape}-{name}", marks=marks)


@pytest.mark.parametrize(("law", "way", "shape"), list(parameters()))
def test_devices_keep_the_law(law: Law, way: Way, shape: Shape) -> None:
    keep_on_stand_in(law if way.inter == "auto" else Connected(law, way.inter), shape, devices=way.devices, limit_s=100)
