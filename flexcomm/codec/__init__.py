"""One bucket to one buffer and back, so that one collective carries several tensors.

``plan_buffer`` computes everything that follows from shapes, once; ``encode_bucket_`` fills a buffer, and
``decode_bucket_`` turns the buffers of all nodes into averages. Code that does so again and again with the same memory
keeps an ``Encoder`` and a ``Decoder``, which check and slice buffers once. Chunks never straddle tensors, so the way
tensors are put into buckets changes no bit of the result.
"""

from flexcomm.codec.coders import Decoder, Encoder, check_numbers, decode_bucket_, encode_bucket_, regions_of
from flexcomm.codec.plan import TensorShard, assemble_buffer, is_dense, plan_buffer, plan_tensor, shard_tensor

__all__ = [
    "Decoder",
    "Encoder",
    "TensorShard",
    "assemble_buffer",
    "check_numbers",
    "decode_bucket_",
    "encode_bucket_",
    "is_dense",
    "plan_buffer",
    "plan_tensor",
    "regions_of",
    "shard_tensor",
]
