import json
from io import StringIO
from pathlib import Path

import pytest

from bench.cli import SUBCOMMANDS, build_app, main
from bench.common_options import Report, conclude
from bench.errors import UsageError
from bench.tables import print_table
from bench.targets import TARGETS_FILE, load_targets

KNOWN = frozenset({"speed", "error"})
TARGETS = '[trial.speed]\nat_least = 2\nwhy = "slower is useless"\n[trial.error]\nat_most = 0.5\nwhy = "law"\n'


def _report(figures: dict[str, float], unmeasured: dict[str, str] | None = None) -> Report:
    return Report("trial", KNOWN, figures, unmeasured=unmeasured or {})


@pytest.fixture
def targets_file(tmp_path: Path) -> Path:
    file = tmp_path / "targets.toml"
    file.write_text(TARGETS)
    return file


def _check(report: Report, targets_file: Path) -> int:
    return conclude(report, json_file=None, check=True, targets_file=targets_file)


def test_a_report_within_its_bounds_exits_with_0(targets_file: Path) -> None:
    assert _check(_report({"speed": 2.0, "error": 0.5}), targets_file) == 0


def test_a_missed_target_exits_with_1_and_is_named(targets_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _check(_report({"speed": 1.5, "error": 0.1}), targets_file) == 1
    assert "missed: speed: measured 1.5, required at least 2 (slower is useless)" in capsys.readouterr().err


def test_without_check_no_target_matters(targets_file: Path) -> None:
    assert conclude(_report({"speed": 0.0}), json_file=None, check=False, targets_file=targets_file) == 0


def test_a_figure_that_was_not_measured_is_a_miss(targets_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _check(_report({"speed": 3.0}), targets_file) == 1
    assert "missed: error: not measured" in capsys.readouterr().err


def test_a_figure_with_a_reason_for_its_absence_is_said_and_is_no_miss(
    targets_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _check(_report({"speed": 3.0}, {"error": "no link"}), targets_file) == 0
    assert "not measured: error: no link" in capsys.readouterr().err


def test_nan_keeps_no_target(targets_file: Path) -> None:
    assert _check(_report({"speed": float("nan"), "error": 0.1}), targets_file) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trial.sped]\nat_least = 2\n", "sets targets for sped.*knows only error, speed"),
        ("[trial.speed]\nat_lest = 2\n", "needed a table with at_most or at_least"),
        ("[trial.speed]\nwhy = 'x'\n", "needed a table with at_most or at_least"),
        ("[trial]\nspeed = 3\n", "needed a table with at_most or at_least"),
        ("[trial.speed]\nat_least = '2'\n", "bounds are numbers"),
    ],
)
def test_a_targets_file_that_we_cannot_read_is_an_error(targets_file: Path, text: str, message: str) -> None:
    targets_file.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_targets("trial", KNOWN, targets_file)


def test_every_table_of_the_shipped_targets_is_a_subcommand() -> None:
    import tomllib

    assert set(tomllib.loads(TARGETS_FILE.read_text())) <= SUBCOMMANDS.keys()


def test_json_holds_the_report_and_the_environment_but_not_the_hosts_name(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    conclude(_report({"speed": 3.0}), json_file=file, check=False)
    document = json.loads(file.read_text())
    assert (document["name"], document["figures"]) == ("trial", {"speed": 3.0})
    assert {"time", "python", "kernel", "cpus", "packages"} <= set(document["environment"])
    assert set(document["environment"]["packages"]) == {"flexcomm", "torch", "numpy", "numba", "mpi4py"}
    assert "hostname" not in document["environment"]


def test_a_json_file_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write the results"):
        conclude(_report({}), json_file=tmp_path / "missing" / "report.json", check=False)


def test_plain_tables_align_numbers_to_the_right() -> None:
    stream = StringIO()
    print_table("t", ("node", "sent"), [("a", "1"), ("b", "1,000")], stream)
    assert stream.getvalue().splitlines() == [
        "t",
        "node   sent",
        "a         1",
        "b     1,000",
    ]


def test_every_subcommand_loads_when_it_is_named() -> None:
    for name in SUBCOMMANDS:
        assert name in [command.name for command in build_app([name]).registered_commands]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "100", "--", "true"], "needed a number with a unit"),
        (["--nodes", "0", "--", "true"], "got 0 nodes"),
        (["--ranks-per-node", "0", "--", "true"], "got 0 ranks per node"),
        (["--launcher", "slurm", "--", "true"], "needed one of openmpi, mpich, torchrun"),
        ([], "got no command"),
    ],
)
def test_bad_arguments_exit_with_2_and_say_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", *arguments]) == 2
    assert message in capsys.readouterr().err
