"""Training keeps its laws on devices, in an order in which a device would do it all: FSDP, DDP, optimizers, mixing,
decentralized training and checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bench.gpu.laws import LAWS as DEVICE_LAWS
from tests.ranks import checkpoint_laws, decentralized_laws, hook_laws, mixing_laws, optimizer_laws
from tests.ranks.laws import cases
from tests.ranks.shapes import Shape
from tests.slow import slow_but
from tests.stand_in.laws import keep_on_stand_in
from tests.stand_in.placement import Placed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flexcomm import World

SHAPES = (Shape(1, 2), Shape(2, 1), Shape(2, 2))
GOSSIP_SHAPES = (Shape(2, 2), Shape(3, 1))
CHECKPOINTS = checkpoint_laws.laws()
DECENTRALIZED = decentralized_laws.LAWS | decentralized_laws.TORCH_LAWS
OPTIMIZERS: dict[str, Callable[[World], object]] = {law.__name__: law for law in optimizer_laws.LAWS}
OPTIMIZERS |= optimizer_laws.replicas_of()
NO_COMMON_ORDER = "ranks start calls in different orders, which a device's backend cannot do"
NOT_ON_DEVICES = {
    "communicators_need_no_common_order": NO_COMMON_ORDER,
    "two_optimizers_do_not_mix_with_each_other": NO_COMMON_ORDER,
    "calls_that_ranks_make_differently_are_found": "payloads are enqueued with their headers, not after them",
    "a_change_under_way_is_refused": "it changes what is being read, to see that that is noticed",
    "gradients_that_left_must_not_change": "it changes what is being read, to see that that is noticed",
    "what_makes_no_sense_together_is_refused": "the stand-in has no sparse tensors",
}


def laws_in(shapes: tuple[Shape, ...], laws: Iterable[str] | Callable[[Shape], Iterable[str]]) -> list[Any]:
    """Return parameters ``shape`` and ``law``, all slow; laws that devices cannot keep are expected to fail."""
    found = cases(shapes, laws, lambda _: [])
    for parameter in found:
        if parameter.values[1] in NOT_ON_DEVICES:
            parameter.marks.append(pytest.mark.xfail(reason=NOT_ON_DEVICES[parameter.values[1]], strict=False))
    return found


def hook_laws_in(shape: Shape) -> dict[str, Callable[[World], object]]:
    return {law.__name__: law for law in hook_laws.laws_for(shape.size, shape.ranks_per_node)}


@pytest.mark.parametrize("name", ["mixing", "fsdp2_hook", "ddp_hook", "checkpoint"])
@pytest.mark.parametrize("shape", slow_but([Shape(2, 2)], SHAPES), ids=str)
def test_devices_do_what_hosts_do(shape: Shape, name: str) -> None:
    for law in DEVICE_LAWS[name]:
        keep_on_stand_in(law, shape)


@pytest.mark.parametrize(("shape", "law"), laws_in(SHAPES, hook_laws_in))
def test_hooks_keep_the_law(shape: Shape, law: str) -> None:
    keep_on_stand_in(Placed(hook_laws_in(shape)[law]), shape)


@pytest.mark.parametrize(("shape", "law"), laws_in(SHAPES, OPTIMIZERS))
def test_optimizers_keep_the_law(shape: Shape, law: str) -> None:
    keep_on_stand_in(Placed(OPTIMIZERS[law]), shape)


@pytest.mark.parametrize(("shape", "law"), laws_in((Shape(2, 2),), CHECKPOINTS))
def test_checkpoints_keep_the_law(shape: Shape, law: str) -> None:
    keep_on_stand_in(Placed(CHECKPOINTS[law]), shape)


@pytest.mark.parametrize(("shape", "law"), laws_in(GOSSIP_SHAPES, mixing_laws.LAWS))
def test_mixing_keeps_the_law(shape: Shape, law: str) -> None:
    keep_on_stand_in(Placed(mixing_laws.LAWS[law]), shape, limit_s=200)


@pytest.mark.parametrize(("shape", "law"), laws_in(GOSSIP_SHAPES, DECENTRALIZED))
def test_decentralized_training_keeps_the_law(shape: Shape, law: str) -> None:
    keep_on_stand_in(Placed(DECENTRALIZED[law]), shape, limit_s=200)
