"""The collectives and step benchmarks on real ranks: what they check, they can also find wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch

import flexcomm
from bench.collectives.arguments import parse_compressor
from bench.collectives.measure import Case, Row, measure, verify
from bench.collectives.methods import AllReduce, Cost, Method, Plan, Sync
from tests.ranks.processes import run_ranks
from tests.slow import slow_but

ROOT = Path(__file__).resolve().parents[2]
# Kernels that were never compiled on this machine are compiled by every rank at once.
pytestmark = pytest.mark.timeout(300)

TINY = ["-b", "256", "-e", "64K", "-f", "256", "-n", "2", "-w", "0"]


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
def test_two_ranks_measure_every_column_and_find_nothing_wrong(tmp_path: Path) -> None:
    file, table, plot = tmp_path / "c.json", tmp_path / "c.csv", tmp_path / "c.png"
    files = ["--json", str(file), "--csv", str(table), "--plot", str(plot)]
    done = run_bench("collectives", *TINY, "--compressor", "demo:k=8", "--compressor", "sign", *files, "--check")
    assert done.returncode == 0, done.stderr
    assert "# 2 nodes x 1 ranks" in done.stdout
    assert "# Out of bounds values : 0 OK" in done.stdout
    rows = json.loads(file.read_text())["rows"]
    methods = ["all-reduce fp32", "all-reduce bf16", "demo:k=8", "sign"]
    assert [(row["size_nbytes"], row["compressor"]) for row in rows] == [
        (size, method) for size in (256, 65536) for method in methods
    ]
    assert all(set(row) == {field.name for field in fields(Row)} and row["wrong"] == 0 for row in rows)
    assert all(row["time_min_s"] <= row["time_median_s"] <= row["time_p99_s"] for row in rows)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == len(rows) == len(table.read_text().splitlines()) - 1
    assert plot.exists()


@pytest.mark.slow
def test_a_way_that_a_compressor_cannot_go_is_skipped_with_its_reason() -> None:
    done = run_bench("collectives", *TINY, "--compressor", "sign", "--compressor", "dense", "--algorithm", "reduce")
    assert done.returncode == 0, done.stderr
    assert "# skipped sign: algorithm 'reduce' cannot carry this compressor" in done.stdout
    assert " dense      reduce " in done.stdout


@pytest.mark.slow
def test_ctrl_c_prints_what_there_is_and_exits_with_130() -> None:
    command = [sys.executable, "-m", "bench", "collectives", "-b", "256", "-e", "64M", "-f", "2", "-n", "1000"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("#"):
            break
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "# interrupted: " in rest
    assert "# Avg effective bandwidth, MB/s : all-reduce fp32 " in rest


@pytest.mark.slow
def test_a_step_lists_its_methods_and_those_it_cannot_measure(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    wanted = "demo,all-reduce-bf16,powersgd-1,detonation"
    done = run_bench("step", "--model", "tiny", "-n", "2", "--methods", wanted, "--json", str(file))
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    seen = {row["method"]: row for row in report["rows"]}
    assert {*seen, *report["settings"]["skipped"]} == set(wanted.split(","))
    assert all(row["replicas_equal"] and row["step_s"] > 0 and row["own_nbytes"] > 0 for row in seen.values())
    assert [name for name, row in seen.items() if row["phases"] is not None] == ["demo"]
    phases = seen["demo"]["phases"]
    spent_s = sum(phases[f"{name}_s"] for name in ("encode", "decode", "waiting", "rest"))
    assert spent_s == pytest.approx(seen["demo"]["step_s"])
    assert phases["encode_ns_per_element"] == pytest.approx(1e9 * phases["encode_s"] / 120_576)
    # Two ranks add up 120,576 numbers of 16 bits: each sends half of them twice.
    assert seen["all-reduce-bf16"]["own_nbytes"] == 2 * 120_576


@dataclass(frozen=True)
class Damaged:
    """A method that flips some elements of its result, on some ranks."""

    method: Method
    ranks: tuple[int, ...]
    positions: tuple[int, ...]
    rank: int

    @property
    def name(self) -> str:
        return self.method.name

    def plan(self, spec: flexcomm.TensorSpec) -> Plan:
        return self.method.plan(spec)

    def average(self, x: torch.Tensor) -> tuple[torch.Tensor, Cost]:
        out, cost = self.method.average(x)
        if self.rank in self.ranks:
            for position in self.positions:
                out.view(-1)[position] += 64.0
        return out, cost


CASE = Case((64, 64), torch.float32, "fp32", iterations=1, warmups=0, checked=True)


def count_damage(text: str, ranks: tuple[int, ...]) -> int:
    with flexcomm.connect(timeout_s=30) as world:
        rank = world.topology.rank
        inner = AllReduce("fp32", world) if not text else Sync(parse_compressor(text), "auto", world)
        method = Damaged(inner, ranks, (3, 1000), rank)
        return verify(method, method.plan(CASE.spec), CASE, world)


@pytest.mark.parametrize("text", ["", "demo:k=32", "top_k:rate=1/32", "sign", "dense"])
@pytest.mark.parametrize(("ranks", "wrong"), slow_but([((1,), 2)], [((), 0), ((1,), 2), ((0, 1), 4)]))
def test_damaged_elements_are_counted_on_every_rank(text: str, ranks: tuple[int, ...], wrong: int) -> None:
    # Rank 0 damaged alone makes the others differ from it, so only those who are wrong or alone count.
    assert run_ranks(count_damage, 2, text, ranks, ranks_per_node=1) == [wrong, wrong]


def measure_all(texts: tuple[str, ...]) -> list[int | None]:
    with flexcomm.connect(timeout_s=60) as world:
        methods: list[Method] = [Sync(parse_compressor(text), "auto", world) for text in texts]
        methods += [AllReduce("fp32", world), AllReduce("bf16", world)]
        return [measure(method, CASE, world, None).wrong for method in methods]


@pytest.mark.parametrize(("size", "ranks_per_node"), slow_but([(3, 1), (4, 2)], [(1, 1), (2, 2), (3, 1), (4, 2)]))
def test_nothing_is_wrong_on_any_topology(size: int, ranks_per_node: int) -> None:
    texts = ("demo:k=32", "demo:k=4,values=sign", "top_k:rate=1/32,values=int8", "random_k:rate=1/32", "sign", "dense")
    texts += ("striding:rate=1/16", "threshold:tau=0.003", "threshold:tau=0.5,capacity=None", "demo:k=5,chunk=48")
    found = run_ranks(measure_all, size, texts, ranks_per_node=ranks_per_node)
    assert found == [[0] * (len(texts) + 2)] * size
