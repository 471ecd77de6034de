"""The versions of this library and of the torch it is tested with, and access to what torch keeps private."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch.torch_version import TorchVersion

from flexcomm.errors import TorchVersionError

__version__ = "0.1.0"
TESTED_VERSIONS = ("2.13.0", "2.14.1", "2.15.0")
TESTED_ON = "2026-11-18"

log = logging.getLogger(__name__)


def private(owner: object, *names: str) -> Any:  # torch gives no types to what it keeps private
    """Return ``owner.name.name...``; raise ``TorchVersionError`` if this torch has no such attribute."""
    for name in names:
        try:
            owner = getattr(owner, name)
        except AttributeError as error:
            kind = owner if isinstance(owner, type) else type(owner)
            raise missing(f"{kind.__name__}.{name}") from error
    return owner


def missing(name: str) -> TorchVersionError:
    return TorchVersionError(
        f"torch {torch.__version__} has no {name}, which torch keeps private and flexcomm {__version__} needs. Install "
        f"a torch it was tested with ({', '.join(TESTED_VERSIONS)}; pip install torch=={TESTED_VERSIONS[-1]}), or a "
        f"newer flexcomm."
    )


@cache
def log_untested_version() -> None:
    """Warn, once in a process, if this torch is newer than all versions that were tested."""
    public = TorchVersion(torch.__version__.split("+")[0])
    if public > TESTED_VERSIONS[-1]:
        tested = f"{', '.join(TESTED_VERSIONS)}; on {TESTED_ON}"
        message = "torch %s is newer than those flexcomm %s was tested with (%s). If anything fails, try torch %s."
        log.warning(message, torch.__version__, __version__, tested, TESTED_VERSIONS[-1])
