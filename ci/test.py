"""Run every test suite, one after the other, and end with one summary: ``python -m ci.test [SUITE...]``.

The MPI suite runs under ``mpirun`` with several sizes and both MPIs; the others are plain pytest runs. A suite that
cannot be started, hangs or dies counts as failed: nothing is skipped silently.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from bench.launchers import Launcher, mpirun_command

ROOT = Path(__file__).resolve().parent.parent
SUITE_LIMIT_S = 900
MPI_SIZES = (1, 3, 4)
MPIS: tuple[Launcher, ...] = ("openmpi", "mpich")


@dataclass(frozen=True)
class Suite:
    """A name people can ask for, a label for the summary, and the command that writes a report when it is appended."""

    name: str
    label: str
    command: list[str]
    env: dict[str, str]


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
    plain = [plain_suite(name) for name in ("arch", "unit", "ranks", "emulated")]
    return plain + [mpi_suite(launcher, size) for launcher in MPIS for size in MPI_SIZES]


def plain_suite(name: str) -> Suite:
    return Suite(name, name, [sys.executable, "-m", "pytest", "-q", f"tests/{name}"], {})


def mpi_suite(launcher: Launcher, size: int) -> Suite:
    start = mpirun_command(launcher, size)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--with-mpi", "tests/mpi"]
    # One thread a rank: several ranks share a core here, and a spinning pool would starve the others.
    return Suite("mpi", f"mpi, {launcher}, {size} ranks", [*start.argv, *pytest], {**start.env, "OMP_NUM_THREADS": "1"})


def run(suite: Suite) -> Result:
    print(f"\n=== {suite.label}", flush=True)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        note = run_command([*suite.command, f"--junitxml={report}"], suite.env)
        passed, failed, skipped = counts_of(report)
    if note and not failed:
        failed = 1
    return Result(suite.label, passed, failed, skipped, time.monotonic() - start_s, note)


def run_command(command: list[str], env: dict[str, str]) -> str:
    """Run it to its end; the answer says what was wrong with that end, or nothing."""
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, stdin=subprocess.DEVNULL)
    try:
        code = process.wait(SUITE_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        return f"ended after {SUITE_LIMIT_S} s"
    except KeyboardInterrupt:
        process.wait()
        raise
    return f"exit code {code}" if code else ""


def counts_of(report: Path) -> tuple[int, int, int]:
    if not report.exists():
        return 0, 1, 0
    suites = ElementTree.parse(report).getroot().iter("testsuite")  # noqa: S314  (our own pytest wrote it)
    totals = [
        tuple(int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")) for suite in suites
    ]
    tests, failures, errors, skipped = (sum(column) for column in zip(*totals, strict=True))
    return tests - failures - errors - skipped, failures + errors, skipped


def summarise(results: list[Result]) -> str:
    width = max(len(result.label) for result in results)
    lines = [
        f"{result.label:<{width}}  {result.passed:4d} passed  {result.failed:3d} failed  {result.skipped:3d} skipped"
        f"  {result.seconds:6.1f} s  {result.note}".rstrip()
        for result in results
    ]
    passed, failed, skipped = (
        sum(getattr(result, name) for result in results) for name in ("passed", "failed", "skipped")
    )
    return "\n".join(["", "=== summary", *lines, f"{passed} passed, {failed} failed, {skipped} skipped"])


def main(wanted: list[str]) -> int:
    suites = all_suites()
    names = list(dict.fromkeys(suite.name for suite in suites))
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        print(f"there is no suite {', '.join(unknown)}; choose from {', '.join(names)}.", file=sys.stderr)
        return 2
    results = [run(suite) for suite in suites if not wanted or suite.name in wanted]
    print(summarise(results))
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
