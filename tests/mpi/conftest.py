"""The whole of pytest runs on every rank: ``mpirun -n 3 python -m pytest --with-mpi tests/mpi``.

Rank 0 reports. A test that fails on any rank is printed by that rank and ends the job: the other ranks may be waiting
for it in a collective, and would wait for ever.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from mpi4py import MPI

import flexcomm
from flexcomm.abort import FORWARDING_S, write_at_once

if TYPE_CHECKING:
    from collections.abc import Iterator

RANK = MPI.COMM_WORLD.Get_rank()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--with-mpi"):
        raise pytest.UsageError("tests/mpi runs under mpirun: mpirun -n 3 python -m pytest --with-mpi tests/mpi")
    if RANK > 0:
        config.option.xmlpath = None
        config.pluginmanager.set_blocked("terminalreporter")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    if report.failed:
        text = f"\n[rank {RANK}] FAILED {item.nodeid} ({report.when})\n{report.longreprtext}\n"
        write_at_once(text)
        time.sleep(FORWARDING_S)
        MPI.COMM_WORLD.Abort(1)
    return report


@pytest.fixture(scope="session")
def world() -> Iterator[flexcomm.World]:
    """All ranks on one node, over MPI."""
    with flexcomm.connect(timeout_s=60) as connected:
        yield connected
