"""``bench demo`` on real ranks: over paced links, to its table and picture, and away without a trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Kernels that were never compiled on this machine are compiled first.
pytestmark = pytest.mark.timeout(300)

QUICK = [sys.executable, "-m", "bench", "demo", "--quick", "--links", "paced"]


@pytest.mark.slow
def test_the_demo_trains_over_paced_links_and_shows_what_came_of_it(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    command = [*QUICK, "--check", "--out", str(tmp_path), "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "links of 10 Mbit/s, paced in software" in done.stdout
    assert "FlexDeMo" in done.stdout
    report = json.loads(file.read_text())
    adamw, ours = report["rows"]
    assert (adamw["method"], ours["method"]) == ("adamw-bf16", "flexdemo-k32")
    for row in (adamw, ours):
        assert row["replicas_equal"]
        # However fast the machine is, no step is faster than its bytes pass the link.
        assert row["step_s"] >= 8 * row["sent_nbytes"] / 10e6
    # 120,576 parameters in bf16, and headers.
    assert adamw["sent_nbytes"] == pytest.approx(2 * 120_576, rel=0.01)
    assert ours["sent_nbytes"] < adamw["sent_nbytes"] / 10


@pytest.mark.slow
def test_ctrl_c_on_the_demo_leaves_no_rank_behind(tmp_path: Path) -> None:
    marker = f"flexcomm-test-{os.getpid()}"
    process = subprocess.Popen(
        [*QUICK, "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "FLEXCOMM_TEST_MARKER": marker},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    while len(marked_processes(marker)) < 4:  # this one, torchrun, two ranks
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=30)
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
