"""The one error of the runtime model. This room imports neither torch nor flexcomm, so it cannot share their tree."""

from __future__ import annotations

__all__ = ["ModelError", "check_at_least", "check_between"]


class ModelError(ValueError):
    """Figures that describe no cluster, workload or schedule; the message says which and what was needed."""


def check_at_least(name: str, number: float, least: float) -> None:
    """Return when ``number`` is ``least`` or more; NaN is not."""
    if not number >= least:
        raise ModelError(f"got {name} = {number}, needed {least} or more.")


def check_between(name: str, number: float, least: float, most: float) -> None:
    """Return when ``number`` lies in [``least``, ``most``]; NaN does not."""
    if not least <= number <= most:
        raise ModelError(f"got {name} = {number}, needed a number between {least} and {most}.")
