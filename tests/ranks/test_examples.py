"""Every example learns, compresses and ends with equal replicas; under every launcher where slow tests run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.cluster.launchers import Launcher, is_installed, mpirun_command
from tests.slow import slow_but

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
LIMIT_S = 200
"""The slowest run took 89 s, measured on two cores at a load of 8."""
STEPS = 6
pytestmark = pytest.mark.timeout(2 * LIMIT_S + 10)
NEEDS = {
    "fsdp2": (),
    "native_hsdp": (),
    "transformers_fsdp2": ("transformers",),
    "accelerate_ddp": ("accelerate",),
    "lightning_ddp": ("lightning",),
}


def run(name: str, *arguments: str, launcher: Launcher, ranks: int = 2, ranks_per_node: int = 1) -> dict[int, float]:
    """The losses of rank 0 by step, of a run that ended well."""
    missing = [package for package in NEEDS[name] if find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed: pip install '.[examples]'")
    if not is_installed(launcher):
        pytest.skip(f"{launcher} is not installed")
    invocation = mpirun_command(launcher, ranks)
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FLEXCOMM_RANKS_PER_NODE": str(ranks_per_node)}
    process = subprocess.Popen(
        [*invocation.argv, sys.executable, str(EXAMPLES / f"{name}.py"), f"--steps={STEPS}", *arguments],
        env={**invocation.full_env(), **env},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    assert times_less(output) > 4, output
    return losses(output)


def times_less(output: str) -> float:
    """What the exchange saved: a hook that was never called saves nothing."""
    (number,) = re.findall(r"replicas are equal; nodes sent (\S+) times less than everything", output)
    return float(number)


def losses(output: str) -> dict[int, float]:
    found = {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", output)}
    assert len(found) == STEPS, output
    return found


def require_falling(found: dict[int, float]) -> None:
    """Of two at each end: batches differ."""
    values = [found[step] for step in sorted(found)]
    assert sum(values[-2:]) < sum(values[:2]), found


def test_every_example_is_tested() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(NEEDS)


def test_every_example_is_in_the_table_of_the_page() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"\| \[(\w+)\.py\]\(\1\.py\)", page)) == set(NEEDS)


@pytest.mark.parametrize("launcher", slow_but(["torchrun"], ["openmpi", "torchrun", "mpich"]))
@pytest.mark.parametrize("name", slow_but(["accelerate_ddp"], ["accelerate_ddp", "lightning_ddp"]))
def test_ddp_examples_learn(name: str, launcher: Launcher) -> None:
    require_falling(run(name, launcher=launcher))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["openmpi", "torchrun", "mpich"])
@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_transformers_learn(model: str, launcher: Launcher) -> None:
    require_falling(run("transformers_fsdp2", f"--model={model}", launcher=launcher))


SHARDED = [("mpich", 1), ("torchrun", 1), ("openmpi", 2), ("torchrun", 2), ("mpich", 2)]


@pytest.mark.parametrize(("launcher", "ranks_per_node"), slow_but(SHARDED[:1], SHARDED))
def test_sharded_models_learn_on_two_nodes(launcher: Launcher, ranks_per_node: int) -> None:
    ranks = 2 * ranks_per_node
    require_falling(run("fsdp2", "--route=optimizer", launcher=launcher, ranks=ranks, ranks_per_node=ranks_per_node))


@pytest.mark.parametrize("launcher", slow_but(["torchrun"], ["openmpi", "torchrun", "mpich"]))
def test_a_native_mesh_learns_through_the_backend(launcher: Launcher) -> None:
    require_falling(run("native_hsdp", launcher=launcher, ranks=4, ranks_per_node=2))


@pytest.mark.slow
def test_a_saved_run_goes_on_under_another_launcher(tmp_path: Path) -> None:
    before = run("fsdp2", "--route=hook", f"--save={tmp_path}", launcher="torchrun")
    after = run("fsdp2", "--route=hook", f"--resume={tmp_path}", launcher="openmpi")
    assert list(after) == list(range(STEPS, 2 * STEPS))
    require_falling(before | after)
    assert max(after.values()) < before[0]
