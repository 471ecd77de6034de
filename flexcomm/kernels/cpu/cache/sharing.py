"""How numba's dispatchers use the cache: the only module that touches numba's private names.

numba's own cache (``cache=True``) is found by the path of the source file, looks at that file alone, and lets every
process compile for itself. Its cache locators, which can be replaced publicly, change the path alone.
"""

from __future__ import annotations

import hashlib
import sys
from functools import lru_cache
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np

from flexcomm.kernels.cpu.cache.files import Entry, warn_once
from flexcomm.version import __version__

try:
    from numba.core.compiler import CompileResult
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.runtime.nrt import rtsys
    from numba.core.serialize import dumps, loads

    _MISSING = None
except ImportError as error:
    _MISSING = str(error)

_FLAGS = (
    "BOUNDSCHECK",
    "CPU_FEATURES",
    "CPU_NAME",
    "DEBUGINFO_DEFAULT",
    "DEBUG_NRT",
    "DISABLE_INTEL_SVML",
    "ENABLE_AVX",
    "ENABLE_PROFILING",
    "EXTEND_VARIABLE_LIFETIMES",
    "JIT_COVERAGE",
    "LLVM_REFPRUNE_FLAGS",
    "LLVM_REFPRUNE_PASS",
    "LOOP_VECTORIZE",
    "OPT",
    "SLP_VECTORIZE",
    "USING_SVML",
)
"""What of numba's configuration changes the code it generates."""


def share(dispatcher: Any, sources: str) -> None:  # Any: the dispatcher is of one of numba's private classes
    """Let a dispatcher use what any process of this host compiled, and compile for all of them what none did.

    Args:
        dispatcher: what ``numba.njit`` returned.
        sources: digest of all sources that are compiled into it.

    """
    missing = _MISSING or _find_missing(dispatcher)
    if missing:
        warn_once(f"numba {numba.__version__} is not one we know ({missing}): every process compiles its own kernels")
        return
    cache, compile_here = _Cache(dispatcher.py_func, sources), dispatcher.compile

    def compile_once(signature: Any) -> Any:
        # numba's lock first, then the entry's, in all threads: two of them taken in different order would deadlock.
        with global_compiler_lock:
            if signature in dispatcher.overloads or cache.entry_of(signature).read() is not None:
                return compile_here(signature)
            with cache.entry_of(signature).compiling():
                return compile_here(signature)

    dispatcher.compile, dispatcher._cache = compile_once, cache  # noqa: SLF001


def _find_missing(dispatcher: Any) -> str | None:
    needed = ((dispatcher, ("_cache", "compile", "overloads", "py_func")), (CompileResult, ("_reduce", "_rebuild")))
    missing = [name for owner, names in needed for name in names if not hasattr(owner, name)]
    return f"no {', '.join(missing)}" if missing else None


class _Cache:
    """What numba asks before it compiles, and tells afterwards: stands in for ``numba.core.caching.FunctionCache``."""

    cache_path = None

    def __init__(self, function: Any, sources: str) -> None:
        self._function, self._sources = function, sources

    def entry_of(self, signature: Any) -> Entry:
        function = self._function
        digest = _digest(function.__module__, function.__qualname__, signature)
        return Entry(function.__name__, f"{folder_of(self._sources)}/{function.__name__}-{digest}")

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        data = self.entry_of(signature).read()
        if data is None:
            return None
        # All that machine code needs. numba refreshes the whole context here, which compiling alone needs: 0.2 s.
        rtsys.initialize(target_context)
        try:
            return CompileResult._rebuild(target_context, *loads(data))  # type: ignore[no-untyped-call]  # noqa: SLF001
        except Exception as error:  # whatever it is, compiling is the remedy
            warn_once(f"kernel {self._function.__name__} is compiled again, it cannot be loaded: {error!r}")
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if result.library.has_dynamic_globals:  # addresses of this process
            return
        try:
            data: bytes = dumps(result._reduce())  # type: ignore[no-untyped-call]  # noqa: SLF001
        except Exception as error:  # what was compiled works all the same
            warn_once(f"kernel {self._function.__name__} cannot be kept for later processes: {error!r}")
        else:
            self.entry_of(signature).write(data)


def folder_of(sources: str) -> str:
    """Return a name that is the same wherever the same machine code comes out, whatever the path of the sources."""
    flags = [repr(getattr(numba.config, flag, None)) for flag in _FLAGS]
    versions = (sys.version, numba.__version__, llvmlite.__version__, np.__version__)
    digest = _digest(sources, versions, flags, *_processor())
    return f"kernels/{__version__}-{sys.implementation.cache_tag}-numba{numba.__version__}-{digest}"


@lru_cache(maxsize=1)
def _processor() -> tuple[str, str, str]:
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
