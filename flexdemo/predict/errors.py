"""The error of ``flexdemo predict``: the command line prints it and exits with its code."""

from __future__ import annotations

__all__ = ["PredictError"]


class PredictError(Exception):
    """An argument or a file is invalid; the message says what was needed and what to do."""

    exit_code = 2
