"""The error of the runtime model, which imports neither torch nor flexcomm and so cannot use their errors."""

from __future__ import annotations

__all__ = ["ModelError", "check_at_least", "check_between"]


class ModelError(ValueError):
    """Impossible figures for a cluster, workload or schedule; the message names them and says what was needed."""


def check_at_least(name: str, number: float, least: float) -> None:
    """Raise ``ModelError`` unless ``number`` is ``least`` or more; NaN is not."""
    if not number >= least:
        raise ModelError(f"got {name} = {number}, needed {least} or more.")


def check_between(name: str, number: float, least: float, most: float) -> None:
    """Raise ``ModelError`` unless ``number`` lies in [``least``, ``most``]; NaN does not."""
    if not least <= number <= most:
        raise ModelError(f"got {name} = {number}, needed a number between {least} and {most}.")
