"""Optimizers and hooks that train over slow links, built on flexcomm."""

from flexdemo.accumulated import AccumAdam
from flexdemo.adamw import FlexDeMoAdamW
from flexdemo.ddp import CompressionState, attach_to_ddp, compression_hook
from flexdemo.decentralized import ConsensusControl, DecentralizedAdam, DecentralizedOptimizer
from flexdemo.files import load_checkpoint, save_checkpoint
from flexdemo.fsdp import attach_to_fsdp
from flexdemo.hook_handle import HookHandle
from flexdemo.optimizer import FlexDeMo
from flexdemo.settings import OuterOptimizer
from flexdemo.wrapped import DistributedOptimizer

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
