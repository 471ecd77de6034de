"""The benchmark of decentralized training on real ranks: what they note follows from their schedules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import pytest

from bench.train.methods import ALLREDUCE
from bench.train.plan import Plan, Run, Settings, save_plan
from bench.train.rank import main
from bench.train.records import History, read_history
from flexcomm import gossip
from tests.ranks.processes import run_ranks

if TYPE_CHECKING:
    from flexcomm.gossip import Schedule

ROOT = Path(__file__).resolve().parents[2]
# Kernels that were never compiled on this machine are compiled by every rank at once.
pytestmark = pytest.mark.timeout(300)

NODES, STEPS, NUMEL = 4, 9, 120_576
FP32, INT8 = 4.0, 1.0
SETTINGS = Settings("tiny", 6, 2, 3, 3, 8, shard=False, nodes=2, ranks_per_node=1, launcher="torchrun", rate=None)


def mixed_nbytes(schedule: Schedule, element_nbytes: float) -> float:
    """What a node sends for a step, on average: the first has nothing to mix, and the last exchange is never used."""
    mixes = [schedule.phase(number) for number in range(STEPS - 1)]
    peers = [len([edge for edge in phase.edges if edge.source == node]) for phase in mixes for node in range(NODES)]
    pairs = [2 * len(phase.groups) / NODES for phase in mixes]
    return (sum(pairs) + mean(peers) * len(mixes)) / STEPS * NUMEL * element_nbytes


def expected_nbytes() -> dict[str, float]:
    everybody = 2 * (NODES - 1) / NODES * NUMEL * FP32
    return {
        ALLREDUCE: everybody,
        "complete": everybody * (STEPS - 1) / STEPS,
        "exponential": mixed_nbytes(gossip.one_peer_exponential(NODES), FP32),
        "aer-accum": mixed_nbytes(gossip.alternating_exponential_ring(NODES), FP32),
        "choco-int8": mixed_nbytes(gossip.fixed_ring(NODES), INT8),
    }


@pytest.mark.slow
def test_the_command_trains_and_every_node_sends_what_its_schedule_says(tmp_path: Path) -> None:
    expected, out, file = expected_nbytes(), tmp_path / "out", tmp_path / "d.json"
    command = [sys.executable, "-m", "bench", "decentralized", "--quick", "--steps", str(STEPS)]
    command += ["--methods", ",".join(expected), "--nodes", str(NODES), "--compute-ms", "5", "--straggler", "50"]
    command += ["--out", str(out), "--json", str(file), "--check"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(out.glob("*.jsonl"))) == len(expected)
    report = json.loads(file.read_text())
    assert report["figures"] == {"diverged": 0.0, "replicas_differ": 0.0}
    rows = {row["method"]: row for row in report["rows"]}
    assert set(rows) == set(expected)
    for name, row in rows.items():
        losses = [loss for _, loss, _, _ in row["curve"]]
        assert losses[-1] < losses[0] - 0.3
        assert row["replicas_equal"]
        assert row["compute_s"] > 0.005
        # A line before every letter, scales of int8 and headers of the baseline are all that comes on top.
        assert row["sent_nbytes"] == pytest.approx(expected[name], rel=0.005)
        assert (row["consensus_distance"] is None) == (name == ALLREDUCE)
        assert row["consensus_distance"] is None or 0 < row["consensus_distance"] < 1


def histories(runs: tuple[Run, ...], folder: Path) -> dict[Run, History]:
    save_plan(Plan(SETTINGS, runs), folder)
    run_ranks(main, SETTINGS.ranks, folder, ranks_per_node=1, limit_s=240)
    return {run: read_history(run, folder) for run in runs}


def test_what_diverges_is_noted_and_the_next_method_goes_on(tmp_path: Path) -> None:
    found = histories((Run("exponential", 1e30, 0), Run("exponential", 0.002, 0)), tmp_path)
    endings = [history.ending for history in found.values()]
    assert [ending is not None and ending.diverged[:11] for ending in endings] == ["before step", ""]


def test_ddp_is_the_baseline_but_for_when_it_clips(tmp_path: Path) -> None:
    plain, wrapped = histories((Run(ALLREDUCE, 0.002, 0), Run("allreduce-ddp", 0.002, 0)), tmp_path).values()
    assert wrapped.evaluations[-1].loss < wrapped.evaluations[0].loss - 0.1
    # The mean of clipped gradients, or the clipped mean: not the same, but close in six steps.
    assert wrapped.evaluations[-1].loss == pytest.approx(plain.evaluations[-1].loss, rel=0.02)
    assert wrapped.intervals[-1].sent_nbytes == pytest.approx(plain.intervals[-1].sent_nbytes, rel=0.001)
    assert wrapped.ending is not None
    assert wrapped.ending.replicas_equal
