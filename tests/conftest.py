"""What every suite needs before its first test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Children must be able to feel Ctrl-C and a closed terminal.

    A shell's background job ignores SIGINT, ``nohup`` SIGHUP, and all they start inherits that. A handler that does
    nothing keeps it for this process and, unlike ignoring, ends at its children.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
