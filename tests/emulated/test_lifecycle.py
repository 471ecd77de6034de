"""What ``python -m bench cluster`` leaves behind: nothing, however it ends."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.cluster import ClusterSpec, open_cluster
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("emulation")

MARK = "FLEXCOMM_TEST_MARK"
TWO_NODES = ("--nodes", "2", "--quick")
# Long enough for the launch to complete first: see the launchers' quirks in docs/cluster.md.
BRIEFLY = "sleep 0.3; "
SLEEPING = ("--", "sh", "-c", "echo started; exec sleep 1000")


class Tool:
    """A ``python -m bench cluster`` of its own temporary folder, whose processes all carry one mark."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        env = {**os.environ, MARK: self.mark, "TMPDIR": str(folder)}
        command = [sys.executable, "-m", "bench", "cluster", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def wait_for_ranks(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "started\n", self.finish()

    def living(self) -> list[str]:
        return [comm for comm, environ in _processes() if f"{MARK}={self.mark}".encode() in environ]

    def folders(self) -> list[str]:
        return [path.name for path in self.folder.glob("flexcomm-cluster-*")]


def _processes() -> Iterator[tuple[str, bytes]]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            yield (entry / "comm").read_text().strip(), (entry / "environ").read_bytes()
        except OSError:
            continue


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, f"waited 20 s in vain for {what}"
        time.sleep(0.005)


@contextmanager
def _running(folder: Path, *arguments: str) -> Iterator[Tool]:
    tool = Tool(folder, *arguments)
    try:
        yield tool
    finally:
        tool.process.kill()
        tool.process.communicate()
        _wait_until(lambda: not tool.living(), "the cluster to end with its owner")


def test_a_finished_run_shows_bytes_and_leaves_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with _running(
        tmp_path, *TWO_NODES, "--check", "--json", str(report), "--", "sh", "-c", BRIEFLY + "hostname"
    ) as tool:
        code, out, err = tool.finish()
        assert (code, len(out.splitlines())) == (0, 2), err
        assert "targets kept: rate_error" in err
        assert "bytes on the links" in err
        assert (tool.living(), tool.folders()) == ([], [])
    document = json.loads(report.read_text())
    assert document["figures"]["rate_error"] <= 0.1
    assert [row["node"] for row in document["rows"]] == [0, 1]
    assert document["settings"]["exit_code"] == 0


def test_a_failing_command_passes_its_code_on_and_leaves_nothing(tmp_path: Path) -> None:
    with _running(tmp_path, *TWO_NODES, "--", "sh", "-c", BRIEFLY + "exit 5") as tool:
        code, _, err = tool.finish()
        assert code == 5, err
        assert (tool.living(), tool.folders()) == ([], [])


@pytest.mark.parametrize("number", slow_but([signal.SIGINT], [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_a_signal_while_ranks_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with _running(tmp_path, *TWO_NODES, *SLEEPING) as tool:
        tool.wait_for_ranks()
        assert "sleep" in tool.living()
        tool.process.send_signal(number)
        code, _, err = tool.finish()
        assert code == 128 + number, err
        assert (tool.living(), tool.folders()) == ([], [])
        assert "Traceback" not in err


@pytest.mark.parametrize("made", slow_but(["node0-*.pid"], ["lock", "hosts", "node0-*.pid", "node1-*.pid"]))
def test_ctrl_c_during_setup_leaves_nothing(tmp_path: Path, made: str) -> None:
    with _running(tmp_path, *TWO_NODES, *SLEEPING) as tool:
        _wait_until(lambda: any(tmp_path.glob(f"flexcomm-cluster-*/{made}")), made)
        tool.process.send_signal(signal.SIGINT)
        code, _, err = tool.finish()
        assert code == 130, err
        # One that was just being started when the signal came ends by itself, as its pipe does with us.
        _wait_until(lambda: not tool.living(), "the end of all its processes")
        assert tool.folders() == []
        assert "Traceback" not in err


def test_sweep_removes_what_a_killed_cluster_left_and_only_that(tmp_path: Path) -> None:
    with _running(tmp_path, *TWO_NODES, *SLEEPING) as alive, _running(tmp_path, *TWO_NODES, *SLEEPING) as killed:
        alive.wait_for_ranks()
        (kept,) = [name for name in alive.folders() if f"-{alive.process.pid}-" in name]
        killed.wait_for_ranks()
        killed.process.kill()
        _wait_until(lambda: not killed.living(), "the kernel to end the killed cluster's processes")
        assert len(alive.folders()) == 2

        with _running(tmp_path, "--nodes", "1", "--quick", "--", "true") as later:
            assert "--sweep" in later.finish()[2]
        with _running(tmp_path, "--sweep") as sweeper:
            code, out, _ = sweeper.finish()
        assert code == 0
        assert "1 stale clusters removed" in out
        assert alive.folders() == [kept]
        assert "sleep" in alive.living()


def test_two_clusters_run_side_by_side() -> None:
    # A moderate rate, so that measuring one does not starve the other.
    spec = ClusterSpec(nodes=2, rate="20mbit", probe_s=0.05)
    with open_cluster(spec) as one, open_cluster(spec) as other:
        names = [cluster.run_on_nodes({0: ["hostname"]}, timeout_s=20).stdout.strip() for cluster in (one, other)]
        assert names == [one.nodes[0].name, other.nodes[0].name]
        assert names[0] != names[1]


def test_without_iproute2_the_message_says_what_to_install(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "bench", "cluster", "--", "true"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "ip is not on the PATH (install iproute2)" in done.stderr
    assert "--loopback" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_root_the_message_says_so() -> None:
    # Loaded first: the interpreter's own files may be closed to the user we become.
    program = """
import os, sys
from bench import cli
cli.main(["cluster"])
os.setuid(65534)
sys.exit(cli.main(["cluster", "--", "true"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "user id 65534 is not root" in done.stderr
    assert "--loopback" in done.stderr


@pytest.mark.parametrize(("tool", "message"), [("unshare", "namespaces were refused"), ("tc", "refused a link")])
def test_a_kernel_that_refuses_is_quoted_and_leaves_nothing(tmp_path: Path, tool: str, message: str) -> None:
    program = tmp_path / tool
    program.write_text("#!/bin/sh\necho Operation not permitted >&2\nexit 1\n")
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "bench", "cluster", "--nodes", "1", "--", "true"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{message}: Operation not permitted" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [program]
