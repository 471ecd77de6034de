"""Laws: functions of a world that all its ranks call together, and that raise where they are broken.

    def a_sum_is_exact(world: flexcomm.World) -> None:
        assert world.intra.all_reduce(torch.ones(3)).wait().tolist() == [float(world.topology.local_size)] * 3

    LAWS = {"a_sum_is_exact": a_sum_is_exact}

    @pytest.mark.parametrize(("shape", "law"), cases(SHAPES, LAWS))
    def test_gloo_keeps_the_law(shape: Shape, law: str) -> None:
        keep(LAWS[law], shape)

``keep`` runs a law on ranks of this shape that are connected over gloo. They are started once, by the first law that
asks for them, and kept for all later ones until a law is broken: then they are ended, and the next law gets new ones.
Every worker of pytest-xdist has ranks of its own.

Laws travel to the ranks by pickle: functions of a module, or ``functools.partial`` of them. ``tests/mpi/conftest.py``
keeps the same laws under mpirun.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import flexcomm
from tests.ranks.processes import Outcome, check_end, collect, end_ranks, failures_by_cause, start_ranks
from tests.ranks.shapes import ALWAYS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.connection import Connection

    from flexcomm import World
    from tests.ranks.shapes import Shape

LAW_LIMIT_S = 30.0
GRACE_S = 10.0
# Longer than a law may take, so that ranks that wait for each other end by showing where.
TIMEOUT_S = 120.0

_kept: dict[tuple[Shape, Callable[[], object] | None], RankPool] = {}


def cases(
    shapes: Iterable[Shape],
    laws: Iterable[str] | Callable[[Shape], Iterable[str]],
    usual: Callable[[Shape], Iterable[str]] | None = None,
) -> list[Any]:
    """Return parameters ``shape`` and ``law``, the latter by name, for every law in every shape.

    ``usual`` names the laws that ``make test`` keeps in a shape; by default all of them in the shapes of ``ALWAYS``.
    """
    found = []
    for shape in shapes:
        names = list(laws(shape) if callable(laws) else laws)
        quick = set(usual(shape)) if usual else set(names if shape in ALWAYS else [])
        for law in names:
            marks = [] if law in quick else [pytest.mark.slow]
            found.append(pytest.param(shape, law, id=f"{shape}-{law}", marks=marks))
    return found


def keep(
    law: Callable[[World], object],
    shape: Shape,
    limit_s: float = LAW_LIMIT_S,
    prepare: Callable[[], object] | None = None,
) -> None:
    """Raise unless all ranks of a world of this shape keep ``law`` within the limit.

    ``prepare`` is called on each rank before it connects. Ranks are kept for laws with an equal one.
    """
    pool = _kept.pop((shape, prepare), None) or RankPool(shape, prepare)
    pool.keep(law, limit_s)
    _kept[shape, prepare] = pool


def close_pools() -> None:
    """End all ranks that are still kept; raise if one of them did not end well."""
    while _kept:
        _kept.popitem()[1].close()


class RankPool:
    """The ranks of one shape, connected once. A pool whose law was broken is over."""

    def __init__(self, shape: Shape, prepare: Callable[[], object] | None) -> None:
        self._shape = shape
        self._folder = tempfile.TemporaryDirectory()
        self._ranks = start_ranks(
            keep_laws, shape.size, Path(self._folder.name), prepare, ranks_per_node=shape.ranks_per_node
        )
        self._require_all("connecting", LAW_LIMIT_S)

    def keep(self, law: Callable[[World], object], limit_s: float) -> None:
        for _, pipe in self._ranks:
            pipe.send((law, limit_s))
        self._require_all(getattr(law, "__name__", str(law)), limit_s)

    def close(self) -> None:
        for _, pipe in self._ranks:
            pipe.send(None)
        outcomes = collect(self._ranks, GRACE_S)
        for outcome in outcomes:
            check_end(outcome, self._ranks[outcome.rank][0])
        self._require(outcomes, "closing")
        self._end()

    def _require_all(self, what: str, limit_s: float) -> None:
        # Ranks end themselves at the limit and say where they were: the parent leaves them time for it.
        self._require(collect(self._ranks, limit_s + GRACE_S), what)

    def _require(self, outcomes: list[Outcome], what: str) -> None:
        failures = failures_by_cause(outcomes)
        if failures:
            text = f"{what} on {self._shape}: {describe(failures, Path(self._folder.name))}"
            self._end()
            raise AssertionError(text)

    def _end(self) -> None:
        end_ranks(self._ranks)
        self._folder.cleanup()


def describe(failures: Sequence[Outcome], folder: Path) -> str:
    first, *others = failures
    stacks = [
        f"rank {failure.rank} was still here:\n{file.read_text()}"
        for failure in failures
        if (file := folder / f"{failure.rank}.stack").exists() and file.stat().st_size
    ]
    text = f"rank {first.rank} failed first (then {[other.rank for other in others]}):\n{first.error}"
    return "\n".join([text, *stacks])


def keep_laws(pipe: Connection, folder: Path, prepare: Callable[[], object] | None) -> None:
    """What every rank does. Where it hung stands in a file, because a rank that is ended cannot tell any more."""
    with (folder / f"{os.environ['RANK']}.stack").open("w") as stack:
        faulthandler.dump_traceback_later(LAW_LIMIT_S, exit=True, file=stack)
        if prepare is not None:
            prepare()
        with flexcomm.connect(timeout_s=TIMEOUT_S) as world:
            pipe.send((None, None))
            while (given := pipe.recv()) is not None:
                law, limit_s = given
                faulthandler.dump_traceback_later(limit_s, exit=True, file=stack)
                law(world)
                # What a law leaves in cycles keeps groups alive, whose threads wake up a hundred times per second. What
                # is still used stays, as caches do: the next collection need not look at it.
                gc.collect()
                gc.freeze()
                # A law ends on all ranks before the next begins, so that all agree on which one was broken.
                world.control.barrier().wait()
                faulthandler.cancel_dump_traceback_later()
                pipe.send((None, None))
        faulthandler.cancel_dump_traceback_later()
    pipe.send((None, None))
