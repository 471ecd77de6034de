"""Which laws of synchronisation are held to which recipe, in which world.

Every law is held in every world, by a recipe that changes from law to law and from world to world, so that each law
meets more than half of the recipes, and each recipe all laws. ``FLEXCOMM_ALL_LAWS=1`` takes every law, recipe and
world, which takes half an hour.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import torch

import flexcomm
from flexcomm.testing import CALL_LAWS, SYNC_LAWS
from flexcomm.testing.expected import require_same_everywhere
from flexcomm.testing.syncs import everything_sent_is_the_mean
from tests.ranks.shapes import SHAPES, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import Compressor, World

ALL_LAWS = bool(os.environ.get("FLEXCOMM_ALL_LAWS"))
STEPS = 1000 if ALL_LAWS else 20
RATES = {"1/2": 1 / 2, "1/16": 1 / 16, "1/32": 1 / 32, "0.1": 0.1, "1.0": 1.0}
CHUNK = 16

RECIPES: dict[str, Compressor] = {
    "demo": flexcomm.demo(),
    "demo sign": flexcomm.demo(values="sign"),
    "top_k 1/32": flexcomm.top_k(1 / 32),
    "threshold": flexcomm.threshold(1.0),
    "threshold exact": flexcomm.threshold(1.0, capacity=None),
    "random_k 0.1": flexcomm.random_k(0.1),
    "striding 1/16": flexcomm.striding(1 / 16),
    "sign": flexcomm.sign(),
    "dense": flexcomm.dense(),
    "dense bf16": flexcomm.dense(torch.bfloat16),
}

WHOLE: dict[str, Compressor] = {
    "demo of all": flexcomm.demo(k=64 * 64, values="fp32"),
    "top_k 1.0": flexcomm.top_k(1.0, values="fp32"),
    "random_k 1.0": flexcomm.random_k(1.0, values="fp32"),
    "striding 1.0": flexcomm.striding(1.0, values="fp32"),
}

RATED: dict[str, Compressor] = {
    **{f"demo {name}": flexcomm.demo(k=max(1, round(rate * CHUNK**2)), chunk=CHUNK) for name, rate in RATES.items()},
    **{f"top_k {name}": flexcomm.top_k(rate) for name, rate in RATES.items()},
    **{f"random_k {name}": flexcomm.random_k(rate) for name, rate in RATES.items()},
    **{f"striding {name}": flexcomm.striding(rate) for name, rate in RATES.items()},
    **{name: recipe for name, recipe in RECIPES.items() if not name[-1].isdigit() and name != "demo"},
}


def laws_in(shape: Shape, shift: int = 0) -> dict[str, Callable[[World], object]]:
    """The laws held in this world, by name; ``shift`` gives every law another recipe."""
    laws: dict[str, Callable[[World], object]] = {law.__name__: law for law in CALL_LAWS}
    names = list(RECIPES)
    for number, law in enumerate(SYNC_LAWS):
        turn = (number + 3 * SHAPES.index(shape) + shift) % len(names)
        for name in names if ALL_LAWS else [names[turn]]:
            laws[f"{law.__name__}, {name}"] = partial(law, compressor=RECIPES[name])
    for name, recipe in WHOLE.items():
        laws[f"{everything_sent_is_the_mean.__name__}, {name}"] = partial(
            everything_sent_is_the_mean, compressor=recipe
        )
    return laws


def keep_replicas_equal(world: World) -> None:
    """Replicas that follow the averages, one of each recipe, hold the same bits after many steps, and in between."""
    generator = torch.Generator().manual_seed(world.topology.rank)
    shapes = ((CHUNK + 5, 2 * CHUNK), (101,), ())
    replicas = {name: [torch.zeros(shape) for shape in shapes] for name in RATED}
    residuals = {name: flexcomm.Residuals(decay=0.875) for name in RATED}
    for step in range(STEPS):
        gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        handles = {
            name: flexcomm.start_sync(gradients, recipe, world=world, residuals=residuals[name], step=step)
            for name, recipe in RATED.items()
        }
        for name, handle in handles.items():
            for x, out in zip(replicas[name], handle.wait(), strict=True):
                x.mul_(0.75).add_(out)
            if step % 10 == 9:
                require_same_everywhere(world, replicas[name], f"{name}: replicas are equal after step {step}")
