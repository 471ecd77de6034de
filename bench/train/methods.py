"""Methods of the commands that train: their optimizers, and grids of learning rates.

To add one: a builder and a line in the table of ``METHODS`` (``bench train``) or ``DECENTRALIZED_METHODS`` (``bench
decentralized``). Its learning rate comes from ``--sweep`` of that command.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from bench.errors import UsageError
from bench.train.plan import Settings
from flexcomm import Compressor, World, demo, dense, gossip, random_k, striding, top_k
from flexcomm.gossip import Schedule
from flexdemo import DecentralizedAdam, DistributedOptimizer, FlexDeMo, FlexDeMoAdamW, OuterOptimizer, attach_to_ddp

BASELINE = "adamw"

# torch types the values of its param_groups as Any.
Groups: TypeAlias = list[dict[str, Any]]
Builder: TypeAlias = Callable[[Groups, World, float, Settings], Optimizer]
"""Takes parameter groups, the world, the highest learning rate, and the settings of all runs."""

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
    """A training method.

    ``small_dense`` sends parameters that are no matrices (norms, biases) in full, in three bits. Nodes hold the same
    model after every ``sync_every``-th step, unless their optimizer is decentralized. ``wrap`` wraps the model in a
    module that averages its gradients, if the optimizer does not.
    """

    name: str
    summary: str
    build: Builder
    grid: tuple[float, ...]
    small_dense: bool = False
    sync_every: int = 1
    wrap: Callable[[nn.Module, World], nn.Module] | None = None

    @property
    def middle(self) -> float:
        """The learning rate of a method that was never swept."""
        return self.grid[len(self.grid) // 2]

    def make(self, model: nn.Module, world: World, lr: float, settings: Settings) -> tuple[nn.Module, Optimizer]:
        """Return the model, wrapped if need be, and its optimizer. All ranks call it together."""
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
    """Return a builder of AdamW on gradients, or steps, that nodes exchange by ``compressor``."""

    def build(groups: Groups, world: World, lr: float, _settings: Settings) -> Optimizer:
        common = {"betas": BETAS, "weight_decay": WEIGHT_DECAY, "fused": True}
        return FlexDeMoAdamW(groups, lr, compressor=compressor, world=world, **{**common, **settings})

    return build


def _muon(compressor: Compressor, **settings: Any) -> Builder:
    """Return a builder of Muon on the matrices of blocks, AdamW on all else, at one learning rate."""

    def build(groups: Groups, world: World, lr: float, _settings: Settings) -> Optimizer:
        named = [pair for group in groups for pair in group["params"]]
        matrices = [(name, param) for name, param in named if param.dim() == 2 and name.startswith("blocks.")]
        rest = [(name, param) for name, param in named if not any(param is one for _, one in matrices)]
        muon = Muon(matrices, lr, weight_decay=WEIGHT_DECAY)
        others = AdamW(rest, lr, BETAS, weight_decay=WEIGHT_DECAY, fused=True)
        return DistributedOptimizer([muon, others], compressor=compressor, world=world, **settings)

    return build


# A node may have NaN that others do not: raising there would leave the others waiting. Losses show it anyway.
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
        sync_every=_LOCAL_STEPS,
    ),
    Method(
        "local-outer",
        f"the same, moved by OuterOptimizer() along the mean: DiLoCo with {_LOCAL_STEPS} steps",
        adamw(_THREE_BITS, outer=OuterOptimizer(), **_ALONE),
        ADAMW_GRID,
        sync_every=_LOCAL_STEPS,
    ),
    Method(
        "local-muon",
        f"Muon, {_LOCAL_STEPS} steps alone, then the mean in three bits",
        _muon(_THREE_BITS, sync="steps", **_ALONE),
        _MUON_GRID,
        sync_every=_LOCAL_STEPS,
    ),
    Method(
        "steps-muon",
        "Muon's steps, every one of them exchanged as demo(k=320, values='sign')",
        _muon(demo(320, values="sign"), sync="steps"),
        _MUON_GRID,
    ),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _TABLE}
"""Values of ``--methods`` of ``bench train``."""


def parse_methods(text: str, methods: Mapping[str, Method] = METHODS) -> tuple[str, ...]:
    """Return the names asked for, in the table's order."""
    wanted = list(methods) if text == "all" else _words(text)
    if not wanted or set(wanted) - set(methods):
        raise UsageError(f"got --methods {text!r}, needed all, or some of {', '.join(methods)}, with commas between.")
    return tuple(name for name in methods if name in wanted)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


ALLREDUCE = "allreduce-adam"
"""The baseline of ``bench decentralized``."""
ALLREDUCE_DDP = "allreduce-ddp"

_BUCKET_MB = 1
"""DDP's bucket size: with torch's 25 MB, all of a small model would be sent at the end of the backward pass."""
_DECENTRALIZED_GRID = (2e-3, 4e-3, 6e-3, 8e-3, 1.2e-2)
_WINDOW_BETA1 = 0.8
"""The beta of methods whose moments advance once in a window, and lag behind; see docs/decentralized.md."""
_SHARE = 1 / 8
_GAMMA = 0.8 * _SHARE


def _averaged_by_ddp(groups: Groups, _world: World, lr: float, _settings: Settings) -> Optimizer:
    return AdamW(groups, lr, BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def _into_ddp(model: nn.Module, world: World) -> nn.Module:
    """Return the model in torch's DDP; gradients are sent by flexcomm, so that their bytes are counted."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=_BUCKET_MB)
    attach_to_ddp(wrapped, dense(torch.float32), world=world)
    return wrapped


def _mixed(schedule: Callable[[int], Schedule], **options: Any) -> Builder:
    """Return a builder of decentralized Adam, whose nodes mix by ``schedule``; options are its own."""

    def build(groups: Groups, world: World, lr: float, _settings: Settings) -> Optimizer:
        common = {"betas": BETAS, "weight_decay": WEIGHT_DECAY, "schedule": schedule(world.topology.nodes)}
        return DecentralizedAdam(groups, lr, world=world, **{"fused": True, **common, **options})

    return build


def _accumulated(schedule: Callable[[int], Schedule]) -> Builder:
    """Return the same, with moments that advance once in ``settings.accumulate`` steps."""

    def build(groups: Groups, world: World, lr: float, settings: Settings) -> Optimizer:
        # The second moment looks back over as many steps as without a window.
        betas = (_WINDOW_BETA1, BETAS[1] ** settings.accumulate)
        return _mixed(schedule, accumulate=settings.accumulate, betas=betas)(groups, world, lr, settings)

    return build


_complete, _exponential, _aer = gossip.complete, gossip.base, gossip.alternating_exponential_ring

_DECENTRALIZED_TABLE = (
    Method(
        ALLREDUCE, "torch's AdamW on the mean gradient, sent as fp32", adamw(dense(torch.float32)), _DECENTRALIZED_GRID
    ),
    Method(
        ALLREDUCE_DDP,
        "the same, hidden behind the backward pass by torch's DDP; the mean is clipped, not every rank's",
        _averaged_by_ddp,
        _DECENTRALIZED_GRID,
        wrap=_into_ddp,
    ),
    Method("complete", "DecentralizedAdam, all nodes average", _mixed(_complete), _DECENTRALIZED_GRID),
    Method("ring", "DecentralizedAdam, one neighbour, then the other", _mixed(gossip.ring), _DECENTRALIZED_GRID),
    Method(
        "exponential", "DecentralizedAdam, one peer, at distances 1, 2, 4", _mixed(_exponential), _DECENTRALIZED_GRID
    ),
    Method("aer", "DecentralizedAdam, alternating exponential ring", _mixed(_aer), _DECENTRALIZED_GRID),
    Method(
        "static", "DecentralizedAdam, peers at all of 1, 2, 4", _mixed(gossip.static_exponential), _DECENTRALIZED_GRID
    ),
    Method(
        "directed",
        "DecentralizedAdam, sends to one node at 1, 2, 4, hears another",
        _mixed(gossip.directed_exponential),
        _DECENTRALIZED_GRID,
    ),
    Method("complete-accum", "complete, accumulated", _accumulated(_complete), _DECENTRALIZED_GRID),
    Method("exponential-accum", "exponential, accumulated", _accumulated(_exponential), _DECENTRALIZED_GRID),
    Method("aer-accum", "alternating exponential ring, accumulated", _accumulated(_aer), _DECENTRALIZED_GRID),
    Method(
        "choco",
        f"DecentralizedAdam, ring, changes sent by top_k(1/8), gamma={_GAMMA:g}",
        _mixed(gossip.fixed_ring, compressor=top_k(_SHARE), gamma=_GAMMA),
        _DECENTRALIZED_GRID,
    ),
    Method(
        "choco-int8",
        "DecentralizedAdam, ring, changes sent as int8, gamma=1",
        _mixed(gossip.fixed_ring, compressor=dense(values="int8"), gamma=1.0),
        _DECENTRALIZED_GRID,
    ),
)
DECENTRALIZED_METHODS: Mapping[str, Method] = {method.name: method for method in _DECENTRALIZED_TABLE}
"""Values of ``--methods`` of ``bench decentralized``."""
ALL_METHODS: Mapping[str, Method] = {**METHODS, **DECENTRALIZED_METHODS}
"""The table in which ranks, watchers and learning rates look up a method."""


_SLOPES = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_RMS = 0.2
"""Root mean square of a step's elements, as that of AdamW: one learning rate serves both (arXiv 2502.16982)."""


class Muon(Optimizer):
    """Orthogonalised momentum on matrices (Jordan et al., 2024), in float32.

    torch's own Muon computes in bfloat16, which takes 14 times as long on processors that lack it.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:  # torch's own types for parameters
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Change every matrix that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, param.grad, group)
        return loss

    def _step(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(momentum, group["momentum"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(orthogonal(ahead), alpha=-group["lr"] * _RMS * max(param.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors, and singular values near one, by Newton-Schulz iterations."""
    a, b, c = _SLOPES
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
