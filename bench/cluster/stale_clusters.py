"""A private folder per cluster, which outlives its owner only if the owner was killed with SIGKILL.

The namespaces of a cluster die with its owner (see ``netns``), so a folder is all that can be left. The owner holds a
lock on a file in it; the kernel drops the lock with the owner, so a folder whose lock is free is stale.
Unlike a process id, a lock is neither reused nor misread from another container that shares the temporary folder.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PREFIX = "flexcomm-cluster-"
_LOCK = "lock"


@contextmanager
def private_folder() -> Iterator[Path]:
    """Hold a new, locked folder; it is gone afterwards, however the block ends."""
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
    with ExitStack() as stack:
        # Cleaning is arranged before there is anything to clean: Ctrl-C may come between any two lines.
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(mode=0o755)
        lock = stack.enter_context((folder / _LOCK).open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def stale_folders() -> list[Path]:
    """Return the folders of clusters whose owner has ended."""
    return sorted(f for f in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if _is_stale(f))


def remove_stale_folders() -> list[Path]:
    """Remove the folders of clusters whose owner has ended, and only those; return the removed ones."""
    removed = stale_folders()
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return [folder for folder in removed if not folder.exists()]


def _is_stale(folder: Path) -> bool:
    try:
        with (folder / _LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        # Locked by its owner, someone else's, or not locked yet: in doubt it is not stale.
        return False
