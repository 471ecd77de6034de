"""Every subcommand runs, checks what it measured, and writes it down. How fast things are is not a test's business."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.launchers import is_installed

ROOT = Path(__file__).resolve().parents[2]

needs_openmpi = pytest.mark.skipif(not is_installed("openmpi"), reason="openmpi is not installed")


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )


@needs_openmpi
def test_the_demo_synchronises_exactly_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    done = run_bench("demo", "--check", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "every rank holds the exact mean" in done.stdout
    rows = json.loads(file.read_text())["rows"]
    assert [(row["rank"], row["node"], row["local rank"], row["wrong"]) for row in rows] == [
        (0, 0, 0, 0),
        (1, 0, 1, 0),
        (2, 1, 0, 0),
        (3, 1, 1, 0),
    ]


@pytest.mark.slow
@needs_openmpi
def test_transport_measures_what_one_host_can_and_says_what_it_cannot(tmp_path: Path) -> None:
    file = tmp_path / "transport.json"
    done = run_bench("transport", "--quick", "--check", "--json", str(file))
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert report["figures"]["latency_us"] > 0
    assert set(report["unmeasured"]) == {"overlap_native", "overlap_python"}


@pytest.mark.slow
def test_startup_reports_the_ratio_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "startup.json"
    done = run_bench("startup", "--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    seconds = {row["import"]: row["seconds"] for row in json.loads(file.read_text())["rows"]}
    ratio = json.loads(file.read_text())["figures"]["import_ratio"]
    assert ratio == pytest.approx(seconds["flexcomm"] / seconds["torch"])


@needs_openmpi
def test_ctrl_c_on_the_demo_leaves_no_rank_behind() -> None:
    marker = f"flexcomm-test-{os.getpid()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", "demo"],
        cwd=ROOT,
        env={**os.environ, "FLEXCOMM_TEST_MARKER": marker},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert re.search("mpirun -n 4", process.stdout.readline())
    while len(marked_processes(marker)) < 6:  # this one, mpirun, four ranks
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert not marked_processes(marker)


def marked_processes(marker: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found
