"""Which laws of synchronisation are held to which recipe, in which world.

``make test-all`` holds every law in every world for every recipe. ``make test`` holds every law in a few worlds, for
one recipe that changes from law to law, from world to world and from transport to transport.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

import flexcomm
from tests.ranks.shapes import ALWAYS, SHAPES, Shape
from tests.ranks.sync_laws import CALL_LAWS, SYNC_LAWS, everything_sent_is_the_mean, require_same_everywhere

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcomm import Compressor, World

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


LAWS: dict[str, Callable[[World], object]] = {
    **{law.__name__: law for law in CALL_LAWS},
    **{
        f"{law.__name__}, {name}": partial(law, compressor=recipe)
        for law in SYNC_LAWS
        for name, recipe in RECIPES.items()
    },
    **{
        f"{everything_sent_is_the_mean.__name__}, {name}": partial(everything_sent_is_the_mean, compressor=recipe)
        for name, recipe in WHOLE.items()
    },
}


def usual_laws(shape: Shape, shift: int = 0) -> list[str]:
    """The laws that ``make test`` holds in a world, each for one recipe; ``shift`` gives every law another one."""
    names = list(RECIPES)
    others = {
        f"{law.__name__}, {name}"
        for number, law in enumerate(SYNC_LAWS)
        for name in names
        if name != names[(number + 3 * SHAPES.index(shape) + shift) % len(names)]
    }
    return [name for name in LAWS if shape in ALWAYS and name not in others]


def replicas_stay_equal(world: World, steps: int) -> None:
    """Replicas that follow the averages, one of each recipe, hold the same bits after many steps, and in between.

    At every rate on nodes of one rank; on larger ones, where a sync takes six times as long, at one.
    """
    recipes = RATED if world.topology.local_size == 1 else RECIPES
    generator = torch.Generator().manual_seed(world.topology.rank)
    shapes = ((CHUNK + 5, 2 * CHUNK), (101,), ())
    replicas = {name: [torch.zeros(shape) for shape in shapes] for name in recipes}
    residuals = {name: flexcomm.Residuals(decay=0.875) for name in recipes}
    for step in range(steps):
        gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        handles = {
            name: flexcomm.start_sync(gradients, recipe, world=world, residuals=residuals[name], step=step)
            for name, recipe in recipes.items()
        }
        for name, handle in handles.items():
            for x, out in zip(replicas[name], handle.wait(), strict=True):
                x.mul_(0.75).add_(out)
            if step % 10 == 9:
                require_same_everywhere(world, replicas[name], f"{name}: replicas are equal after step {step}")
