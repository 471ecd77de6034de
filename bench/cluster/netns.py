"""Hosts made of Linux namespaces: a switch and some nodes, on which commands run.

[Note: lifetime of a cluster]
One process, the *namespace holder*, is the first of a new PID namespace and waits on a pipe whose other end only we
have. When we close it, or die of anything including SIGKILL, the holder ends, the kernel kills every process of that
PID namespace, and with the last process the anonymous network namespaces, their bridge, links and limits are removed.
Nothing has a name on the host, so clusters cannot collide, and there is nothing to delete by name.

The holder is in the switch's namespaces. Each node is a ``sleep`` in its own network, host name, IPC and mount
namespaces, inside the holder's PID namespace, so that a launcher running on one node can enter another (``agent``).
"""

import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.cluster import stale_clusters
from bench.errors import ClusterUnavailableError

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "util-linux"}
_END_S = 10.0

_NAMESPACE_HOLDER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("programs.py")), "hold"]

_NODE = """
set -e
folder=$1; name=$2
echo "$name" > /proc/sys/kernel/hostname
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=1777 shm /dev/shm
mount --bind "$folder/hosts" /etc/hosts
mkdir "$folder/$name"
echo $$ > "$folder/$name.pid"
echo ready
exec sleep infinity
"""

_AGENT = """#!/bin/sh
# Stands in for ssh: AGENT [OPTIONS] NODE WORDS..., and a shell on the node reads the words.
while [ "${{1#-}}" != "$1" ]; do shift; done
node=$1; shift
read -r pid < {folder}/"$node".pid || exit 255
TMPDIR={folder}/"$node"; export TMPDIR
exec nsenter --target "$pid" --net --uts --ipc --mount -- /bin/sh -c 'cd "$0" && eval "$1"' "$PWD" "$*"
"""


@dataclass(frozen=True)
class Node:
    """One emulated host: its name, the address of its link, and its pid inside the cluster."""

    name: str
    address: str
    pid: int


@dataclass(frozen=True)
class Space:
    """The namespaces of a running switch and its nodes."""

    folder: Path
    holder_pid: int
    nodes: tuple[Node, ...]

    @property
    def agent(self) -> Path:
        """The program that stands in for ssh, inside the cluster."""
        return self.folder / "agent"

    def on_node(self, node: Node, command: Sequence[str]) -> list[str]:
        """Return the words that run ``command`` on ``node``, from the host."""
        return self.on_switch(self.through_agent(node, command))

    def through_agent(self, node: Node, command: Sequence[str]) -> list[str]:
        """Return the words that run ``command`` on ``node``, from inside the cluster."""
        # Without exec a shell would stand between a signal and the command.
        return [str(self.agent), node.name, f"exec {shlex.join(command)}"]

    def on_switch(self, command: Sequence[str]) -> list[str]:
        """Return the words that run ``command`` beside the switch, from where every node can be entered."""
        return [*_enter(self.holder_pid), *command]

    def kill_commands(self) -> None:
        """Kill every process of the cluster but those that hold its namespaces."""
        holders = {1, *(node.pid for node in self.nodes)}
        while pidfds := _pidfds_inside(self.holder_pid, holders):
            for pidfd in pidfds:
                _kill(pidfd)


def check_available() -> None:
    """Raise unless this machine has the tools and the rights that an emulated cluster needs."""
    missing = (tool for tool in _TOOLS if shutil.which(tool) is None)
    problems = [f"{tool} is not on the PATH (install {_TOOLS[tool]})" for tool in missing]
    if os.geteuid() != 0:
        problems.insert(0, f"user id {os.geteuid()} is not root (run it with sudo)")
    if problems:
        raise ClusterUnavailableError(unavailable("; ".join(problems)))


def unavailable(problem: str) -> str:
    """Return the message for a machine that cannot emulate a cluster because of ``problem``."""
    return (
        f"cannot emulate a cluster here: {problem}. It needs root, iproute2, util-linux and a kernel with namespaces, "
        f"veth, bridge and tbf. Without them, --loopback runs the same ranks on this host, with no emulated rate."
    )


@contextmanager
def open_space(folder: Path, nodes: int) -> Iterator[Space]:
    """Hold a switch and ``nodes`` hosts that are not connected yet; nothing of them is left afterwards."""
    check_available()
    unique = folder.name.removeprefix(stale_clusters.PREFIX)
    names = [f"node{i}-{unique}" for i in range(nodes)]
    addresses = [f"10.77.0.{i + 1}" for i in range(nodes)]
    _write_host_files(folder, names, addresses)
    with _namespace_holder() as holder_pid, _started_nodes(holder_pid, folder, names) as pids:
        yield Space(folder, holder_pid, tuple(map(Node, names, addresses, pids)))


def _write_host_files(folder: Path, names: Sequence[str], addresses: Sequence[str]) -> None:
    # The mapped form too: torch's store listens on IPv6 and asks for the names of the IPv4 peers it sees through it.
    named = [f"{prefix}{a} {n}" for prefix in ("", "::ffff:") for n, a in zip(names, addresses, strict=True)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *named]) + "\n")
    agent = folder / "agent"
    agent.write_text(_AGENT.format(folder=shlex.quote(str(folder))))
    agent.chmod(0o755)


@contextmanager
def _namespace_holder() -> Iterator[int]:
    """Run the namespace holder, and yield its pid; see [Note: lifetime of a cluster]."""
    unshare = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with background([*unshare, "--", *_NAMESPACE_HOLDER]) as process:
        try:
            await_ready(process)
            yield process.pid
        finally:
            # Ends its input. Its parent returns once the last process of the cluster is gone: nothing survives this.
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_END_S)


@contextmanager
def _started_nodes(holder_pid: int, folder: Path, names: Sequence[str]) -> Iterator[list[int]]:
    """Hold one process per node, and yield their pids inside the cluster."""
    unshare = [*_enter(holder_pid), "unshare", "--net", "--uts", "--ipc", "--mount", "--", "sh", "-c", _NODE, "node"]
    with ExitStack() as stack:
        started = [stack.enter_context(background([*unshare, str(folder), name])) for name in names]
        for process in started:
            await_ready(process)
        yield [int((folder / f"{name}.pid").read_text()) for name in names]


@contextmanager
def background(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a process in its own session, so that Ctrl-C reaches us alone; it has ended and is reaped afterwards."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def await_ready(process: subprocess.Popen[str]) -> None:
    """Return once the process prints "ready"; raise with its error output if it ends instead."""
    first_line = process.stdout.readline() if process.stdout else ""
    if first_line != "ready\n":
        process.kill()
        _, errors = process.communicate()
        raise ClusterUnavailableError(unavailable(f"namespaces were refused: {errors.strip()}"))


def _enter(holder_pid: int) -> list[str]:
    """Return the words that run the words after them beside the switch, in the current folder."""
    pid_namespace = f"--pid=/proc/{holder_pid}/ns/pid_for_children"
    nsenter = ["nsenter", "--target", str(holder_pid), "--net", "--uts", "--ipc", "--mount", pid_namespace, "--"]
    # Entering a mount namespace leads to its root folder; nsenter's own --wd would keep a folder of the old one.
    return [*nsenter, "sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd())]


def _pidfds_inside(holder_pid: int, holders: set[int]) -> list[int]:
    """Return a handle for every living process of the cluster whose pid inside it is not in ``holders``."""
    inside = Path(f"/proc/{holder_pid}/ns/pid_for_children").readlink()
    pidfds = []
    for entry in Path("/proc").glob("[0-9]*"):
        # A handle first, then the look: a pid that is reused in between cannot be mistaken for ours.
        with suppress(OSError):
            pidfd = os.pidfd_open(int(entry.name))
            if _is_inside(entry, inside, holders):
                pidfds.append(pidfd)
            else:
                os.close(pidfd)
    return pidfds


def _is_inside(entry: Path, inside: Path, holders: set[int]) -> bool:
    try:
        if (entry / "ns/pid").readlink() != inside:
            return False
        status = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines())
    except OSError:
        return False
    is_zombie = status["State"].strip().startswith("Z")
    return not is_zombie and int(status["NSpid"].split()[-1]) not in holders


def _kill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], _END_S)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)
