"""Programs that run inside an emulated cluster, as ``programs.py NAME ARGUMENTS``, with the standard library alone.

- ``hold``: the namespace holder. Keeps a cluster's namespaces alive until standard input ends; see the
  note in ``netns``.
- ``supervise -- WORDS... -- WORDS...``: runs commands side by side and ends the others if one fails. Exits with the
  code of the first command that failed, else with 0.
- ``serve ADDRESS``: answers measurements on the switch.
- ``measure ADDRESS NBYTES``: sends NBYTES from a node, receives NBYTES, and prints the two rates, each as seen by the
  receiver, in bits per second.
"""

import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence


def hold_namespaces() -> None:
    """Return when standard input ends."""
    # The first process of its namespace inherits the daemons that launchers leave: the kernel shall reap them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    sys.stdin.read()


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


_PORT = 5201
_CHUNK_NBYTES = 1 << 16
_LENGTH = struct.Struct("!Q")
_RATE = struct.Struct("!d")


def receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Return the next ``nbytes`` bytes."""
    received = bytearray()
    while len(received) < nbytes:
        received += _receive_some(connection, nbytes - len(received))
    return bytes(received)


def receive_rate(connection: socket.socket, nbytes: int) -> float:
    """Take ``nbytes`` bytes off the connection and return their rate, timed from the arrival of the first bytes."""
    remaining = nbytes - len(_receive_some(connection, min(nbytes, _CHUNK_NBYTES)))
    timed_nbytes, start_s = remaining, time.perf_counter()
    while remaining:
        remaining -= len(_receive_some(connection, min(remaining, _CHUNK_NBYTES)))
    return 8 * timed_nbytes / (time.perf_counter() - start_s)


def serve(address: str) -> None:
    """Answer measurements, any number at once, until killed."""
    with socket.create_server((address, _PORT), backlog=256) as listener:
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def measure(address: str, nbytes: int) -> None:
    """Measure both directions of this node's link and print them as JSON."""
    with socket.create_connection((address, _PORT), timeout=60) as connection:
        connection.sendall(_LENGTH.pack(nbytes) + bytes(nbytes))
        (sent_bits_per_s,) = _RATE.unpack(receive_exactly(connection, _RATE.size))
        print(json.dumps([sent_bits_per_s, receive_rate(connection, nbytes)]))


def _answer(connection: socket.socket) -> None:
    with connection:
        (nbytes,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))
        connection.sendall(_RATE.pack(receive_rate(connection, nbytes)))
        connection.sendall(bytes(nbytes))


def _receive_some(connection: socket.socket, most_nbytes: int) -> bytes:
    received = connection.recv(most_nbytes)
    if not received:
        raise ConnectionError(f"the peer closed the connection with {most_nbytes} or more bytes still to come")
    return received


def main(name: str, arguments: Sequence[str]) -> int:
    """Run the program of that name and return its exit code."""
    match name:
        case "hold":
            hold_namespaces()
        case "supervise":
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda received, _: sys.exit(128 + received))
            return supervise(split_commands(arguments))
        case "serve":
            serve(arguments[0])
        case "measure":
            measure(arguments[0], int(arguments[1]))
        case _:
            raise SystemExit(f"programs.py has no program {name!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
