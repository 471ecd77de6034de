"""Optimizers and hooks that train over slow links, built on flexcomm."""

from flexdemo.accumulated import AccumAdam
from flexdemo.adamw import FlexDeMoAdamW
from flexdemo.attachment import Attachment
from flexdemo.ddp import DdpExchange, attach_to_ddp, exchange_bucket
from flexdemo.decentralized import ConsensusControl, Decentralized, DecentralizedAdam
from flexdemo.exchanged import Exchanged
from flexdemo.files import load_checkpoint, save_checkpoint
from flexdemo.fsdp import attach_to_fsdp
from flexdemo.optimizer import FlexDeMo
from flexdemo.settings import Outer

__all__ = [
    "AccumAdam",
    "Attachment",
    "ConsensusControl",
    "DdpExchange",
    "Decentralized",
    "DecentralizedAdam",
    "Exchanged",
    "FlexDeMo",
    "FlexDeMoAdamW",
    "Outer",
    "attach_to_ddp",
    "attach_to_fsdp",
    "exchange_bucket",
    "load_checkpoint",
    "save_checkpoint",
]
