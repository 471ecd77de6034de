"""One bucket to one buffer and back, so that one collective carries several tensors.

A plan is everything that follows from shapes; an ``Encoder`` fills a buffer, and a ``Decoder`` turns the buffers of all
nodes into averages. Chunks never straddle tensors, so how tensors are put into buckets changes no bit of the result.
"""

from flexcomm.codec.coders import Decoder, Encoder, check_numbers
from flexcomm.codec.plan import TensorShard, assemble_buffer, is_dense, plan_buffer, plan_tensor, shard_tensor

__all__ = [
    "Decoder",
    "Encoder",
    "TensorShard",
    "assemble_buffer",
    "check_numbers",
    "is_dense",
    "plan_buffer",
    "plan_tensor",
    "shard_tensor",
]
