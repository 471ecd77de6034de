"""Hooks: a model's own gradient reduction calls them, and the optimizer stays the user's."""

from flexdemo.hooks.ddp import CompressionState, attach_to_ddp, compression_hook
from flexdemo.hooks.fsdp import attach_to_fsdp
from flexdemo.hooks.handle import HookHandle

__all__ = ["CompressionState", "HookHandle", "attach_to_ddp", "attach_to_fsdp", "compression_hook"]
