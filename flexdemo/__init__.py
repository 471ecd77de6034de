"""Optimizers and hooks that train over slow links, built on flexcomm."""

from flexdemo.adamw import FlexDeMoAdamW
from flexdemo.optimizer import FlexDeMo
from flexdemo.settings import Outer

__all__ = ["FlexDeMo", "FlexDeMoAdamW", "Outer"]
