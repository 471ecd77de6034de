"""Run every test suite, one after the other, and end with one summary: ``python -m ci.test [SUITE...]``.

The MPI suite runs under ``mpirun`` with several sizes and both MPIs; the others are plain pytest runs. A suite that
cannot be started, hangs or dies counts as failed: nothing is skipped silently.
"""

from __future__ import annotations

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

from bench.errors import LauncherMissingError
from bench.launchers import Launcher, mpirun_command

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
SUITE_LIMIT_S = 1800
GRACE_S = 10
LIMIT_S = 480
MPI_SIZES = (1, 3, 4)
MPIS: tuple[Launcher, ...] = ("openmpi", "mpich")


@dataclass(frozen=True)
class Suite:
    """A name people can ask for, a label for the summary, and how to find the command and variables that run it."""

    name: str
    label: str
    find_command: Callable[[], tuple[list[str], dict[str, str]]]


@dataclass(frozen=True)
class Result:
    """What one suite came to."""

    label: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    note: str = ""


def all_suites() -> list[Suite]:
    plain: dict[str, Callable[[], tuple[list[str], dict[str, str]]]] = {
        "arch": partial(plain_command, "arch"),
        "unit": unit_command,
        "ranks": partial(paired_command, "ranks", "worksteal"),
        # By file: every worker that meets a test of the shared cluster makes one of its own.
        "emulated": partial(paired_command, "emulated", "loadfile"),
    }
    mpi = [
        Suite("mpi", f"mpi, {launcher}, {size} ranks", partial(mpi_command, launcher, size))
        for launcher in MPIS
        for size in MPI_SIZES
    ]
    return [*(Suite(name, name, find_command) for name, find_command in plain.items()), *mpi]


def plain_command(name: str) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "pytest", "-q", f"tests/{name}"], {}


def paired_command(name: str, dealt: str) -> tuple[list[str], dict[str, str]]:
    """Two tests at a time: what starts jobs waits for launchers and kernels about half of its time."""
    command, env = plain_command(name)
    return [*command, "-n", "2", "--dist", dealt], env


def unit_command() -> tuple[list[str], dict[str, str]]:
    """Unit tests compute alone, in one thread, and need nothing but a core: two files at a time."""
    command, _ = paired_command("unit", "loadfile")
    return command, {"OMP_NUM_THREADS": "1"}


def mpi_command(launcher: Launcher, size: int) -> tuple[list[str], dict[str, str]]:
    start = mpirun_command(launcher, size)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--with-mpi", "tests/mpi"]
    # One thread a rank: several ranks share a core here, and a spinning pool would starve the others.
    return [*start.argv, *pytest], {**start.env, "OMP_NUM_THREADS": "1"}


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
        passed, failed, skipped = counts_of(report)
    if note and not failed:
        failed = 1
    return Result(suite.label, passed, failed, skipped, time.monotonic() - start_s, note)


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


def counts_of(report: Path) -> tuple[int, int, int]:
    """How many tests passed, failed and were skipped. No report, or one of no tests, is a failure."""
    try:
        suites = ElementTree.parse(report).getroot().iter("testsuite")  # noqa: S314  (our own pytest wrote it)
    except (OSError, ElementTree.ParseError):
        return 0, 1, 0
    totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in totals:
            totals[name] += int(suite.get(name, "0"))
    failed = totals["failures"] + totals["errors"]
    if not totals["tests"]:
        return 0, max(failed, 1), 0
    return totals["tests"] - failed - totals["skipped"], failed, totals["skipped"]


def summarise(results: list[Result]) -> str:
    width = max(len(result.label) for result in results)
    lines = [
        f"{result.label:<{width}}  {result.passed:4d} passed  {result.failed:3d} failed  {result.skipped:3d} skipped"
        f"  {result.seconds:6.1f} s  {result.note}".rstrip()
        for result in results
    ]
    passed, failed, skipped, seconds = (
        sum(getattr(result, name) for result in results) for name in ("passed", "failed", "skipped", "seconds")
    )
    lines.append(f"{seconds:.0f} s in all; with installation, {LIMIT_S} s are what it may take on two cores")
    return "\n".join(["", "=== summary", *lines, f"{passed} passed, {failed} failed, {skipped} skipped"])


def main(wanted: list[str]) -> int:
    suites = all_suites()
    names = list(dict.fromkeys(suite.name for suite in suites))
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        print(f"there is no suite {', '.join(unknown)}; choose from {', '.join(names)}.", file=sys.stderr)
        return 2
    results: list[Result] = []
    try:
        results += (run(suite) for suite in suites if not wanted or suite.name in wanted)
    finally:
        if results:
            print(summarise(results))
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
