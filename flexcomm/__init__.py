"""Hierarchical collectives for training over slow links between nodes.

``flexcomm.connect()`` finds the ranks that mpirun, torchrun or srun started and joins them twice: inside a node, and
between nodes.
"""

from flexcomm import gossip
from flexcomm.backend.group import backend_stats
from flexcomm.backend.options import BackendOptions, configure_backend, exact
from flexcomm.codec import TensorShard, plan_tensor, shard_tensor
from flexcomm.compress import (
    Compressor,
    Pipeline,
    TensorSpec,
    demo,
    dense,
    random_k,
    sign,
    striding,
    threshold,
    top_k,
)
from flexcomm.errors import (
    CompressorError,
    ConfigMismatchError,
    DeadlineExceededError,
    FlexcommError,
    InvalidArgumentError,
    InvalidTensorError,
    NonFiniteError,
    PeerLostError,
    SyncError,
    TopologyError,
    TorchVersionError,
    TransportError,
    TransportUnavailableError,
    WireError,
)
from flexcomm.gossip.api import MixHandle, MixResult, mix, start_mix
from flexcomm.gossip.mix import MixResiduals, PushSum
from flexcomm.kernels import Average, Epilogue, TensorPlan, apply_epilogue_
from flexcomm.sync.api import (
    BUCKET_BYTES,
    hierarchical_sync,
    plan_sync,
    shards_held,
    start_exchange,
    start_planned,
    start_sync,
)
from flexcomm.sync.bucket_codec import BucketCodec, BucketCompressor
from flexcomm.sync.call import SyncHandle
from flexcomm.sync.plan import AlgorithmOption, NonFinitePolicy, SyncPlan, choose_algorithms, fill_buckets
from flexcomm.sync.residuals import Residuals
from flexcomm.topology import Topology
from flexcomm.transport import Handle, Transport
from flexcomm.versions import __version__
from flexcomm.world import World, connect, connect_mesh, default_world

__all__ = [
    "BUCKET_BYTES",
    "AlgorithmOption",
    "Average",
    "BackendOptions",
    "BucketCodec",
    "BucketCompressor",
    "Compressor",
    "CompressorError",
    "ConfigMismatchError",
    "DeadlineExceededError",
    "Epilogue",
    "FlexcommError",
    "Handle",
    "InvalidArgumentError",
    "InvalidTensorError",
    "MixHandle",
    "MixResiduals",
    "MixResult",
    "NonFiniteError",
    "NonFinitePolicy",
    "PeerLostError",
    "Pipeline",
    "PushSum",
    "Residuals",
    "SyncError",
    "SyncHandle",
    "SyncPlan",
    "TensorPlan",
    "TensorShard",
    "TensorSpec",
    "Topology",
    "TopologyError",
    "TorchVersionError",
    "Transport",
    "TransportError",
    "TransportUnavailableError",
    "WireError",
    "World",
    "__version__",
    "apply_epilogue_",
    "backend_stats",
    "choose_algorithms",
    "configure_backend",
    "connect",
    "connect_mesh",
    "default_world",
    "demo",
    "dense",
    "exact",
    "fill_buckets",
    "gossip",
    "hierarchical_sync",
    "mix",
    "plan_sync",
    "plan_tensor",
    "random_k",
    "shard_tensor",
    "shards_held",
    "sign",
    "start_exchange",
    "start_mix",
    "start_planned",
    "start_sync",
    "striding",
    "threshold",
    "top_k",
]
