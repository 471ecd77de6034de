"""The cache of compiled kernels: the files and their locks, and how numba is brought to use them.

A package of its own, because nothing of it is compiled into a kernel: changing it compiles nothing anew.
"""

from flexcomm.kernels.cpu.cache.files import CACHE_VARIABLE, Entry, cache_folders
from flexcomm.kernels.cpu.cache.sharing import folder_of, share

__all__ = ["CACHE_VARIABLE", "Entry", "cache_folders", "folder_of", "share"]
