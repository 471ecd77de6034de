"""Run the test suites, one after the other, and end with one summary: ``python -m ci.test [--all] [SUITE...]``.

``--all`` adds the tests that are marked slow, and both MPIs with every number of ranks; docs/testing.md says what that
is. arch, unit and ranks share one pytest run, which collects and imports once; the MPI suite runs under ``mpirun``. A
suite that cannot be started, hangs or dies counts as failed: nothing is skipped silently.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cluster.launchers import Launcher, mpirun_command
from bench.errors import LauncherMissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parent.parent
SUITE_LIMIT_S = 3600
GRACE_S = 10
BUDGET_S = {False: 360, True: 3600}
"""What the tests, and all tests, may take on two cores with nothing else to do. It is compared with, not enforced."""
COUNTS = ("passed", "failed", "skipped")
NAMES = ("arch", "unit", "ranks", "emulated", "mpi")
TOGETHER = NAMES[:3]
MANY_MUTATIONS = 200_000
"""How many damaged payloads the slow tests try."""
SLOWEST = 10
LONG_TEST_S = 5.0
MPI_SIZES: dict[Launcher, tuple[int, ...]] = {"openmpi": (1, 3, 4), "mpich": (4,)}
SELECTION: dict[Launcher, tuple[str, ...]] = {
    "mpich": ("--ignore=tests/mpi/test_mixing.py", "--ignore=tests/mpi/test_optimizer.py", "-k", "not 3x1")
}
"""Both MPIs are tested with transports, and with syncs of two nodes; what rests on them, with one."""
ALL_MPI_SIZES: dict[Launcher, tuple[int, ...]] = {"openmpi": (1, 3, 4), "mpich": (1, 3, 4)}


@dataclass(frozen=True)
class Suite:
    """A label for the summary, and how to find the command and variables that run it."""

    label: str
    find_command: Callable[[], tuple[list[str], dict[str, str]]]


@dataclass(frozen=True)
class TimedTest:
    """One test that ran, and how long it took."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Result:
    """What one suite came to."""

    label: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    tests: tuple[TimedTest, ...] = ()
    note: str = ""


def plan_suites(names: Sequence[str], *, slow: bool) -> list[Suite]:
    suites = []
    if together := [name for name in TOGETHER if name in names]:
        suites.append(Suite(", ".join(together), partial(parallel_command, together, slow=slow)))
    if "emulated" in names:
        # By file: every worker that meets a test of the shared cluster makes one of its own.
        suites.append(Suite("emulated", partial(parallel_command, ["emulated"], slow=slow, dist="loadfile")))
    if "mpi" in names:
        suites += (
            Suite(f"mpi, {launcher}, {size} ranks", partial(mpi_command, launcher, size, slow=slow))
            for launcher, sizes in (ALL_MPI_SIZES if slow else MPI_SIZES).items()
            for size in sizes
        )
    return suites


def pytest_command(names: Sequence[str], *, slow: bool) -> tuple[list[str], dict[str, str]]:
    """Return a run of these folders.

    One thread a process, because several of them share a core; and bytecode is kept even where the environment says
    otherwise, because a hundred processes import the same files.
    """
    env = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    options = []
    if slow:
        options, env = ["--runslow"], {**env, "FLEXCOMM_MUTATIONS": str(MANY_MUTATIONS)}
    return [sys.executable, "-m", "pytest", "-q", *options, *(f"tests/{name}" for name in names)], env


def parallel_command(names: Sequence[str], *, slow: bool, dist: str = "worksteal") -> tuple[list[str], dict[str, str]]:
    """Two tests at a time: one computes in one thread, and what starts jobs waits for them half of its time."""
    command, env = pytest_command(names, slow=slow)
    return [*command, "-n", "2", "--dist", dist], env


def mpi_command(launcher: Launcher, size: int, *, slow: bool) -> tuple[list[str], dict[str, str]]:
    start = mpirun_command(launcher, size)
    command, env = pytest_command(["mpi"], slow=slow)
    # Hypothesis would be imported by every rank, for a summary of nothing.
    command += ["-p", "no:hypothesispytest"]
    selection = () if slow else SELECTION.get(launcher, ())
    return [*start.argv, *command, *selection, "-p", "no:cacheprovider", "--with-mpi"], {**start.env, **env}


def run(suite: Suite) -> Result:
    print(f"\n=== {suite.label}", flush=True)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        try:
            command, env = suite.find_command()
            note = run_command([*command, f"--junitxml={report}"], env)
        except LauncherMissingError as error:
            note = str(error)
        passed, failed, skipped, tests = read_report(report)
    if note and not failed:
        failed = 1
    return Result(suite.label, passed, failed, skipped, time.monotonic() - start_s, tests, note)


def run_command(command: list[str], env: dict[str, str]) -> str:
    """Run it to its end; the answer says what was wrong with that end, or nothing. Nothing of it is left."""
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, stdin=subprocess.DEVNULL)
    try:
        code = process.wait(SUITE_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"ended after {SUITE_LIMIT_S} s"
    finally:
        end(process)
    return f"exit code {code}" if code else ""


def end(process: subprocess.Popen[bytes]) -> None:
    """End it, if it still runs; mpirun gets time to end its ranks."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_report(report: Path) -> tuple[int, int, int, tuple[TimedTest, ...]]:
    """Return how many tests passed, failed and were skipped, and all of them with their times.

    No report, or one of no tests, is a failure.
    """
    try:
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))  # noqa: S314  (our own pytest wrote it)
    except (OSError, ElementTree.ParseError):
        return 0, 1, 0, ()
    count, failures, errors, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    if not count:
        return 0, max(failed, 1), 0, ()
    tests = tuple(
        TimedTest(f"{test.get('classname', '').replace('.', '/')}.py::{test.get('name')}", float(test.get("time", "0")))
        for suite in suites
        for test in suite.iter("testcase")
    )
    return count - failed - skipped, failed, skipped, tests


def summarise(results: list[Result], budget_s: float) -> str:
    width = max(len(result.label) for result in results)
    lines = [
        f"{result.label:<{width}}  {result.passed:4d} passed  {result.failed:3d} failed  {result.skipped:3d} skipped"
        f"  {result.seconds:6.1f} s  {result.note}".rstrip()
        for result in results
    ]
    passed, failed, skipped = (sum(getattr(result, name) for result in results) for name in COUNTS)
    seconds = sum(result.seconds for result in results)
    over_s = seconds - budget_s
    compared = f"{over_s:.0f} s over" if over_s > 0 else f"{-over_s:.0f} s less than"
    return "\n".join(
        [
            *("", "=== slowest tests", *slowest_tests(results)),
            *("", "=== summary", *lines),
            f"{seconds:.0f} s in all, {compared} the budget of {budget_s:.0f} s on two idle cores",
            f"{passed} passed, {failed} failed, {skipped} skipped",
        ]
    )


def slowest_tests(results: Sequence[Result]) -> list[str]:
    """Return the ten slowest tests, and all others that took long."""
    found = sorted(
        ((test.seconds, result.label, test.name) for result in results for test in result.tests), reverse=True
    )
    shown = [row for number, row in enumerate(found) if number < SLOWEST or row[0] > LONG_TEST_S]
    return [f"{seconds:6.1f} s  {name}  ({label})" for seconds, label, name in shown]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.test", description="Run the test suites.")
    parser.add_argument("--all", action="store_true", help="slow tests, too, and both MPIs with 1, 3 and 4 ranks")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(NAMES)}; else all of them")
    wanted = parser.parse_args(arguments)
    unknown = sorted(set(wanted.suites) - set(NAMES))
    if unknown:
        print(f"there is no suite {', '.join(unknown)}; choose from {', '.join(NAMES)}.", file=sys.stderr)
        return 2
    results: list[Result] = []
    try:
        results += (run(suite) for suite in plan_suites(wanted.suites or NAMES, slow=wanted.all))
    finally:
        if results:
            print(summarise(results, BUDGET_S[wanted.all]))
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
