"""What every suite needs before its first test, and the option that says how many tests run."""

from __future__ import annotations

import gc
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

# Some virtual machines announce AMX and do not have it: oneDNN then dies of an illegal instruction in the first product
# of bfloat16 matrices. Read when that is first needed, here and in all processes that tests start.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="also run tests marked slow, as `make test-all` does")


def pytest_configure() -> None:
    """Children must be able to feel Ctrl-C and a closed terminal.

    A shell's background job ignores SIGINT, ``nohup`` SIGHUP, and all they start inherits that. A handler that does
    nothing keeps it for this process and, unlike ignoring, ends at its children.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless they are asked for, by ``--runslow`` or each by its own name."""
    if config.getoption("--runslow") or any("[" in argument for argument in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_collection_finish() -> None:
    """Let collections pass over what was imported, a million objects that stay."""
    gc.collect()
    gc.freeze()
