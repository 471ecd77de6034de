"""The process that ranks are forked from is ready before the first test, and ranks that were kept end with the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


STARTING_JOBS = {"test_bench_demo.py", "test_examples.py", "test_launchers.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let whole jobs come first: they take longest, and there are no ranks yet whose threads wake up beside them."""
    items.sort(key=lambda item: item.path.name not in STARTING_JOBS)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Wait here for imports, and for kernels that were never compiled on this machine: a test has a time limit."""
    config = session.config
    if hasattr(config, "workerinput") or not (config.getoption("numprocesses", None) or config.option.collectonly):
        # A process that only hands out tests does without torch.
        from tests.ranks.laws import close_pools
        from tests.ranks.processes import context

        config.add_cleanup(close_pools)
        process = context.Process(target=str)
        process.start()
        process.join()
