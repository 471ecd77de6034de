"""Hierarchical collectives for training over slow links between nodes.

``flexcomm.connect()`` finds the ranks that mpirun, torchrun or srun started and joins them twice: inside a node, and
between nodes.
"""

from flexcomm.errors import (
    ConfigMismatchError,
    DeadlineExceededError,
    FlexcommError,
    InvalidArgumentError,
    InvalidTensorError,
    PeerLostError,
    TopologyError,
    TransportError,
    TransportUnavailableError,
)
from flexcomm.topology import Topology
from flexcomm.transport import Handle, Transport
from flexcomm.version import __version__
from flexcomm.world import World, connect, connect_mesh

__all__ = [
    "ConfigMismatchError",
    "DeadlineExceededError",
    "FlexcommError",
    "Handle",
    "InvalidArgumentError",
    "InvalidTensorError",
    "PeerLostError",
    "Topology",
    "TopologyError",
    "Transport",
    "TransportError",
    "TransportUnavailableError",
    "World",
    "__version__",
    "connect",
    "connect_mesh",
]
