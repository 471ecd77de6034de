"""Checks that classes of your own keep the laws of the library.

One process calls ``check_compressor`` and ``check_kernels``; all ranks of a group call ``check_transport`` together. A
broken law raises ``AssertionError`` naming the law and the case. ``COMPRESSOR_LAWS``, ``KERNEL_LAWS`` and
``TRANSPORT_LAWS`` hold the single laws, for a test of each.
"""

from flexcomm.testing.compressors import COMPRESSOR_LAWS, check_compressor
from flexcomm.testing.kernels import KERNEL_LAWS, check_kernels
from flexcomm.testing.transports import TRANSPORT_LAWS, check_transport

__all__ = ["COMPRESSOR_LAWS", "KERNEL_LAWS", "TRANSPORT_LAWS", "check_compressor", "check_kernels", "check_transport"]
