"""Hierarchical collectives for training over slow links between nodes.

``flexcomm.connect()`` finds the ranks that mpirun, torchrun or srun started and joins them twice: inside a node, and
between nodes.
"""

from flexcomm import gossip
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
from flexcomm.gossip.compressed import MixResiduals
from flexcomm.gossip.push_sum import PushSum
from flexcomm.sync import Residuals, SyncHandle, hierarchical_sync, start_exchange, start_sync
from flexcomm.topology import Topology
from flexcomm.transport import Handle, Transport
from flexcomm.version import __version__
from flexcomm.world import World, connect, connect_mesh

__all__ = [
    "Compressor",
    "CompressorError",
    "ConfigMismatchError",
    "DeadlineExceededError",
    "FlexcommError",
    "Handle",
    "InvalidArgumentError",
    "InvalidTensorError",
    "MixHandle",
    "MixResiduals",
    "MixResult",
    "NonFiniteError",
    "PeerLostError",
    "Pipeline",
    "PushSum",
    "Residuals",
    "SyncError",
    "SyncHandle",
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
    "connect",
    "connect_mesh",
    "demo",
    "dense",
    "gossip",
    "hierarchical_sync",
    "mix",
    "random_k",
    "sign",
    "start_exchange",
    "start_mix",
    "start_sync",
    "striding",
    "threshold",
    "top_k",
]
