"""Progress of non-blocking MPI while Python computes.

[Note: MPI progress] An MPI moves data only inside MPI calls. Without help, a 5 MB gather over 100 Mbit/s that is
started before 0.8 s of computation takes place after it (measured with Open MPI 5: 1.3 to 1.6 s in all, against 0.81 s
with regular tests). So one daemon thread per process tests whatever is under way, twice a millisecond, and sleeps while
there is nothing. A rank that waits tests by itself: going through the thread would cost a small message its latency.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from functools import cache
from typing import TYPE_CHECKING

from flexcomm.errors import TransportError
from flexcomm.transport.base import Expired

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpi4py import MPI

TEST_INTERVAL_S = 0.0005
SPIN_S = 0.002
"""A rank that waits only yields between its tests for so long; then it sleeps a tenth of the time it has waited."""

log = logging.getLogger(__name__)


class MPIRequest:
    """The requests of one verb, tested by whoever comes first: the rank that waits or the progress thread.

    A verb is one or several chains, independent of each other: what a chain yields next is started when what it yielded
    before is done.
    """

    def __init__(self, chains: Sequence[Iterator[list[MPI.Request]]], where: str) -> None:
        from mpi4py import MPI

        self._mpi = MPI  # Kept: a handle may die when the interpreter ends, too late to import anything.
        self._chains = [(chain, next(chain)) for chain in chains]
        self._where = where
        self._lock = threading.Lock()
        self._finished = False
        self._error: TransportError | None = None

    def done(self) -> bool:
        if not self._finished and self._lock.acquire(blocking=False):
            try:
                self._test()
            finally:
                self._lock.release()
        return self._finished

    def wait(self, timeout_s: float) -> None:
        start_s = time.monotonic()
        while not self.done():
            waited_s = time.monotonic() - start_s
            if waited_s > timeout_s:
                raise Expired
            if waited_s < SPIN_S:
                os.sched_yield()  # Not `time.sleep(0)`, which the kernel's timer slack makes 50 us long.
            else:
                time.sleep(min(TEST_INTERVAL_S, waited_s / 10))
        if self._error is not None:
            raise self._error

    def _test(self) -> None:
        try:
            advanced = [(chain, self._advance(chain, requests)) for chain, requests in self._chains]
            self._chains = [(chain, requests) for chain, requests in advanced if requests]
            self._finished = self._finished or not self._chains
        except self._mpi.Exception as error:
            self._finished = True
            self._error = TransportError(f"{self._where} failed: {error.Get_error_string()}")
            self._error.__cause__ = error

    def _advance(self, chain: Iterator[list[MPI.Request]], requests: list[MPI.Request]) -> list[MPI.Request]:
        """Return the requests that a chain waits for now; none, if it has come to its end."""
        while requests and self._mpi.Request.Testall(requests):
            requests = next(chain, [])
        return requests


class ProgressThread:
    """Tests every request under way until it is done."""

    def __init__(self) -> None:
        self._under_way: list[MPIRequest] = []
        self._something = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="flexcomm-mpi-progress", daemon=True)
        self._thread.start()
        # MPI is finalised when the interpreter ends; a test after that is a crash.
        atexit.register(self._stop)

    def add(self, request: MPIRequest) -> None:
        self._under_way.append(request)
        self._something.set()

    def _run(self) -> None:
        while not self._stopping:
            self._something.wait()
            time.sleep(TEST_INTERVAL_S)
            for request in tuple(self._under_way):
                if request.done():
                    self._under_way.remove(request)
            if not self._under_way:
                self._something.clear()
                if self._under_way:
                    self._something.set()

    def _stop(self) -> None:
        self._stopping = True
        self._something.set()
        self._thread.join(timeout=1.0)


def start_request(chains: Sequence[Iterator[list[MPI.Request]]], where: str) -> MPIRequest:
    """Start what the chains yield first; the progress thread tests it from now on, where threads may call MPI."""
    request = MPIRequest(chains, where)
    if not request.done() and threads_are_free():
        progress_thread().add(request)
    return request


@cache
def progress_thread() -> ProgressThread:
    return ProgressThread()


@cache
def threads_are_free() -> bool:
    """Return whether this MPI lets several threads call it at once; log once that it does not."""
    from mpi4py import MPI

    is_granted = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    if not is_granted:
        log.warning("this MPI grants no MPI_THREAD_MULTIPLE: exchanges advance only while a rank waits for them.")
    return is_granted
