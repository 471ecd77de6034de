"""What every suite needs before its first test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Children must be able to feel Ctrl-C. A shell's background job ignores SIGINT, and so would all it starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
