"""Ranks that were kept from law to law end with the tests."""

from __future__ import annotations

from tests.ranks.laws import close_pools


def pytest_sessionfinish() -> None:
    close_pools()
