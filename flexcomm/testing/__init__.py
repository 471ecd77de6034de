"""Checks that classes of your own keep the laws of the library.

One process calls ``check_compressor`` and ``check_kernels``. All ranks of a group call ``check_transport`` together,
all ranks of a world ``check_sync``, which shows whether a cluster and a compressor work together. A broken law raises
``AssertionError`` naming the law and the case. ``TRANSPORT_LAWS``, ``SYNC_LAWS``, ``CALL_LAWS``, ``KERNEL_LAWS`` and
``COMPRESSOR_LAWS`` hold the single laws, for a test of each.

``pace`` makes the links between nodes as slow as a chosen rate.
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
