"""Buckets: several tensors in one buffer, so that one collective carries them all.

``plan_bucket`` computes everything that follows from shapes, once; ``encode_bucket_`` fills a buffer and
``decode_bucket_`` turns the buffers of all nodes into averages. Who does that again and again with the same memory
keeps an ``Outgoing`` and an ``Incoming``, for which buffers are checked and cut up once. Chunks never straddle tensors,
so how tensors are put into buckets changes no bit of the result.
"""

from flexcomm.bucket.checks import check_numbers
from flexcomm.bucket.incoming import Incoming, Opened, decode_bucket_, decode_payloads_, regions_of, unchecked
from flexcomm.bucket.outgoing import Outgoing, encode_bucket_, flag_bucket_
from flexcomm.bucket.plans import BucketPlan, assemble_bucket, is_dense, plan_bucket, plan_tensor

__all__ = [
    "BucketPlan",
    "Incoming",
    "Opened",
    "Outgoing",
    "assemble_bucket",
    "check_numbers",
    "decode_bucket_",
    "decode_payloads_",
    "encode_bucket_",
    "flag_bucket_",
    "is_dense",
    "plan_bucket",
    "plan_tensor",
    "regions_of",
    "unchecked",
]
