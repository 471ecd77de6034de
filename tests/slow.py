"""Which of a test's parameters ``make test`` runs; ``make test-all`` runs all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def slow_but(usual: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return all values as parameters, marked slow but for the usual ones."""
    chosen = list(usual)
    return [value if value in chosen else slow(value) for value in values]


def slow(value: Any) -> Any:
    """Return a parameter, or a tuple of several, marked slow."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
