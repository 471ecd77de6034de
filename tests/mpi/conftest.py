"""The whole of pytest runs on every rank: ``mpirun -n 3 python -m pytest --with-mpi tests/mpi``.

Rank 0 reports. A test that fails on any rank is printed by that rank and ends the job: the other ranks may be waiting
for it in a collective, and would wait for ever.

``shaped`` is a world of each of the usual shapes, out of the ranks of one start of four:

    @pytest.mark.mpi
    @pytest.mark.parametrize(("shaped", "law"), cases(SHAPES, LAWS), indirect=["shaped"], scope="module")
    def test_mpi_keeps_the_law(shaped: Shaped, law: str) -> None:
        shaped.keep(LAWS[law])
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from mpi4py import MPI

import flexcomm
from flexcomm.bootstrap.job import FORWARDING_S, write_at_once
from tests.mpi.shaped import Shaped, connect_the_first
from tests.ranks.shapes import SHAPES

if TYPE_CHECKING:
    from collections.abc import Iterator

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
# One start of four ranks holds worlds of all shapes; a smaller one would only repeat some of them.
NEED_FOUR = ["test_mixing.py", "test_optimizer.py", "test_shapes.py", "test_sync.py"]
collect_ignore = NEED_FOUR if max(shape.size for shape in SHAPES) > SIZE else []


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


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def shaped(request: pytest.FixtureRequest, world: flexcomm.World) -> Iterator[Shaped]:
    """A world of the first ranks, over MPI; the others look on."""
    connected = connect_the_first(request.param, world)
    yield Shaped(request.param, world, connected)
    if connected is not None:
        connected.close()
