"""``bench runtime`` on a real, small cluster. How well it predicts is not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--parameters", "131072", "--buckets", "2", "--compute-ms", "5,10", "-n", "3", "--straggler", "20"]


@pytest.mark.usefixtures("emulation")
@pytest.mark.slow
def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    file, markdown = tmp_path / "runtime.json", tmp_path / "runtime.md"
    places = ["--nodes", "2", "--rates", "100mbit,200mbit", "--calibrate", "2:100mbit"]
    methods = ["all-reduce", "exponential", "aer", "flexdemo", "flexdemo-overlap", "exponential-backward"]
    words = [*places, *SMALL, "--methods", ",".join(methods), "--json", str(file), "--markdown", str(markdown)]
    done = subprocess.run(
        [sys.executable, "-m", "bench", "runtime", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    rows = report["rows"]
    assert [(row["rate"], row["held_out"]) for row in rows] == [("100mbit", False)] * 6 + [("200mbit", True)] * 6
    assert [row["method"] for row in rows] == methods * 2
    # Nothing is over sooner than its sleep.
    assert all(row["measured_s"] >= 0.015 and row["predicted_s"] >= 0.015 for row in rows)
    assert report["figures"]["worst_error"] == max(abs(row["error"]) for row in rows if row["held_out"])
    assert set(report["unmeasured"]) == {"decentralized_of_bound", "straggler_speedup"}
    (known,) = report["settings"]["calibrations"]
    assert [table["link"] for table in known["tables"]] == ["group", "all-reduce", "gather"]
    assert len(markdown.read_text().splitlines()) == 2 + len(rows)
