"""The model of ``bench train``: a GPT that reads bytes, in plain torch, whole or sharded inside the node."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from bench.errors import UsageError
from flexcomm import World

VOCABULARY = 256
_INIT_STD = 0.02


@dataclass(frozen=True)
class Size:
    """Dimensions of a named model; ``windows`` is how many windows of ``context`` bytes a rank takes for a step."""

    width: int
    heads: int
    layers: int
    context: int
    windows: int


SIZES: Mapping[str, Size] = {
    "tiny": Size(width=64, heads=2, layers=2, context=64, windows=4),
    "demo": Size(width=96, heads=3, layers=3, context=64, windows=2),
    "small": Size(width=128, heads=4, layers=4, context=128, windows=4),
    "wide": Size(width=320, heads=5, layers=4, context=128, windows=1),
}
"""``tiny`` tries the command out, ``demo`` is for ``bench demo``; ``wide`` has 5 M parameters and few bytes a step, so
that links dominate.
"""


def find_size(name: str) -> Size:
    """Return the size of that name."""
    if name not in SIZES:
        raise UsageError(f"got --size {name!r}, needed one of {', '.join(SIZES)}.")
    return SIZES[name]


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[batch, context, width]`` for the same."""
        split = self.attend(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).flatten(-2))
        grown: Tensor = x + self.narrow(functional.gelu(self.widen(self.norm_2(x))))
        return grown


class ByteGpt(nn.Module):
    """A GPT on bytes, whose embedding is its output layer, too."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits ``[batch, context, 256]`` of what follows each byte of ``text``."""
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.bytes.weight)


def build_model(size: Size, seed: int, device: torch.device) -> ByteGpt:
    """Return a model initialised as GPT-2 is, a function of ``seed``."""
    with torch.device("meta"):
        model = ByteGpt(size)
    model.to_empty(device="cpu")
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            _initialise_(param, name, size.layers, draw)
    return model.to(device)


def _initialise_(param: Tensor, name: str, layers: int, draw: torch.Generator) -> None:
    if param.dim() == 1:
        param.fill_(float("norm" in name and name.endswith("weight")))
        return
    # Outputs that are added to the residual are smaller, so that the sum over layers does not grow.
    joins = name.endswith(("attended.weight", "narrow.weight"))
    param.normal_(std=_INIT_STD / math.sqrt(2 * layers) if joins else _INIT_STD, generator=draw)


def shard_inside_node_(model: ByteGpt, world: World) -> None:
    """Leave every rank of a node with its share of each parameter, by FSDP2."""
    nodes = DeviceMesh(world.device.type, torch.tensor(world.topology.members), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=nodes["shard"])
    fully_shard(model, mesh=nodes["shard"])


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross entropy of the bytes that follow, in nats per byte."""
    logits: Tensor = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
