"""How each launcher starts a command on all nodes of an emulated cluster."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.cluster.launchers import Invocation, Launcher, find_launcher
from bench.cluster.links import CABLE
from bench.cluster.netns import Space

# Every node has a network of its own, so the port is free on each of them.
_TORCHRUN_PORT = 29500

_SUPERVISE = [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervise.py"))]


def launch_command(space: Space, launcher: Launcher, ranks_per_node: int, command: Sequence[str]) -> Invocation:
    """Return how to run ``command`` as ``ranks_per_node`` ranks on every node, and the variables that needs."""
    found = find_launcher(launcher)
    argv = _LAUNCH[launcher](space, found.argv, ranks_per_node, command)
    return Invocation(tuple(argv), {**found.env, **_STAY_ON_THE_CABLE[launcher], "GLOO_SOCKET_IFNAME": CABLE})


def supervised(space: Space, commands: Mapping[int, Sequence[str]]) -> list[str]:
    """Return the words that run a command on each of some nodes; when one fails, the others are ended."""
    words = list(_SUPERVISE)
    for index, command in commands.items():
        words += ["--", *space.through_agent(space.nodes[index], command)]
    return space.on_switch(words)


# Nodes share one kernel, so a transport that looks around will find ways past the cable.
_STAY_ON_THE_CABLE: Mapping[Launcher, Mapping[str, str]] = {
    "openmpi": {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm,tcp",
        "OMPI_MCA_btl_tcp_if_include": CABLE,
        "PRTE_MCA_prte_if_include": CABLE,
    },
    # Left to itself, UCX crosses nodes by shared memory: 5 MB "crossed" 100 mbit in 1 ms instead of 0.42 s.
    "mpich": {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": CABLE},
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
    placement = ["-iface", CABLE, "-hosts", hosts, "-n", ranks]
    return space.on_node(space.nodes[0], [*mpirun, *agent, *placement, *command])


def _launch_torchrun(space: Space, torchrun: Sequence[str], ranks_per_node: int, command: Sequence[str]) -> list[str]:
    meeting = ["--master-addr", space.nodes[0].address, "--master-port", str(_TORCHRUN_PORT)]
    size = ["--nnodes", str(len(space.nodes)), "--nproc-per-node", str(ranks_per_node)]
    common = [*torchrun, *size, *meeting, "--no-python"]
    return supervised(space, {i: [*common, f"--node-rank={i}", *command] for i in range(len(space.nodes))})


_LAUNCH: Mapping[Launcher, Callable[[Space, Sequence[str], int, Sequence[str]], list[str]]] = {
    "openmpi": _launch_openmpi,
    "mpich": _launch_mpich,
    "torchrun": _launch_torchrun,
}
