"""FSDP2, DDP, optimizers and checkpoints keep their laws on devices, in an order in which a device would do it all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.gpu.laws import LAWS as DEVICE_LAWS
from tests.ranks import hook_laws
from tests.ranks.laws import cases
from tests.ranks.shapes import Shape
from tests.slow import slow_but
from tests.stand_in.laws import keep_on_stand_in
from tests.stand_in.placement import Placed

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import World

SHAPES = (Shape(1, 2), Shape(2, 1), Shape(2, 2))


def hook_laws_in(shape: Shape) -> dict[str, Callable[[World], object]]:
    return {law.__name__: law for law in hook_laws.laws_for(shape.size, shape.ranks_per_node)}


@pytest.mark.parametrize("name", ["fsdp2_hook", "ddp_hook", "checkpoint"])
@pytest.mark.parametrize("shape", slow_but([Shape(2, 2)], SHAPES), ids=str)
def test_devices_train_as_hosts_do(shape: Shape, name: str) -> None:
    for law in DEVICE_LAWS[name]:
        keep_on_stand_in(law, shape)


@pytest.mark.parametrize(("shape", "law"), cases(SHAPES, hook_laws_in, lambda _: []))
def test_hooks_keep_the_law(shape: Shape, law: str) -> None:
    keep_on_stand_in(Placed(hook_laws_in(shape)[law]), shape)
