"""The ranks of a cluster on this one host, for machines that cannot emulate one: no cable, no rate, no counters."""

import subprocess
from collections.abc import Sequence

from bench.cluster.cluster import check_counts, shell_code
from bench.cluster.launchers import Launcher, mpirun_command

_GRACE_S = 5.0


def run_on_loopback(command: Sequence[str], *, nodes: int, ranks_per_node: int, launcher: Launcher) -> int:
    """Run ``command`` as all ranks of the cluster on this host, and return its exit code.

    ``flexcomm.connect()`` reads FLEXCOMM_RANKS_PER_NODE and takes each group of that many ranks for a node.
    """
    check_counts(nodes, ranks_per_node)
    launch = mpirun_command(launcher, nodes * ranks_per_node)
    env = {**launch.full_env(), "FLEXCOMM_RANKS_PER_NODE": str(ranks_per_node)}
    with subprocess.Popen([*launch.argv, *command], env=env) as process:
        try:
            return shell_code(process.wait())
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the launcher if it still runs, giving it time to end its ranks."""
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
