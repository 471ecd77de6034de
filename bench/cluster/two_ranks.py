"""Ranks of a command that was started alone: two processes on our own terminal that stand for two nodes.

No launcher: torchrun leaves its ranks behind on Ctrl-C, and mpirun hides the terminal from them.
"""

import os
import signal
import socket
import subprocess
import sys

from bench.cluster.cluster import shell_code

_RANKS = 2
_GRACE_S = 10.0
"""How long a rank may take to finish a call that is under way and print what it has."""


def start_two_ranks() -> int:
    """Run this very command as two ranks of one node each, and return the code that rank 0 exits with."""
    command = [sys.executable, "-m", "bench", *sys.argv[1:]]
    port = _free_port()
    ranks = [subprocess.Popen(command, env={**os.environ, **_announce(rank, port)}) for rank in range(_RANKS)]
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        _end(ranks)
    return shell_code(next((code for code in codes if code), 0))


def _announce(rank: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": _RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": _RANKS, "MASTER_PORT": port}
    words = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "FLEXCOMM_RANKS_PER_NODE": "1"}
    return {**{name: str(number) for name, number in numbers.items()}, **words}


def _end(ranks: list["subprocess.Popen[bytes]"]) -> None:
    """End the ranks that still run. Of two signals, a terminal's and ours, they heed the first."""
    for rank in ranks:
        rank.send_signal(signal.SIGINT)
    for rank in ranks:
        try:
            rank.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
