"""Run several commands side by side; if one fails, end the others. Standard library only: it runs inside a cluster.

``supervise.py WORDS... -- WORDS... -- WORDS...`` exits with the code of the first command that failed, else with 0.
"""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_GRACE_S = 5.0


def supervise(commands: Sequence[Sequence[str]]) -> int:
    """Run all ``commands`` to their end, or until one fails; return the first failure's exit code, else 0."""
    running = {p.pid: p for p in [subprocess.Popen(command) for command in commands]}
    code = 0
    while running and code == 0:
        pid, status = os.waitpid(-1, 0)
        if process := running.pop(pid, None):
            process.returncode = os.waitstatus_to_exitcode(status)
            code = process.returncode
    for process in running.values():
        process.terminate()
    for process in running.values():
        _end(process)
    return code if code >= 0 else 128 - code


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def split_commands(words: Sequence[str]) -> list[list[str]]:
    """Return the commands that ``--`` separates."""
    groups = itertools.groupby(words, key=lambda word: word == "--")
    return [list(group) for is_separator, group in groups if not is_separator]


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    sys.exit(supervise(split_commands(sys.argv[1:])))
