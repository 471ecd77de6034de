"""Imported by the process that ranks are forked from: what it imported and loaded, no rank has to again.

The first optimizer of a process imports torch._dynamo, which takes three seconds; loading all kernels takes one.
"""

import gc

import torch._dynamo
import torch.distributed.checkpoint

import flexcomm.testing
import flexdemo
from flexcomm.kernels.__main__ import CALLS, compile_ahead

__all__ = ["flexcomm", "flexdemo", "torch"]

for call in CALLS:
    compile_ahead(call)
# Else the first collection of every rank writes to the pages that it shares with this process.
gc.collect()
gc.freeze()
