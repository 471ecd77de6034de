"""The contestants of ``bench train``: how each makes its optimizer, and the learning rates worth trying.

To add one: a builder and a line in ``METHODS``. Its learning rate comes from ``python -m bench train --sweep``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from bench.errors import UsageError
from bench.train.muon import Muon
from bench.train.plan import Settings
from flexcomm import Compressor, World, demo, dense, random_k, striding
from flexdemo import DistributedOptimizer, FlexDeMo, FlexDeMoAdamW, OuterOptimizer

BASELINE = "adamw"

# torch types the values of its param_groups as Any.
Groups: TypeAlias = list[dict[str, Any]]
Builder: TypeAlias = Callable[[Groups, World, float, Settings], Optimizer]
"""Takes parameter groups, the world, the highest learning rate, and what all runs have in common."""

BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1
ADAMW_GRID = (1e-3, 2e-3, 4e-3, 8e-3)
_RATE = 1 / 32
_LOCAL_STEPS = 5
_THREE_BITS = dense(values="sign2")
_SIGN_GRID = (5e-4, 1e-3, 2e-3, 4e-3)
_MUON_GRID = (2e-3, 4e-3, 8e-3, 1.6e-2)
_FEW_GRID = (1e-3, 2e-3, 4e-3, 8e-3)


@dataclass(frozen=True)
class Method:
    """A way to train.

    ``small_dense`` sends what is not a matrix (norms, biases) in full, in three bits. Nodes hold the same model after
    every ``meets_every``-th step, unless their optimizer is decentralized. ``wrap`` puts the model into what averages
    its gradients, if it is not the optimizer that does so.
    """

    name: str
    summary: str
    build: Builder
    grid: tuple[float, ...]
    small_dense: bool = False
    meets_every: int = 1
    wrap: Callable[[nn.Module, World], nn.Module] | None = None

    @property
    def middle(self) -> float:
        """The learning rate of a method that was never swept."""
        return self.grid[len(self.grid) // 2]

    def make(self, model: nn.Module, world: World, lr: float, settings: Settings) -> tuple[nn.Module, Optimizer]:
        """Return what computes a loss, and the optimizer of its parameters. All ranks make them together."""
        optimizer = self.build(group_parameters(model, small_dense=self.small_dense), world, lr, settings)
        return model if self.wrap is None else self.wrap(model, world), optimizer


def group_parameters(model: nn.Module, *, small_dense: bool) -> Groups:
    """Return all parameters, by name: in one group, or those that are no matrices in a group of their own."""
    named = list(model.named_parameters())
    if not small_dense:
        return [{"params": named}]
    small = [(name, param) for name, param in named if param.dim() < 2]
    matrices = [(name, param) for name, param in named if param.dim() >= 2]
    return [{"params": matrices}, {"params": small, "compressor": _THREE_BITS}]


def _flexdemo(compressor: Compressor, **settings: Any) -> Builder:
    def build(groups: Groups, world: World, lr: float, _settings: Settings) -> Optimizer:
        return FlexDeMo(groups, lr, compressor=compressor, world=world, weight_decay=WEIGHT_DECAY, **settings)

    return build


def adamw(compressor: Compressor, **settings: Any) -> Builder:
    """Return what builds AdamW on gradients, or steps, that nodes exchange by ``compressor``."""

    def build(groups: Groups, world: World, lr: float, _settings: Settings) -> Optimizer:
        common = {"betas": BETAS, "weight_decay": WEIGHT_DECAY, "fused": True}
        return FlexDeMoAdamW(groups, lr, compressor=compressor, world=world, **{**common, **settings})

    return build


def _muon(compressor: Compressor, **settings: Any) -> Builder:
    """Muon on the matrices of blocks, AdamW on embeddings, norms and biases, at one learning rate."""

    def build(groups: Groups, world: World, lr: float, _settings: Settings) -> Optimizer:
        named = [pair for group in groups for pair in group["params"]]
        matrices = [(name, param) for name, param in named if param.dim() == 2 and name.startswith("blocks.")]
        rest = [(name, param) for name, param in named if not any(param is one for _, one in matrices)]
        muon = Muon(matrices, lr, weight_decay=WEIGHT_DECAY)
        others = AdamW(rest, lr, BETAS, weight_decay=WEIGHT_DECAY, fused=True)
        return DistributedOptimizer([muon, others], compressor=compressor, world=world, **settings)

    return build


# A node alone may meet NaN that others do not: to raise there would leave them without it. Losses tell of it anyway.
_ALONE = {"sync_every": _LOCAL_STEPS, "nonfinite": "skip"}

_TABLE = (
    Method(BASELINE, "torch's AdamW on the mean gradient, sent as fp32", adamw(dense(torch.float32)), ADAMW_GRID),
    Method("adamw-bf16", "torch's AdamW on the mean gradient, sent as bf16", adamw(dense(torch.bfloat16)), ADAMW_GRID),
    Method("muon", "Muon on the mean gradient, sent as fp32", _muon(dense(torch.float32)), _MUON_GRID),
    Method("flexdemo-k8", "FlexDeMo, demo(k=8)", _flexdemo(demo(8)), _SIGN_GRID),
    Method("flexdemo-k32", "FlexDeMo, demo(k=32)", _flexdemo(demo(32)), _SIGN_GRID),
    Method("flexdemo-k96", "FlexDeMo, demo(k=96)", _flexdemo(demo(96)), _SIGN_GRID),
    Method(
        "flexdemo-sign",
        "FlexDeMo, demo(k=396, values='sign'), alpha=0.3, decay=0.99; vectors in three bits",
        _flexdemo(demo(396, values="sign"), alpha=0.3, decay=0.99),
        _SIGN_GRID,
        small_dense=True,
    ),
    Method("flexdemo-adamw", "FlexDeMoAdamW, demo(k=96)", adamw(demo(96)), ADAMW_GRID),
    Method("random", "FlexDeMo, random_k(1/32)", _flexdemo(random_k(_RATE)), _FEW_GRID),
    Method("striding", "FlexDeMo, striding(1/32)", _flexdemo(striding(_RATE)), _FEW_GRID),
    Method(
        "local",
        f"FlexDeMoAdamW, {_LOCAL_STEPS} steps alone, then the mean in three bits",
        adamw(_THREE_BITS, **_ALONE),
        ADAMW_GRID,
        meets_every=_LOCAL_STEPS,
    ),
    Method(
        "local-outer",
        f"the same, moved by OuterOptimizer() along the mean: DiLoCo with {_LOCAL_STEPS} steps",
        adamw(_THREE_BITS, outer=OuterOptimizer(), **_ALONE),
        ADAMW_GRID,
        meets_every=_LOCAL_STEPS,
    ),
    Method(
        "local-muon",
        f"Muon, {_LOCAL_STEPS} steps alone, then the mean in three bits",
        _muon(_THREE_BITS, sync="steps", **_ALONE),
        _MUON_GRID,
        meets_every=_LOCAL_STEPS,
    ),
    Method(
        "steps-muon",
        "Muon's steps, every one of them exchanged as demo(k=320, values='sign')",
        _muon(demo(320, values="sign"), sync="steps"),
        _MUON_GRID,
    ),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _TABLE}
"""What ``--methods`` takes."""


def parse_methods(text: str, methods: Mapping[str, Method] = METHODS) -> tuple[str, ...]:
    """Return the names asked for, in the table's order."""
    wanted = list(methods) if text == "all" else _words(text)
    if not wanted or set(wanted) - set(methods):
        raise UsageError(f"got --methods {text!r}, needed all, or some of {', '.join(methods)}, with commas between.")
    return tuple(name for name in methods if name in wanted)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
