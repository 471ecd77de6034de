"""Conformance checks for what people plug in: write a class with the right methods, and see whether it keeps the laws.

``check_transport`` is called by every rank of a group together, ``check_sync`` by every rank of a world, to see whether
a cluster and a compressor work together; ``check_kernels`` and ``check_compressor`` by one process. A broken law raises
``AssertionError`` naming the law and the case. The laws are also there one by one, as ``TRANSPORT_LAWS``,
``SYNC_LAWS``, ``CALL_LAWS``, ``KERNEL_LAWS`` and ``COMPRESSOR_LAWS``, so that a test can have each for itself.

``pace`` makes what crosses nodes as slow as a link of a chosen rate.
"""

from flexcomm.testing.compressors import COMPRESSOR_LAWS, check_compressor
from flexcomm.testing.kernels import KERNEL_LAWS, check_kernels
from flexcomm.testing.paced import Link, PacedTransport, pace
from flexcomm.testing.syncs import CALL_LAWS, SYNC_LAWS, check_sync
from flexcomm.testing.transports import TRANSPORT_LAWS, check_transport

__all__ = [
    "CALL_LAWS",
    "COMPRESSOR_LAWS",
    "KERNEL_LAWS",
    "SYNC_LAWS",
    "TRANSPORT_LAWS",
    "Link",
    "PacedTransport",
    "check_compressor",
    "check_kernels",
    "check_sync",
    "check_transport",
    "pace",
]
