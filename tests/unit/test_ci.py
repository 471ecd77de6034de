"""A suite that cannot start, dies or tests nothing counts as failed, and the summary says so."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from bench.errors import LauncherMissingError
from ci import test as ci

if TYPE_CHECKING:
    from pathlib import Path


def suite_that_writes(report: str, code: int = 0) -> ci.Suite:
    program = f"import sys; open(sys.argv[1].split('=')[1], 'w').write({report!r}); sys.exit({code})"
    return ci.Suite("it", "it", lambda: ([sys.executable, "-c", program], {}))


GOOD = '<testsuites><testsuite tests="5" failures="0" errors="0" skipped="2"/></testsuites>'
BAD = '<testsuites><testsuite tests="5" failures="1" errors="1" skipped="0"/></testsuites>'


@pytest.mark.parametrize(
    ("report", "code", "counts"),
    [
        (GOOD, 0, (3, 0, 2)),
        (BAD, 1, (3, 2, 0)),
        (GOOD, 1, (3, 1, 2)),
        ("", 0, (0, 1, 0)),
        ("<testsuites/>", 0, (0, 1, 0)),
        ('<testsuites><testsuite tests="0"/></testsuites>', 0, (0, 1, 0)),
    ],
    ids=["good", "failures", "good but died", "empty report", "no suite", "no tests"],
)
def test_a_suite_passes_only_if_it_tested_something_and_ended_well(
    report: str, code: int, counts: tuple[int, int, int]
) -> None:
    result = ci.run(suite_that_writes(report, code))
    assert (result.passed, result.failed, result.skipped) == counts


def test_a_suite_whose_launcher_is_missing_fails_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> tuple[list[str], dict[str, str]]:
        raise LauncherMissingError("mpich is not installed")

    suites = [ci.Suite("one", "one", missing), suite_that_writes(GOOD)]
    monkeypatch.setattr(ci, "all_suites", lambda: suites)
    assert ci.main([]) == 1
    printed = capsys.readouterr().out
    assert "mpich is not installed" in printed
    assert printed.strip().endswith("3 passed, 1 failed, 2 skipped")


def test_a_suite_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ci, "SUITE_LIMIT_S", 1)
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    monkeypatch.setattr(ci, "GRACE_S", 0.2)
    result = ci.run(ci.Suite("it", "it", lambda: ([sys.executable, "-c", program, str(tmp_path)], {})))
    assert (result.failed, result.note) == (1, "ended after 1 s")


def test_an_unknown_suite_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert ci.main(["nonsense"]) == 2
    assert "there is no suite nonsense; choose from arch, unit" in capsys.readouterr().err
