"""What the page of measurements is made of: sweeps over clusters, calls, and the page itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import report
from bench.cli import main
from bench.cluster.links import Link
from bench.collectives.sweep import Row, SweepCase, make_report, print_rows
from bench.errors import BenchError
from bench.report import SECTIONS, Section, render
from bench.sync import Exposure, Growth, Overhead
from bench.sync import make_report as make_sync_report
from bench.targets import load_targets

CASE = SweepCase("2M", "8M", 4.0, "dense:dtype=bf16", "gather", 5)


def row(nodes: int, inter_s: float, rate: str = "100mbit", size_nbytes: int = 1 << 21) -> Row:
    wire = (nodes - 1) * 1e6
    return Row(nodes, rate, "torchrun", size_nbytes, 1e6, wire, inter_s + 0.01, 0.005, 0.005, inter_s, wire * 8e-8)


def test_a_sweep_reports_the_emptiest_link_of_four_nodes_and_the_worst_growth() -> None:
    rows = [row(2, 0.1), row(4, 0.3), row(8, 0.84), row(4, 0.25, size_nbytes=1 << 23)]
    figures = make_report(rows, CASE).figures
    assert figures["link_share_100mbit"] == pytest.approx(0.24 / 0.3)
    # From two nodes to eight there are seven times as many peers: 0.84 s for 0.7 s.
    assert figures["growth_over_linear"] == pytest.approx(1.2)


def test_a_sweep_says_what_it_did_not_measure() -> None:
    found = make_report([row(2, 0.1)], CASE)
    assert not found.figures
    assert "no cluster of 4 nodes at 1gbit" in found.unmeasured["link_share_1gbit"]
    assert "only one number of nodes" in found.unmeasured["growth_over_linear"]


def test_a_sweep_prints_the_cost_per_peer(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([row(4, 0.3)], CASE)
    *_, last = capsys.readouterr().out.splitlines()
    assert last.split() == ["torchrun", "100mbit", "4", "1.00", "310.0", "300.0", "240.0", "80%", "100.0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "two"], "got --nodes 'two'"),
        (["--nodes", ","], "got --nodes ','"),
        (["--rates", "fast"], "needed a number with a unit"),
        (["--launchers", "slurm"], "slurm"),
    ],
)
def test_a_sweep_refuses_what_it_cannot_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_calls_are_measured_against_the_bare_gather_and_the_wire() -> None:
    known = Link(100_000_000, "told")
    found = make_sync_report(Overhead(5e-4, 3e-4), Exposure(0.2, 0.02), Growth(12.0, 3.0), [0.1] * 6, known)
    assert found.figures == pytest.approx(
        {"overhead_us": 200.0, "exposed_share": 0.1, "growth_kib": 12.0, "growth_objects": 3.0}
    )
    assert set(load_targets("sync", found.known_figures)) == found.known_figures


def test_without_a_link_nothing_is_said_of_what_stays_exposed() -> None:
    found = make_sync_report(Overhead(5e-4, 3e-4), Exposure(0.2, 0.02), Growth(12.0, 3.0), [0.1] * 6, None)
    assert "exposed_share" not in found.figures
    assert "bench cluster" in found.unmeasured["exposed_share"]


def test_every_section_names_a_command_that_can_be_typed() -> None:
    for section in SECTIONS:
        words = section.argv("python")
        assert words[:3] == ["python", "-m", "bench"]
        assert words.count("--") == bool(section.inner)


def test_a_section_shows_command_day_output_and_picture() -> None:
    section = Section("Title", "Remark.", ("step",), picture=Path("docs/plot.png"))
    text = render(section, "a  b\n1  2", "2026-01-31")
    assert text == (
        "### Title\nRemark. 2026-01-31:\n```\nsudo .venv/bin/python -m bench step\n```\n```\na  b\n1  2\n```\n"
        "\n![Title](plot.png)\n"
    )


def test_a_section_replaces_its_own_table_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Above\n{report._MARK}\n### One\nold\n\n### Two\n![plot](plot.png)\n")
    monkeypatch.setattr(report, "_PAGE", page)
    report.write(Section("One", "", ()), "### One\nnew\n")
    report.write(Section("Three", "", ()), "### Three\n")
    assert page.read_text() == (f"# Above\n{report._MARK}\n### One\nnew\n\n### Two\n![plot](plot.png)\n\n### Three\n")


def test_a_command_that_fails_leaves_the_page_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    section = Section("Broken", "", ("no-such-subcommand",))
    monkeypatch.setattr(Section, "argv", lambda _section, _python: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(BenchError, match="ended with 3; its table is as it was"):
        report.run(section)


def test_outside_the_repository_there_is_no_page_to_write(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "report"]
    root = Path(report.__file__).parents[1]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "run it where the repository is" in done.stderr
