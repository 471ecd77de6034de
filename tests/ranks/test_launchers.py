"""Real mpirun and torchrun: ranks are found, a failure ends the whole job with a name, Ctrl-C leaves nobody behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.cluster.launchers import LAUNCHERS, Launcher, is_installed, mpirun_command
from tests.slow import slow_but

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 90

every_launcher = pytest.mark.parametrize("launcher", slow_but(["openmpi"], LAUNCHERS))
every_mpi = pytest.mark.parametrize("launcher", slow_but(["openmpi"], ["openmpi", "mpich"]))


def start(launcher: Launcher, command: Sequence[str], ranks: int = 4) -> subprocess.Popen[str]:
    if not is_installed(launcher):
        pytest.skip(f"{launcher} is not installed")
    invocation = mpirun_command(launcher, ranks)
    return subprocess.Popen(
        [*invocation.argv, *command],
        env={**invocation.full_env(), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output.replace("\0", "")


def run(launcher: Launcher, program: str, ranks: int = 4) -> tuple[int, str]:
    return finish(start(launcher, [sys.executable, "-c", program], ranks))


def readme_example(folder: Path) -> Path:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    file = folder / "example.py"
    file.write_text(block)
    return file


ONE_LINE = "print(flexcomm.connect(ranks_per_node=2).topology)"


@pytest.mark.parametrize("launcher", slow_but(["mpich"], LAUNCHERS))
def test_the_example_of_the_readme_runs_and_one_line_connects(launcher: Launcher, tmp_path: Path) -> None:
    """Four ranks run the example as it stands, then one line whose world nobody closes."""
    program = readme_example(tmp_path)
    program.write_text(f"{program.read_text()}\n{ONE_LINE}\n")
    code, output = finish(start(launcher, [sys.executable, str(program)]))
    assert code == 0, output
    assert output.count("sent 163 times less than the tensor") == 4
    places = sorted(re.findall(r"rank \d of 4: node \d of 2, local rank \d of 2 \(\w+\)", output))
    # Once from the example, once from the one line.
    assert places == [
        f"rank {rank} of 4: node {rank // 2} of 2, local rank {rank % 2} of 2 ({launcher})"
        for rank in range(4)
        for _ in range(2)
    ]


def test_the_example_of_the_readme_is_ten_lines(tmp_path: Path) -> None:
    lines = [line for line in readme_example(tmp_path).read_text().splitlines() if line.strip()]
    assert len(lines) <= 10


RAISE_ON_RANK_1 = """
import flexcomm, torch
world = flexcomm.connect(timeout_s=60)
world.control.barrier().wait()
if world.topology.rank == 1:
    raise ValueError("this rank failed on purpose")
world.control.all_reduce(torch.ones(3)).wait()
"""


@every_launcher
def test_one_rank_that_raises_ends_the_job_with_its_traceback(launcher: Launcher) -> None:
    """Well before the deadline of a minute: the others would wait that long for a rank that never comes."""
    start_s = time.monotonic()
    code, output = run(launcher, RAISE_ON_RANK_1, ranks=2)
    assert code != 0
    assert "ValueError: this rank failed on purpose" in output
    assert "rank 1" in output or "rank1" in output
    assert time.monotonic() - start_s < 60


RAISE_INSIDE_WITH = """
import sys
import flexcomm
sys.stdout.close()
with flexcomm.connect(timeout_s=60) as world:
    world.control.barrier().wait()
    if world.topology.rank == 1:
        raise ValueError("this rank failed on purpose")
    world.control.barrier().wait()
"""


@pytest.mark.slow
@every_mpi
def test_an_exception_that_leaves_a_with_block_ends_the_job_too(launcher: Launcher) -> None:
    """Also when standard output is closed, and flushing it fails."""
    code, output = run(launcher, RAISE_INSIDE_WITH, ranks=2)
    assert code != 0
    assert "[rank 1] ValueError: this rank failed on purpose" in output


FAIL_BEFORE_CONNECTED = """
from mpi4py import MPI
import flexcomm
flexcomm.connect(intra="pigeon" if MPI.COMM_WORLD.Get_rank() == 1 else "auto", timeout_s=60)
"""


@pytest.mark.slow
@every_mpi
def test_a_rank_that_fails_before_it_is_connected_ends_the_job_too(launcher: Launcher) -> None:
    code, output = run(launcher, FAIL_BEFORE_CONNECTED, ranks=2)
    assert code != 0
    assert "there is no transport 'pigeon'" in output


KILL_RANK_1 = """
import os, signal, flexcomm, torch
world = flexcomm.connect(timeout_s=60)
world.control.barrier().wait()
if world.topology.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
world.control.all_reduce(torch.ones(3)).wait()
"""


@every_launcher
def test_one_rank_that_is_killed_ends_the_job(launcher: Launcher) -> None:
    """Under an MPI nobody survives to raise: mpirun ends the others, and says whom it found dead."""
    start_s = time.monotonic()
    code, output = run(launcher, KILL_RANK_1, ranks=2)
    assert code != 0
    assert re.search(r"signal 9|SIGKILL|KILLED BY SIGNAL: 9", output), output
    assert time.monotonic() - start_s < 60  # the deadline of the others, had nobody told them


WAIT_FOR_EVER = """
import os, sys, time, flexcomm, torch
world = flexcomm.connect(timeout_s=600)
sys.stdout.write(f"pid {os.getpid()} end" + chr(10))  # one piece: ranks share the terminal
sys.stdout.flush()
if world.topology.rank == 0:
    time.sleep(600)
world.control.all_reduce(torch.ones(3)).wait()
"""


@every_launcher
def test_ctrl_c_leaves_no_process_behind(launcher: Launcher) -> None:
    process = start(launcher, [sys.executable, "-c", WAIT_FOR_EVER], ranks=2)
    assert process.stdout is not None
    pids: list[int] = []
    for line in process.stdout:
        pids += [int(pid) for pid in re.findall(r"pid (\d+) end", line)]
        if len(pids) == 2:
            break
    assert len(pids) == 2
    try:
        os.killpg(process.pid, signal.SIGINT)
        code, _ = finish(process)
        left = running_after(pids, 20.0)
    finally:
        for pid in running_after(pids, 0.0):
            os.kill(pid, signal.SIGKILL)
    assert code != 0
    assert not left


def running_after(pids: list[int], patience_s: float) -> list[int]:
    """Those that still run when all are gone or patience is at its end."""
    deadline_s = time.monotonic() + patience_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


FAIL_ON_ONE_RANK = """
import pytest

@pytest.mark.mpi
def test_that_fails_on_one_rank(world):
    assert world.topology.rank != 1
    world.control.barrier().wait()
"""


@pytest.mark.slow
@every_mpi
def test_a_failing_rank_ends_a_test_run_under_mpirun(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "test_fails.py"
    file.write_text(FAIL_ON_ONE_RANK)
    options = ["-q", "--with-mpi", "-p", "tests.mpi.conftest", "-p", "no:cacheprovider"]
    code, output = finish(start(launcher, [sys.executable, "-m", "pytest", *options, str(file)], ranks=2))
    assert code != 0
    assert "[rank 1] FAILED" in output
    assert "assert 1 != 1" in output
