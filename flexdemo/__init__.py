"""Optimizers and hooks that train over slow links, built on flexcomm."""

from flexdemo.accumulated import AccumAdam
from flexdemo.checkpoint import load_checkpoint, save_checkpoint
from flexdemo.decentralized import ConsensusControl, DecentralizedAdam, DecentralizedOptimizer
from flexdemo.flexdemo import FlexDeMo
from flexdemo.hooks.ddp import CompressionState, attach_to_ddp, compression_hook
from flexdemo.hooks.fsdp import attach_to_fsdp
from flexdemo.hooks.handle import HookHandle
from flexdemo.local_steps import OuterOptimizer
from flexdemo.wrapped import DistributedOptimizer, FlexDeMoAdamW

__all__ = [
    "AccumAdam",
    "CompressionState",
    "ConsensusControl",
    "DecentralizedAdam",
    "DecentralizedOptimizer",
    "DistributedOptimizer",
    "FlexDeMo",
    "FlexDeMoAdamW",
    "HookHandle",
    "OuterOptimizer",
    "attach_to_ddp",
    "attach_to_fsdp",
    "compression_hook",
    "load_checkpoint",
    "save_checkpoint",
]
