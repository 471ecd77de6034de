"""The cache of compiled kernels: one process of a machine compiles, the others wait for it and load the result.

numba's own cache (``cache=True``) is found by the path of the source file, looks at that file alone, and lets every
process compile for itself; its cache locators, which can be replaced publicly, change the path alone.

A cache folder holds one folder per key (version, sources, processor, compiler), in which every compiled kernel is a
file. Files are written under another name and renamed, so that none is seen half written; one that is damaged all the
same does not fit its checksum and counts as missing. While a kernel is compiled its lock file is locked by ``flock``,
which ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import socket
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np

from flexcomm.versions import __version__

try:
    from numba.core.compiler import CompileResult
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.runtime.nrt import rtsys
    from numba.core.serialize import dumps, loads

    _MISSING = ""
except ImportError as error:
    _MISSING = str(error)

CACHE_VARIABLE = "FLEXCOMM_CACHE_DIR"
_DIGEST_BYTES = 16
_LONGEST_WAIT_S = 600.0
"""A process that compiles for longer is taken for stopped."""
_POLL_S = 0.05
_FLAGS = (
    *("BOUNDSCHECK", "CPU_FEATURES", "CPU_NAME", "DEBUGINFO_DEFAULT", "DEBUG_NRT", "DISABLE_INTEL_SVML", "ENABLE_AVX"),
    *("ENABLE_PROFILING", "EXTEND_VARIABLE_LIFETIMES", "JIT_COVERAGE", "LLVM_REFPRUNE_FLAGS", "LLVM_REFPRUNE_PASS"),
    *("LOOP_VECTORIZE", "OPT", "SLP_VECTORIZE", "USING_SVML"),
)
"""What of numba's configuration changes the code it generates."""

_log = logging.getLogger("flexcomm")


def cache_folders(*, to_write: bool = False) -> Iterator[Path]:
    """Yield where compiled kernels are looked for.

    The folder that ``FLEXCOMM_CACHE_DIR`` names, or ``flexcomm`` in the user's cache folder; then a folder for
    temporary files that nobody else can have written, because what is read from it is run. That one is made only if a
    kernel is to be written and gets there.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        yield Path(chosen).expanduser().absolute()
    elif (user_cache := Path(os.environ.get("XDG_CACHE_HOME", ""))).is_absolute():
        yield user_cache / "flexcomm"
    else:
        with suppress(RuntimeError):  # a user without a home, as in many containers
            yield Path.home() / ".cache" / "flexcomm"
    temporary = Path(tempfile.gettempdir()) / f"flexcomm-{os.getuid()}"
    try:
        if to_write:
            temporary.mkdir(mode=0o700, exist_ok=True)
        found = temporary.lstat()
    except OSError:
        return
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        yield temporary
        return
    warn_once(
        f"{temporary} is not used for compiled kernels: others can write there, and what is in it would be run. Remove "
        f"it, or set {CACHE_VARIABLE}."
    )


@dataclass(frozen=True)
class Entry:
    """A kernel that is compiled once, and its file relative to a cache folder, another for other machine code."""

    kernel: str
    name: str

    def read(self) -> bytes | None:
        """Return what was written, None if nothing was or if it is damaged."""
        for folder in cache_folders():
            with suppress(OSError):
                content = (folder / self.name).read_bytes()
                if content[:_DIGEST_BYTES] == _digest(content[_DIGEST_BYTES:]):
                    return content[_DIGEST_BYTES:]
        return None

    def write(self, data: bytes) -> None:
        """Keep ``data`` for later processes; say so in the log if there is no place for it."""
        failures = []
        for folder in cache_folders(to_write=True):
            try:
                _replace(folder / self.name, _digest(data) + data)
            except OSError as error:
                failures.append(f"{folder}: {error.strerror}")
            else:
                return
        warn_once(
            f"compiled kernels cannot be kept, every process compiles its own ({'; '.join(failures) or 'no folder'}). "
            f"Set {CACHE_VARIABLE} to a folder that can be written."
        )

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Wait until the kernel is there, or until no other process compiles it; if it is not, keep the others out.

        Where files cannot be locked, or the wait gets too long, every process compiles for itself.
        """
        lock = self._open_lock()
        try:
            if lock is not None:
                self._wait_for(lock)
            if self.read() is not None:
                yield
                return
            _log.info("compiling kernel %s", self.kernel)
            start_s = time.monotonic()
            yield
            _log.info("compiled kernel %s in %.1f s", self.kernel, time.monotonic() - start_s)
        finally:
            if lock is not None:
                # Closing is not enough: a forked child may have the file open, too.
                with lock, suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_UN)

    def is_compiled_elsewhere(self) -> bool:
        """Return whether another process compiles the kernel now."""
        lock = None if self.read() is not None else self._open_lock()
        if lock is None:
            return False
        with lock:
            try:
                return not _try_lock(lock)
            finally:
                # As in compiling(): a forked child may have the file open, too.
                with suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_UN)

    def _open_lock(self) -> IO[str] | None:
        for folder in cache_folders(to_write=True):
            path = folder / f"{self.name}.lock"
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                return path.open("a+")
        return None

    def _wait_for(self, lock: IO[str]) -> None:
        """Wait for the lock, or for the kernel; with the lock, name ourselves to those who wait, and clean up."""
        start_s, waited_s, holder = time.monotonic(), 0.0, ""
        while not (ours := _try_lock(lock)) and self.read() is None and waited_s < _LONGEST_WAIT_S:
            if not holder:
                lock.seek(0)
                holder = lock.read() or "another process"
                _log.info("waiting for kernel %s, which %s compiles", self.kernel, holder)
            time.sleep(_POLL_S)
            waited_s = time.monotonic() - start_s
        if holder:
            _log.info("waited %.1f s for kernel %s, which %s compiled", waited_s, self.kernel, holder)
        if ours:
            path = Path(lock.name)
            with suppress(OSError):  # a full disk: whoever waits is not told for whom
                path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%H:%M:%S')}")
                for left_by_a_killed_process in path.parent.glob(f"{path.stem}.*.tmp"):
                    left_by_a_killed_process.unlink(missing_ok=True)


def _try_lock(file: IO[str]) -> bool:
    """Return whether nobody else holds the lock; a file system without locks has nobody who does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        warn_once(f"{Path(file.name).parent} cannot be locked ({error.strerror}): every process compiles for itself")
    return True


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


@lru_cache(maxsize=32)
def warn_once(message: str) -> None:
    _log.warning("%s", message)


def share(dispatcher: Any, sources: str) -> None:  # Any: the dispatcher is of one of numba's private classes
    """Let a dispatcher use what any process of this host compiled, and compile for all of them what none did.

    ``sources`` is a digest of all sources that are compiled into it.
    """
    if missing := _MISSING or _find_missing(dispatcher):
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


def is_compiled_elsewhere(dispatcher: Any, signature: Any) -> bool:
    """Return whether another process of this host compiles what a dispatcher would."""
    cache = dispatcher._cache  # noqa: SLF001
    is_here = not isinstance(cache, _Cache) or signature.args in dispatcher.overloads
    return not is_here and cache.entry_of(signature).is_compiled_elsewhere()


def _find_missing(dispatcher: Any) -> str:
    needed = ((dispatcher, ("_cache", "compile", "overloads", "py_func")), (CompileResult, ("_reduce", "_rebuild")))
    missing = [name for owner, names in needed for name in names if not hasattr(owner, name)]
    return f"no {', '.join(missing)}" if missing else ""


class _Cache:
    """What numba asks before it compiles, and tells afterwards: stands in for ``numba.core.caching.FunctionCache``."""

    cache_path = None

    def __init__(self, function: Any, sources: str) -> None:
        self._function, self._sources = function, sources

    def entry_of(self, signature: Any) -> Entry:
        function = self._function
        key = _hash(function.__module__, function.__qualname__, signature)
        return Entry(function.__name__, f"{folder_of(self._sources)}/{function.__name__}-{key}")

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
        if result.library.has_dynamic_globals:
            warn_once(f"kernel {self._function.__name__} holds addresses of this process: every process compiles it")
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
    key = _hash(sources, versions, flags, *_processor())
    return f"kernels/{__version__}-{sys.implementation.cache_tag}-numba{numba.__version__}-{key}"


@lru_cache(maxsize=1)
def _processor() -> tuple[str, str, str]:
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _hash(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
