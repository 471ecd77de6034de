"""The GPU's kernel set: the loops of ``codec.cu``, compiled by NVRTC and launched by CuPy on torch's own stream.

Tensors are passed by address, and temporaries come from torch's allocator: nothing is copied, and one pool of memory
serves both. What is launched, and how, does not depend on CuPy: the tests' launcher runs the same text on the host.
"""

from flexcomm.kernels.gpu.kernels import GpuKernels
from flexcomm.kernels.gpu.launcher import OPTIONS, SOURCE, CupyLauncher, Job, compile_cubin

__all__ = ["OPTIONS", "SOURCE", "CupyLauncher", "GpuKernels", "Job", "compile_cubin"]
