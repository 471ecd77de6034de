"""Many laws in one start of a group of ranks, over gloo, and a verdict on each.

A law is a function of a world that all its ranks call together; it raises where it is broken:

    def a_sum_is_exact(world: flexcomm.World) -> None:
        assert world.intra.all_reduce(torch.ones(3)).wait().tolist() == [float(world.topology.local_size)] * 3

    LAWS = {"a_sum_is_exact": a_sum_is_exact}

    @pytest.fixture(scope="module", params=SHAPES, ids=str)
    def verdicts(request: pytest.FixtureRequest) -> Verdicts:
        return judge(LAWS, request.param)

    @pytest.mark.parametrize("law", LAWS)
    def test_gloo_keeps_the_law(verdicts: Verdicts, law: str) -> None:
        verdicts.check(law)

Laws travel to the ranks by pickle: functions of a module, or ``functools.partial`` of them. ``tests/mpi/conftest.py``
keeps the same laws under mpirun.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import flexcomm
from tests.ranks.processes import Outcome, failures_by_cause, observe_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flexcomm import World
    from tests.ranks.shapes import Shape

LAW_LIMIT_S = 30.0
LIMIT_S = 100.0
"""For all laws of a shape, restarts included: less than pytest gives the first test that asks for a verdict."""

# Longer than a law may take, so that ranks that wait for each other end by showing where.
TIMEOUT_S = 120.0
CONNECTING = "(connecting)"
CLOSING = "(closing)"


@dataclass(frozen=True)
class Verdicts:
    """The laws that were broken, and how: which rank was first, and where those that hung were."""

    laws: frozenset[str]
    broken: Mapping[str, str]

    def check(self, law: str) -> None:
        """Raise unless ``law`` was kept."""
        assert law in self.laws
        assert law not in self.broken, self.broken[law]


def judge(
    laws: Mapping[str, Callable[[World], object]],
    shape: Shape,
    *,
    law_limit_s: float = LAW_LIMIT_S,
    limit_s: float = LIMIT_S,
) -> Verdicts:
    """Every law's verdict, from one start of the ranks, and one more after each law that was broken."""
    deadline_s = time.monotonic() + limit_s
    broken: dict[str, str] = {}
    left = list(laws)
    while left and (left_s := deadline_s - time.monotonic()) > 0:
        failure = first_failure([(name, laws[name]) for name in left], shape, law_limit_s, left_s)
        if failure is None:
            return Verdicts(frozenset(laws), broken)
        where, text = failure
        # Ranks that cannot connect, or not close, do not tell one law from another.
        blamed = [where] if where in left else left
        broken |= dict.fromkeys(blamed, text)
        left = left[left.index(blamed[-1]) + 1 :]
    broken |= dict.fromkeys(left, f"not reached on {shape}: all laws together took longer than {limit_s:g} s")
    return Verdicts(frozenset(laws), broken)


def first_failure(
    laws: Sequence[tuple[str, Callable[[World], object]]], shape: Shape, law_limit_s: float, limit_s: float
) -> tuple[str, str] | None:
    """Where the first rank failed, and what there is to say about it; ``None`` if all laws were kept."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outcomes = observe_ranks(
            keep_laws, shape.size, laws, folder, law_limit_s, ranks_per_node=shape.ranks_per_node, limit_s=limit_s
        )
        failures = failures_by_cause(outcomes)
        if not failures:
            return None
        where = reached(folder, failures[0].rank)
        return where, f"{where} on {shape}: " + describe(failures, folder)


def reached(folder: Path, rank: int) -> str:
    """The law in which ``rank`` was last; a rank that wrote nothing had not come to connecting."""
    file = folder / f"{rank}.law"
    return file.read_text() if file.exists() else CONNECTING


def describe(failures: Sequence[Outcome], folder: Path) -> str:
    first, *others = failures
    stacks = [
        f"rank {failure.rank} was still here:\n{file.read_text()}"
        for failure in failures
        if (file := folder / f"{failure.rank}.stack").exists() and file.stat().st_size
    ]
    text = f"rank {first.rank} failed first (then {[other.rank for other in others]}):\n{first.error}"
    return "\n".join([text, *stacks])


def keep_laws(laws: Sequence[tuple[str, Callable[[World], object]]], folder: Path, law_limit_s: float) -> None:
    """What every rank does. Where it is stands in a file, because a rank that is killed cannot tell any more."""
    rank = os.environ["RANK"]
    with (folder / f"{rank}.stack").open("w") as stack:

        def enter(name: str, limit_s: float) -> None:
            (folder / f"{rank}.law").write_text(name)
            faulthandler.dump_traceback_later(limit_s, exit=True, file=stack)

        enter(CONNECTING, LAW_LIMIT_S)
        with flexcomm.connect(timeout_s=TIMEOUT_S) as world:
            for name, law in laws:
                enter(name, law_limit_s)
                law(world)
                # A law ends on all ranks before the next begins, so that all agree on which one was broken.
                world.control.barrier().wait()
            enter(CLOSING, LAW_LIMIT_S)
        faulthandler.cancel_dump_traceback_later()
