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
    return ci.Suite("it", lambda: ([sys.executable, "-c", program], {}))


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

    suites = [ci.Suite("one", missing), suite_that_writes(GOOD)]
    monkeypatch.setattr(ci, "plan_suites", lambda _, **__: suites)
    assert ci.main([]) == 1
    printed = capsys.readouterr().out
    assert "mpich is not installed" in printed
    assert printed.strip().endswith("3 passed, 1 failed, 2 skipped")


def test_a_suite_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ci, "SUITE_LIMIT_S", 1)
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    monkeypatch.setattr(ci, "GRACE_S", 0.2)
    result = ci.run(ci.Suite("it", lambda: ([sys.executable, "-c", program, str(tmp_path)], {})))
    assert (result.failed, result.note) == (1, "ended after 1 s")


def test_an_unknown_suite_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert ci.main(["nonsense"]) == 2
    assert "there is no suite nonsense; choose from arch, unit" in capsys.readouterr().err


TIMED = """<testsuites><testsuite tests="2" failures="0" errors="0" skipped="0">
<testcase classname="tests.unit.test_wire" name="test_a[x.y]" time="7.25"/>
<testcase classname="tests.unit.test_wire" name="test_b" time="0.5"/></testsuite></testsuites>"""


def test_the_report_tells_every_tests_time(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(TIMED)
    tests = (
        ci.TimedTest("tests/unit/test_wire.py::test_a[x.y]", 7.25),
        ci.TimedTest("tests/unit/test_wire.py::test_b", 0.5),
    )
    assert ci.read_report(report) == (2, 0, 0, tests)


def result_of(seconds: float, tests: list[float]) -> ci.Result:
    timed = tuple(ci.TimedTest(f"test_{number}", time_s) for number, time_s in enumerate(tests))
    return ci.Result("unit", len(tests), 0, 0, seconds, timed)


def test_the_summary_lists_the_ten_slowest_tests_and_all_over_five_seconds() -> None:
    few = ci.summarise([result_of(10.0, [0.1] * 8 + [4.0, 3.0, 2.0])], 360).splitlines()
    shown = few[few.index("=== slowest tests") + 1 : few.index("=== summary") - 1]
    assert len(shown) == 10
    assert shown[0] == "   4.0 s  test_8  (unit)"
    many = ci.summarise([result_of(100.0, [6.0] * 15 + [1.0])], 360)
    assert many.count(" 6.0 s  test_") == 15
    assert " 1.0 s" not in many


@pytest.mark.parametrize(("seconds", "words"), [(400.0, "40 s over the budget"), (300.0, "60 s less than the budget")])
def test_the_summary_compares_with_the_budget_and_fails_nothing(seconds: float, words: str) -> None:
    text = ci.summarise([result_of(seconds, [1.0])], 360)
    assert f"{seconds:.0f} s in all, {words} of 360 s on two idle cores" in text
    assert text.endswith("1 passed, 0 failed, 0 skipped")


def test_all_adds_slow_tests_and_both_mpis_with_every_number_of_ranks() -> None:
    usual, everything = ci.plan_suites(ci.NAMES, slow=False), ci.plan_suites(ci.NAMES, slow=True)
    assert {suite.label for suite in usual} < {suite.label for suite in everything}
    assert sum(suite.label.startswith("mpi") for suite in everything) == 6
    assert all("--runslow" not in suite.find_command()[0] for suite in usual)
    assert all("--runslow" in suite.find_command()[0] for suite in everything)
