"""``--loopback`` needs neither root nor iproute2, so these run everywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cluster.launchers import LAUNCHERS, Launcher, is_installed
from tests.slow import slow_but

PROGRAM = """
import os
keys = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"]
size = next(os.environ[key] for key in keys if key in os.environ)
os.write(1, f"{size} {os.environ['FLEXCOMM_RANKS_PER_NODE']}\\n".encode())
"""


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bench", "cluster", "--loopback", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ})


@pytest.mark.parametrize("launcher", slow_but(["openmpi"], LAUNCHERS))
def test_loopback_starts_all_ranks_and_tells_them_how_many_make_a_node(launcher: Launcher) -> None:
    if not is_installed(launcher):
        pytest.skip(f"{launcher} is not installed")
    size = ("--nodes", "2", "--ranks-per-node", "2")
    done = _run(*size, "--launcher", launcher, "--", sys.executable, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["4 2"] * 4
    assert "no rate is emulated" in done.stderr


def test_loopback_says_what_it_did_not_measure_instead_of_passing_it(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = _run("--nodes", "1", "--check", "--json", str(report), "--", "true")
    assert done.returncode == 0, done.stderr
    assert "not measured: rate_error: --loopback makes no links" in done.stderr
    assert "targets kept: none" in done.stderr
    assert json.loads(report.read_text())["figures"] == {}


def test_loopback_passes_the_commands_exit_code_on() -> None:
    assert _run("--nodes", "1", "--", "sh", "-c", "exit 6").returncode == 6
