"""What malloc does with memory that was freed, which decides what temporaries cost.

glibc maps every block of more than 32 MiB afresh and gives it back when it is freed, so an operation that returns so
large a tensor pays for finding its pages, about as much as for the arithmetic. Smaller blocks are kept and used again.
A float32 tensor of 8.4 M elements is just above that border.
"""

import ctypes

_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_NEVER_TRIM = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed, however large, until the process ends; False if this is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER_TRIM))
