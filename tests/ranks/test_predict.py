"""``flexdemo predict --calibrate`` on real ranks: all agree, rank 0 writes, and what it wrote can be predicted from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flexcomm
from flexdemo.predict import plan_scenario
from flexdemo.predict.calibration import Compute, read_calibration
from flexdemo.predict.measure import calibrate, measure_compute, measure_links
from tests.ranks.processes import run_ranks

ROOT = Path(__file__).resolve().parents[2]
GIVEN = Compute("given", 4_000_000, 0.01, 0.02, 0.001, 0.0)


class Spin:
    """A workload that any machine finishes at once."""

    nbytes = 4096

    def forward(self) -> None:
        sum(range(1000))

    def backward(self) -> None:
        sum(range(2000))

    def step(self) -> None:
        sum(range(100))


def body_calibrate(file: str) -> Any:
    return calibrate(Path(file), None, GIVEN)


def body_measure() -> Any:
    with flexcomm.connect() as world:
        return measure_links(world), measure_compute(world, Spin(), "spin", iterations=4)


def test_two_nodes_measure_the_same_and_one_of_them_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    (first, mine), (second, theirs) = run_ranks(body_calibrate, 2, str(file), ranks_per_node=1)
    assert (first, second) == (True, False)
    assert mine == theirs == read_calibration(file)
    assert (mine.nodes, mine.ranks_per_node) == (2, 1)
    assert [(table.link, table.k) for table in mine.links] == [("group", 2), ("all-reduce", 2), ("gather", 2)]
    assert [one.k for one in mine.codec] == [8, 32, 128]
    # demo writes an index of some bits and a bfloat16 for each coefficient.
    assert all(20 < one.bits_per_coefficient < 30 for one in mine.codec)
    assert mine.compute == GIVEN
    assert plan_scenario(mine).links.bytes_per_s > 0


def test_ranks_of_a_node_measure_its_legs_too() -> None:
    found = run_ranks(body_measure, 4, ranks_per_node=2)
    assert all(one == found[0] for one in found)
    links, spun = found[0]
    assert [(table.link, table.k) for table in links] == [("group", 2), ("all-reduce", 2), ("gather", 2), ("intra", 2)]
    assert spun.model_nbytes == 4096
    assert len(spun.slowness) == 2


@pytest.mark.slow
def test_three_nodes_also_pass_on_and_the_odd_one_swaps_with_nobody() -> None:
    found = run_ranks(body_measure, 3, ranks_per_node=1)
    assert [(table.link, table.k) for table in found[0][0]] == [
        ("group", 2),
        ("all-reduce", 3),
        ("gather", 3),
        ("edges", 1),
    ]


@pytest.mark.slow
@pytest.mark.timeout(110)
def test_alone_it_measures_compute_and_says_that_there_are_no_links(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    command = [sys.executable, "-m", "flexdemo", "predict", "--calibrate", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "one node has no links to measure" in done.stdout
    found = read_calibration(file)
    assert found.links == ()
    assert found.compute is not None
    assert found.compute.forward_s > 0
    assert found.compute.model_nbytes == 12_636_160
