"""An emulated cluster on which commands run, for other benchmarks and tests.

with open_cluster(ClusterSpec(nodes=4, rate="100mbit")) as cluster:
    finished = cluster.run(["python", "train.py"], launcher="openmpi")
    print(finished.exit_code, finished.stdout, finished.traffic)
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.cluster import links, netns, stale_clusters
from bench.cluster.launchers import Invocation, Launcher, check_counts, find_launcher, shell_code
from bench.cluster.links import LINK_INTERFACE, LinkRate, Traffic, parse_rate
from bench.cluster.netns import Node, Space
from bench.errors import BenchError

# Every node has a network of its own, so the port is free on each of them.
_TORCHRUN_PORT = 29500
_SUPERVISE = [sys.executable, "-I", "-S", str(Path(__file__).with_name("programs.py")), "supervise"]


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster to emulate: ``nodes`` hosts of ``ranks_per_node`` ranks, on links of ``rate`` in each direction.

    Each link is measured for ``probe_s``, and again, for up to ``patience_s``, while it seems off its rate.
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


@dataclass(frozen=True)
class Finished:
    """Exit code, output and bytes of a command that has ended."""

    exit_code: int
    stdout: str
    stderr: str
    traffic: list[Traffic]


@dataclass(frozen=True)
class Cluster:
    """A running cluster; any number of commands can run on it, one after the other."""

    spec: ClusterSpec
    space: Space
    rates: list[LinkRate]
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
        """Run ``command`` as ranks on all nodes and return its output and the bytes on the links."""
        launch = launch_command(self.space, launcher, self.spec.ranks_per_node, command)
        return self._run_captured(launch.argv, {**launch.full_env(), **(env or {})}, timeout_s)

    def run_to_end(self, command: Sequence[str], *, launcher: Launcher, timeout_s: float) -> Finished:
        """Run ``command`` as ranks on all nodes; raise, with the end of its errors, unless it exits with 0 in time."""
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
        with self._ending_commands():
            return shell_code(subprocess.run(launch.argv, env=launch.full_env(), check=False).returncode)

    def run_on_nodes(self, commands: Mapping[int, Sequence[str]], *, timeout_s: float | None = None) -> Finished:
        """Run a command of its own on each of some nodes, side by side, without a launcher."""
        return self._run_captured(supervised(self.space, commands), dict(os.environ), timeout_s)

    def _run_captured(self, argv: Sequence[str], env: Mapping[str, str], timeout_s: float | None) -> Finished:
        before = self.bytes()
        # Files, not pipes: a process that outlives its launcher would hold a pipe open, and us with it.
        outputs = [self.space.folder / name for name in ("stdout", "stderr")]
        with outputs[0].open("w") as out, outputs[1].open("w") as err, self._ending_commands():
            done = subprocess.run(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=timeout_s, check=False
            )
        texts = [path.read_text(errors="replace") for path in outputs]
        traffic = [now.since(then) for now, then in zip(self.bytes(), before, strict=True)]
        return Finished(shell_code(done.returncode), texts[0], texts[1], traffic)

    @contextmanager
    def _ending_commands(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.space.kill_commands()


@contextmanager
def open_cluster(spec: ClusterSpec) -> Iterator[Cluster]:
    """Hold a cluster whose links were measured and have their rate; nothing of it is left afterwards."""
    start_s = time.perf_counter()
    with stale_clusters.private_folder() as folder, netns.open_space(folder, spec.nodes) as space:
        links.connect(space, spec.rate_bits_per_s)
        rates = links.measure_rates(space, spec.rate_bits_per_s, spec.probe_s, spec.patience_s)
        links.check_rates(rates, spec.rate_bits_per_s)
        yield Cluster(spec, space, rates, setup_s=time.perf_counter() - start_s)


def launch_command(space: Space, launcher: Launcher, ranks_per_node: int, command: Sequence[str]) -> Invocation:
    """Return the command line and variables that run ``command`` as ``ranks_per_node`` ranks on every node."""
    found = find_launcher(launcher)
    argv = _LAUNCH[launcher](space, found.argv, ranks_per_node, command)
    return Invocation(tuple(argv), {**found.env, **_KEEP_TO_THE_LINK[launcher], "GLOO_SOCKET_IFNAME": LINK_INTERFACE})


def supervised(space: Space, commands: Mapping[int, Sequence[str]]) -> list[str]:
    """Return the words that run a command on each of some nodes; when one fails, the others are ended."""
    words = list(_SUPERVISE)
    for index, command in commands.items():
        words += ["--", *space.through_agent(space.nodes[index], command)]
    return space.on_switch(words)


# Nodes share one kernel, so a transport left to itself finds paths that bypass the link.
_KEEP_TO_THE_LINK: Mapping[Launcher, Mapping[str, str]] = {
    "openmpi": {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm,tcp",
        "OMPI_MCA_btl_tcp_if_include": LINK_INTERFACE,
        "PRTE_MCA_prte_if_include": LINK_INTERFACE,
    },
    # Left to itself, UCX crosses nodes by shared memory: 5 MB "crossed" 100 mbit in 1 ms instead of 0.42 s.
    "mpich": {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK_INTERFACE},
    "torchrun": {},
}


def _launch_openmpi(space: Space, mpirun: Sequence[str], ranks_per_node: int, command: Sequence[str]) -> list[str]:
    hosts = ",".join(f"{node.name}:{ranks_per_node}" for node in space.nodes)
    ranks = str(ranks_per_node * len(space.nodes))
    agent = ["--prtemca", "plm_ssh_agent", str(space.agent)]
    placement = ["--host", hosts, "-n", ranks, "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
    return space.on_node(space.nodes[0], [*mpirun, *agent, *placement, *command])


def _launch_mpich(space: Space, mpirun: Sequence[str], ranks_per_node: int, command: Sequence[str]) -> list[str]:
    hosts = ",".join(f"{node.name}:{ranks_per_node}" for node in space.nodes)
    ranks = str(ranks_per_node * len(space.nodes))
    agent = ["-launcher", "ssh", "-launcher-exec", str(space.agent)]
    placement = ["-iface", LINK_INTERFACE, "-hosts", hosts, "-n", ranks]
    return space.on_node(space.nodes[0], [*mpirun, *agent, *placement, *command])


def _launch_torchrun(space: Space, torchrun: Sequence[str], ranks_per_node: int, command: Sequence[str]) -> list[str]:
    rendezvous = ["--master-addr", space.nodes[0].address, "--master-port", str(_TORCHRUN_PORT)]
    size = ["--nnodes", str(len(space.nodes)), "--nproc-per-node", str(ranks_per_node)]
    common = [*torchrun, *size, *rendezvous, "--no-python"]
    return supervised(space, {i: [*common, f"--node-rank={i}", *command] for i in range(len(space.nodes))})


_LAUNCH: Mapping[Launcher, Callable[[Space, Sequence[str], int, Sequence[str]], list[str]]] = {
    "openmpi": _launch_openmpi,
    "mpich": _launch_mpich,
    "torchrun": _launch_torchrun,
}
