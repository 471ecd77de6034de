"""Synchronisation: ``hierarchical_sync`` and its parts.

``api`` has the verbs, ``bucket`` the path of one bucket, ``algorithms`` and ``two_phase`` how it crosses between nodes,
``plan`` what follows from shapes, ``engine`` what drives the buckets of all calls.
"""

from flexcomm.sync.api import (
    BUCKET_BYTES,
    SyncHandle,
    hierarchical_sync,
    plan_sync,
    shards_held,
    start_exchange,
    start_planned,
    start_sync,
)
from flexcomm.sync.bucket_codec import BucketCodec, BucketCompressor
from flexcomm.sync.plan import Algorithm, AlgorithmOption, NonFinitePolicy, SyncPlan, choose_algorithms, fill_buckets
from flexcomm.sync.residuals import Residuals
from flexcomm.sync.shards import TensorShard, shard_tensor

__all__ = [
    "BUCKET_BYTES",
    "Algorithm",
    "AlgorithmOption",
    "BucketCodec",
    "BucketCompressor",
    "NonFinitePolicy",
    "Residuals",
    "SyncHandle",
    "SyncPlan",
    "TensorShard",
    "choose_algorithms",
    "fill_buckets",
    "hierarchical_sync",
    "plan_sync",
    "shard_tensor",
    "shards_held",
    "start_exchange",
    "start_planned",
    "start_sync",
]
