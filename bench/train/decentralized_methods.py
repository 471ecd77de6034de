"""The contestants of ``bench decentralized``: Adam on gradients of all nodes, and on nodes that mix with few others.

To add one: a line in the table. Its learning rate comes from ``python -m bench decentralized --sweep``.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from bench.train.methods import BETAS, WEIGHT_DECAY, Builder, Groups, Method, adamw
from bench.train.plan import Settings
from flexcomm import World, dense, gossip, top_k
from flexcomm.gossip import Schedule
from flexdemo import DecentralizedAdam, attach_to_ddp

ALLREDUCE = "allreduce-adam"
"""The baseline."""
ALLREDUCE_DDP = "allreduce-ddp"

_BUCKET_MB = 1
"""Of DDP: with torch's 25 MB all of a small model would leave at the end of the backward pass."""
_GRID = (2e-3, 4e-3, 6e-3, 8e-3, 1.2e-2)
_WINDOW_BETA1 = 0.8
"""Of methods whose moments advance once in a window, and lag behind; see docs/decentralized.md."""
_SHARE = 1 / 8
_GAMMA = 0.8 * _SHARE


def _averaged_by_ddp(groups: Groups, _world: World, lr: float, _settings: Settings) -> Optimizer:
    return AdamW(groups, lr, BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def _into_ddp(model: nn.Module, world: World) -> nn.Module:
    """Return the model in torch's DDP; gradients take flexcomm's way, so that their bytes are counted."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=_BUCKET_MB)
    attach_to_ddp(wrapped, dense(torch.float32), world=world)
    return wrapped


def _mixed(schedule: Callable[[int], Schedule], **options: Any) -> Builder:
    """Return what builds decentralized Adam, whose nodes mix by ``schedule``; options are its own."""

    def build(groups: Groups, world: World, lr: float, _settings: Settings) -> Optimizer:
        common = {"betas": BETAS, "weight_decay": WEIGHT_DECAY, "schedule": schedule(world.topology.nodes)}
        return DecentralizedAdam(groups, lr, world=world, **{"fused": True, **common, **options})

    return build


def _accumulated(schedule: Callable[[int], Schedule]) -> Builder:
    """Return the same, with moments that advance once in as many steps as settings say."""

    def build(groups: Groups, world: World, lr: float, settings: Settings) -> Optimizer:
        # The second moment looks back over as many steps as without a window.
        betas = (_WINDOW_BETA1, BETAS[1] ** settings.accumulate)
        return _mixed(schedule, accumulate=settings.accumulate, betas=betas)(groups, world, lr, settings)

    return build


_complete, _exponential, _aer = gossip.complete, gossip.base, gossip.alternating_exponential_ring

_TABLE = (
    Method(ALLREDUCE, "torch's AdamW on the mean gradient, sent as fp32", adamw(dense(torch.float32)), _GRID),
    Method(
        ALLREDUCE_DDP,
        "the same, hidden behind the backward pass by torch's DDP; the mean is clipped, not every rank's",
        _averaged_by_ddp,
        _GRID,
        wrap=_into_ddp,
    ),
    Method("complete", "DecentralizedAdam, all nodes average", _mixed(_complete), _GRID),
    Method("ring", "DecentralizedAdam, one neighbour, then the other", _mixed(gossip.ring), _GRID),
    Method("exponential", "DecentralizedAdam, one peer, at distances 1, 2, 4", _mixed(_exponential), _GRID),
    Method("aer", "DecentralizedAdam, alternating exponential ring", _mixed(_aer), _GRID),
    Method("static", "DecentralizedAdam, peers at all of 1, 2, 4", _mixed(gossip.static_exponential), _GRID),
    Method(
        "directed",
        "DecentralizedAdam, sends to one node at 1, 2, 4, hears another",
        _mixed(gossip.directed_exponential),
        _GRID,
    ),
    Method("complete-accum", "complete, accumulated", _accumulated(_complete), _GRID),
    Method("exponential-accum", "exponential, accumulated", _accumulated(_exponential), _GRID),
    Method("aer-accum", "alternating exponential ring, accumulated", _accumulated(_aer), _GRID),
    Method(
        "choco",
        f"DecentralizedAdam, ring, changes sent by top_k(1/8), gamma={_GAMMA:g}",
        _mixed(gossip.fixed_ring, compressor=top_k(_SHARE), gamma=_GAMMA),
        _GRID,
    ),
    Method(
        "choco-int8",
        "DecentralizedAdam, ring, changes sent as int8, gamma=1",
        _mixed(gossip.fixed_ring, compressor=dense(values="int8"), gamma=1.0),
        _GRID,
    ),
)
DECENTRALIZED_METHODS: Mapping[str, Method] = {method.name: method for method in _TABLE}
"""What ``--methods`` takes."""
