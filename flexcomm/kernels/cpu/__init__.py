"""The CPU's kernel set: loops that numba compiles, one file per idea, and the class that shares them among threads."""

from flexcomm.kernels.cpu.kernels import CpuKernels

__all__ = ["CpuKernels"]
