"""Transports: a group of ranks, and the few verbs that move bytes between them."""

from flexcomm.transport.base import Handle, Transport, enqueues
from flexcomm.transport.mpi import MPITransport
from flexcomm.transport.staging import LoopbackTransport, PerDeviceTransport
from flexcomm.transport.torch_distributed import TorchTransport

__all__ = [
    "Handle",
    "LoopbackTransport",
    "MPITransport",
    "PerDeviceTransport",
    "TorchTransport",
    "Transport",
    "enqueues",
]
