"""Parameters of every kind, and gradients that follow from rank and step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module, Parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flexcomm import World

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (70, 131),
    "square": (64, 64),
    "scalar": (),
    "three": (3,),
    "stack": (4, 20, 20),
    "kernel": (8, 3, 3, 3),
    "prime": (131,),
    "nothing": (0, 5),
    "flat": (1000,),
}
DTYPES = {"three": torch.bfloat16, "prime": torch.float64, "kernel": torch.float16}


class Zoo(Module):
    """A module whose loss has exactly the gradients asked for."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        for name, value in numbers(seed).items():
            self.register_parameter(name, Parameter(value))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        """Return a loss; the parameters' gradients are these."""
        losses = [(getattr(self, name) * x).sum().double() for name, x in gradients.items()]
        return torch.stack(losses).sum()


def numbers(*seed: int) -> dict[str, Tensor]:
    """Return tensors of all shapes and dtypes that follow from the seed."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float32).to(DTYPES.get(name, torch.float32))
        for name, shape in SHAPES.items()
    }


def gradients_at(world: World, step: int, without: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return what this rank's gradients are at a step: a part that all ranks share, and one of its own."""
    shared, own = numbers(17, step), numbers(18, step, world.topology.rank)
    return {name: shared[name] + own[name] for name in shared if name not in without}
