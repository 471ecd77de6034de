"""The GPU's kernel set: one launch a bucket, compiled by NVRTC and launched by CuPy on torch's own stream.

Tensors are passed by address, and temporaries come from torch's allocator: nothing is copied, and one pool of memory
serves both. What is launched, and how, does not depend on CuPy: the tests run the same text on the host.
"""

from flexcomm.kernels.gpu.compile import OPTIONS, compile_cubin
from flexcomm.kernels.gpu.kernels import GpuKernels, Launcher
from flexcomm.kernels.gpu.launcher import CupyLauncher
from flexcomm.kernels.gpu.source import kernel_text

__all__ = ["OPTIONS", "CupyLauncher", "GpuKernels", "Launcher", "compile_cubin", "kernel_text"]
