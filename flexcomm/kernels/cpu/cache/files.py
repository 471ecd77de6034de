"""Compiled kernels on disk: where they are, and how one process of a host compiles while the others wait for it.

A cache folder holds one folder per key (version, sources, processor, compiler, see :mod:`.sharing`), in which every
compiled kernel is a file. Files are written under another name and renamed, so that none is ever seen half written;
a file that is damaged all the same does not fit its checksum and counts as missing. While a kernel is compiled its
lock file is locked by ``flock``, which ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

CACHE_VARIABLE = "FLEXCOMM_CACHE_DIR"
_DIGEST_BYTES = 16
_LONGEST_WAIT_S = 600.0
"""A process that compiles for longer is taken for stopped."""
_POLL_S = 0.05

_log = logging.getLogger("flexcomm")


def cache_folders() -> list[Path]:
    """Return where compiled kernels are looked for.

    The folder that ``FLEXCOMM_CACHE_DIR`` names, or ``flexcomm`` in the user's cache folder; then a folder for
    temporary files that nobody else can have written, because what is read from it is run.
    """
    chosen, temporary = _chosen_folder(), _temporary_folder()
    return [*([chosen] if chosen else []), *([temporary] if _is_private(temporary) else [])]


def _folders_to_write() -> Iterator[Path]:
    """Yield where new kernels may go; the temporary folder is made only if one gets there."""
    if chosen := _chosen_folder():
        yield chosen
    temporary = _temporary_folder()
    with suppress(OSError):
        temporary.mkdir(mode=0o700, exist_ok=True)
    if _is_private(temporary):
        yield temporary


def _chosen_folder() -> Path | None:
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    user_cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if user_cache.is_absolute():
        return user_cache / "flexcomm"
    try:
        return Path.home() / ".cache" / "flexcomm"
    except RuntimeError:  # a user without a home, as in many containers
        return None


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"flexcomm-{os.getuid()}"


def _is_private(folder: Path) -> bool:
    """Return whether a folder is there that we made and only we can write."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return True
    warn_once(
        f"{folder} is not used for compiled kernels: others can write there, and what is in it would be run. Remove "
        f"it, or set {CACHE_VARIABLE}."
    )
    return False


@dataclass(frozen=True)
class Entry:
    """A kernel that is compiled once.

    Args:
        kernel: what the log calls it.
        name: its file, relative to a cache folder; different for everything that is compiled differently.

    """

    kernel: str
    name: str

    def read(self) -> bytes | None:
        """Return what was written, None if nothing was or if it is damaged."""
        for folder in cache_folders():
            try:
                content = (folder / self.name).read_bytes()
            except OSError:
                continue
            data = content[_DIGEST_BYTES:]
            if content[:_DIGEST_BYTES] == _digest(data):
                return data
        return None

    def write(self, data: bytes) -> None:
        """Keep ``data`` for later processes; say so in the log if there is no place for it."""
        failures = []
        for folder in _folders_to_write():
            try:
                _replace(folder / self.name, _digest(data) + data)
            except OSError as error:
                failures.append(f"{folder}: {error.strerror}")
            else:
                return
        _warn_not_kept("; ".join(failures))

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Wait until the kernel is there, or until no other process compiles it; if it is not, keep the others out.

        Where files cannot be locked, or the wait gets too long, every process compiles for itself.
        """
        with self._locked():
            if self.read() is not None:
                yield
                return
            _log.info("compiling kernel %s", self.kernel)
            start_s = time.monotonic()
            yield
            _log.info("compiled kernel %s in %.1f s", self.kernel, time.monotonic() - start_s)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        file = self._open_lock()
        if file is None:
            yield
            return
        with file:
            if self._wait_for(file):
                self._clean_up(Path(file.name))
            try:
                yield
            finally:
                # Closing is not enough: a forked child may have the file open, too.
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)

    def _open_lock(self) -> IO[str] | None:
        for folder in _folders_to_write():
            path = folder / f"{self.name}.lock"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                return path.open("a+")
            except OSError:
                continue
        return None

    def _wait_for(self, file: IO[str]) -> bool:
        """Return whether the lock is ours."""
        start_s, waited_s, holder = time.monotonic(), 0.0, ""
        while not (ours := _try_lock(file)) and self.read() is None and waited_s < _LONGEST_WAIT_S:
            if not holder:
                file.seek(0)
                holder = file.read() or "another process"
                _log.info("waiting for kernel %s, which %s compiles", self.kernel, holder)
            time.sleep(_POLL_S)
            waited_s = time.monotonic() - start_s
        if holder:
            _log.info("waited %.1f s for kernel %s, which %s compiled", waited_s, self.kernel, holder)
        return ours

    def _clean_up(self, lock: Path) -> None:
        """Name ourselves to those who wait, and remove what a killed process left behind."""
        try:
            lock.write_text(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%H:%M:%S')}")
            for leftover in lock.parent.glob(f"{Path(self.name).name}.*.tmp"):
                leftover.unlink(missing_ok=True)
        except OSError:  # a full disk: whoever waits is not told for whom
            return


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


def _warn_not_kept(failures: str) -> None:
    warn_once(
        f"compiled kernels cannot be kept, every process compiles its own ({failures or 'no folder'}). Set "
        f"{CACHE_VARIABLE} to a folder that can be written."
    )


@lru_cache(maxsize=32)
def warn_once(message: str) -> None:
    _log.warning("%s", message)
