"""Parameter shapes of GPTs, from their configurations, and gradients of these shapes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bench.errors import UsageError
from flexcomm import World


@dataclass(frozen=True)
class Gpt:
    """GPT-2's architecture, with tied embeddings; weights of linear layers are ``[out, in]``, as torch keeps them."""

    layers: int
    width: int
    vocabulary: int
    context: int

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return names and shapes in the order the model holds them."""
        return list(self._shapes())

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for _, shape in self.shapes())

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "wte.weight", (self.vocabulary, self.width)
        yield "wpe.weight", (self.context, self.width)
        for layer in range(self.layers):
            for name, shape in self._block():
                yield f"h.{layer}.{name}", shape
        yield "ln_f.weight", (self.width,)
        yield "ln_f.bias", (self.width,)

    def _block(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        d = self.width
        linears = (("attn.c_attn", 3 * d, d), ("attn.c_proj", d, d), ("mlp.c_fc", 4 * d, d), ("mlp.c_proj", d, 4 * d))
        for norm in ("ln_1", "ln_2"):
            yield f"{norm}.weight", (d,)
            yield f"{norm}.bias", (d,)
        for name, rows, cols in linears:
            yield f"{name}.weight", (rows, cols)
            yield f"{name}.bias", (rows,)


MODELS: Mapping[str, Gpt] = {
    "tiny": Gpt(layers=2, width=64, vocabulary=256, context=64),
    "23m": Gpt(layers=6, width=384, vocabulary=32768, context=512),
    "124m": Gpt(layers=12, width=768, vocabulary=50257, context=1024),
}
"""``tiny`` tries the command out; ``124m`` is GPT-2 small."""


def find_model(name: str) -> Gpt:
    """Return the model of that name."""
    if name not in MODELS:
        raise UsageError(f"got --model {name!r}, needed one of {', '.join(MODELS)}.")
    return MODELS[name]


class Gradients(NamedTuple):
    """The gradients of one rank, by name."""

    names: list[str]
    tensors: list[Tensor]


def draw_gradients(model: Gpt, world: World) -> Gradients:
    """Return gradients that differ from rank to rank, as batches make them differ."""
    draw = torch.Generator().manual_seed(world.topology.rank)
    names = [name for name, _ in model.shapes()]
    return Gradients(names, [torch.randn(shape, generator=draw) for _, shape in model.shapes()])
