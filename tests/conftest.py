"""What every suite needs before its first test."""

from __future__ import annotations

import os
import signal

# Some virtual machines announce AMX and do not have it: oneDNN then dies of an illegal instruction in the first product
# of bfloat16 matrices. Read when that is first needed, here and in all processes that tests start.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def pytest_configure() -> None:
    """Children must be able to feel Ctrl-C and a closed terminal.

    A shell's background job ignores SIGINT, ``nohup`` SIGHUP, and all they start inherits that. A handler that does
    nothing keeps it for this process and, unlike ignoring, ends at its children.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
