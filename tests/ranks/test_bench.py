"""Every subcommand runs, checks what it measured, and writes it down. How fast things are is not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cluster.launchers import is_installed

ROOT = Path(__file__).resolve().parents[2]

needs_openmpi = pytest.mark.skipif(not is_installed("openmpi"), reason="openmpi is not installed")


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )


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
