"""Measure one cable: run inside the emulated cluster by ``rate_check``, with nothing but the standard library.

``probe.py serve ADDRESS`` answers on the switch. ``probe.py measure ADDRESS NBYTES`` sends NBYTES from a
node, receives NBYTES, and prints the two rates, each as seen by the receiver, in bits per second.
"""

import json
import socket
import struct
import sys
import threading
import time

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
    """Take ``nbytes`` bytes off the connection and return their rate, the first piece's arrival starting the clock."""
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
    """Measure both directions of this node's cable and print them as JSON."""
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


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    if verb == "serve":
        serve(arguments[0])
    else:
        measure(arguments[0], int(arguments[1]))
