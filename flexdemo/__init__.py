"""Optimizers and hooks that train over slow links, built on flexcomm."""

from flexdemo.adamw import FlexDeMoAdamW
from flexdemo.attachment import Attachment
from flexdemo.ddp import DdpExchange, attach_to_ddp, exchange_bucket
from flexdemo.files import load_checkpoint, save_checkpoint
from flexdemo.fsdp import attach_to_fsdp
from flexdemo.optimizer import FlexDeMo
from flexdemo.settings import Outer
from flexdemo.steps import StepExchange

__all__ = [
    "Attachment",
    "DdpExchange",
    "FlexDeMo",
    "FlexDeMoAdamW",
    "Outer",
    "StepExchange",
    "attach_to_ddp",
    "attach_to_fsdp",
    "exchange_bucket",
    "load_checkpoint",
    "save_checkpoint",
]
