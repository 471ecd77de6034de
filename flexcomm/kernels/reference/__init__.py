"""The reference: what every kernel set must compute, to the bit, in torch operations on whole tensors, on any device.

It is meant to be read, and to be compared with. Other sets keep a chunk in cache; this one makes dense temporaries.
What is sent is a mask ``[chunks, chunk_numel]``; entries are what it picks, chunk by chunk, lowest index first.
"""

from flexcomm.kernels.reference.kernels import ReferenceKernels

__all__ = ["ReferenceKernels"]
