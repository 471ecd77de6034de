"""An emulated cluster on which commands run, for other benchmarks and tests.

with open_cluster(ClusterSpec(nodes=4, rate="100mbit")) as cluster:
    finished = cluster.run(["python", "train.py"], launcher="openmpi")
    print(finished.exit_code, finished.stdout, finished.traffic)
"""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.cluster import links, netns, rate_check, stale_clusters
from bench.cluster.launch import launch_command, supervised
from bench.cluster.launchers import Launcher
from bench.cluster.links import Traffic
from bench.cluster.netns import Node, Space
from bench.cluster.rate_check import CableRate
from bench.cluster.rates import parse_rate
from bench.errors import BenchError, UsageError

_MOST_NODES = 250


@dataclass(frozen=True)
class ClusterSpec:
    """What to emulate: ``nodes`` hosts of ``ranks_per_node`` ranks, on cables of ``rate`` each way.

    Each cable is measured for ``probe_s``, and again, for up to ``patience_s``, while it seems not to keep its rate.
    """

    nodes: int
    ranks_per_node: int = 1
    rate: str = "100mbit"
    probe_s: float = 0.15
    patience_s: float = 20.0

    def __post_init__(self) -> None:
        check_counts(self.nodes, self.ranks_per_node)
        parse_rate(self.rate)

    @property
    def rate_bits_per_s(self) -> int:
        """The rate as a number."""
        return parse_rate(self.rate)


def check_counts(nodes: int, ranks_per_node: int) -> None:
    """Raise unless that many nodes and ranks make a cluster."""
    if not 1 <= nodes <= _MOST_NODES:
        raise UsageError(f"got {nodes} nodes, needed 1 to {_MOST_NODES}: give --nodes a number in that range.")
    if ranks_per_node < 1:
        raise UsageError(f"got {ranks_per_node} ranks per node, needed at least 1: give --ranks-per-node 1 or more.")


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str
    traffic: list[Traffic]


@dataclass(frozen=True)
class Cluster:
    """A running cluster; any number of commands can run on it, one after the other."""

    spec: ClusterSpec
    space: Space
    rates: list[CableRate]
    setup_s: float

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, with their names and addresses."""
        return self.space.nodes

    def bytes(self) -> list[Traffic]:
        """Return the bytes of each node since the cluster was made, the measurement of its rate included."""
        return links.traffic(self.space)

    def run(
        self,
        command: Sequence[str],
        *,
        launcher: Launcher,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Finished:
        """Run ``command`` as ranks on all nodes and return what it printed and what crossed the links."""
        launch = launch_command(self.space, launcher, self.spec.ranks_per_node, command)
        return self._run_captured(launch.argv, {**launch.full_env(), **(env or {})}, timeout_s)

    def run_to_end(self, command: Sequence[str], *, launcher: Launcher, timeout_s: float) -> Finished:
        """Run ``command`` as ranks on all nodes; raise, with its last words, unless it ends well and in time."""
        where = f"{launcher} on {self.spec.nodes} nodes"
        try:
            finished = self.run(command, launcher=launcher, timeout_s=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"{where} did not end within {timeout_s:g} s.") from error
        if finished.exit_code:
            raise BenchError(f"{where} ended with {finished.exit_code}:\n{finished.stderr[-2000:]}")
        return finished

    def run_attached(self, command: Sequence[str], *, launcher: Launcher) -> int:
        """Run ``command`` as ranks on all nodes, on our own terminal, and return its exit code."""
        launch = launch_command(self.space, launcher, self.spec.ranks_per_node, command)
        with self._commands_end_here():
            return shell_code(subprocess.run(launch.argv, env=launch.full_env(), check=False).returncode)

    def run_on_nodes(self, commands: Mapping[int, Sequence[str]], *, timeout_s: float | None = None) -> Finished:
        """Run a command of its own on each of some nodes, side by side, without a launcher."""
        return self._run_captured(supervised(self.space, commands), dict(os.environ), timeout_s)

    def _run_captured(self, argv: Sequence[str], env: Mapping[str, str], timeout_s: float | None) -> Finished:
        before = self.bytes()
        # Files, not pipes: a process that outlives its launcher would hold a pipe open, and us with it.
        outputs = [self.space.folder / name for name in ("stdout", "stderr")]
        with outputs[0].open("w") as out, outputs[1].open("w") as err, self._commands_end_here():
            done = subprocess.run(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=timeout_s, check=False
            )
        texts = [path.read_text(errors="replace") for path in outputs]
        traffic = [now.since(then) for now, then in zip(self.bytes(), before, strict=True)]
        return Finished(shell_code(done.returncode), texts[0], texts[1], traffic)

    @contextmanager
    def _commands_end_here(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.space.kill_commands()


@contextmanager
def open_cluster(spec: ClusterSpec) -> Iterator[Cluster]:
    """Hold a cluster whose cables were measured and keep their promise; nothing of it is left afterwards."""
    start_s = time.perf_counter()
    with stale_clusters.private_folder() as folder, netns.open_space(folder, spec.nodes) as space:
        links.connect(space, spec.rate_bits_per_s)
        rates = rate_check.measure_rates(space, spec.rate_bits_per_s, spec.probe_s, spec.patience_s)
        rate_check.check_rates(rates, spec.rate_bits_per_s)
        yield Cluster(spec, space, rates, setup_s=time.perf_counter() - start_s)


def shell_code(returncode: int) -> int:
    """Return the exit code a shell would show: 128 and the signal's number for a process that a signal ended."""
    return returncode if returncode >= 0 else 128 - returncode
