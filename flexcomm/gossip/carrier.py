"""The carrier: a thread that takes trips between ranks one after the other, while the caller computes.

A trip is several collectives in a row, each of which needs the one before: nobody else would start the second while
the caller is busy. Trips run in the order in which they were submitted, so all ranks start their collectives in one
order, and on cables of their own, so that order has nothing to do with what else the ranks do.
"""

from __future__ import annotations

import atexit
import threading
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from flexcomm.device import make_stream, record_event, use_stream, wait_stream
from flexcomm.errors import TransportError
from flexcomm.transport.mpi_progress import threads_are_free

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from flexcomm.world import World

__all__ = ["Carrier", "carrier_of"]

T = TypeVar("T")

_END_S = 1.0
"""How long an interpreter that ends waits for a trip that will not."""


class Carrier:
    """The cables of a world that trips are taken on, and the thread that takes them.

    After a cable failed, all later trips fail with the same error: the ranks no longer agree on which trip is next.
    """

    def __init__(self, world: World) -> None:
        self.cables = world.clone_groups()
        self.sequence = 0
        self._device = world.device
        self._is_free = all("mpi" not in cable.name or threads_are_free() for cable in (world.intra, world.inter))
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._broken: TransportError | None = None
        self._closed = False
        self._stream = make_stream(world.device)
        self._thread = threading.Thread(target=self._run, name="flexcomm-mixing", daemon=True)
        self._thread.start()
        # A world that is closed with trips under way lets them arrive: its peers wait for them.
        world.at_close(self._finish)
        atexit.register(self._stop)

    def submit(self, trip: Callable[[], T]) -> Future[T]:
        """Have a trip taken after all those before it; on CUDA, after what the current stream has been given.

        Where this MPI serves one thread at a time, the caller waits for it here.
        """
        if self._closed:
            raise TransportError("mixing on a world that is closed. Connect again, or close it later.")
        future: Future[T] = Future()
        ready = record_event(self._device)
        self._waiting.put((future, lambda: self._take(trip, ready)))
        if not self._is_free:
            wait([future])
        return future

    def settle(self) -> None:
        """Order the current CUDA stream behind what the trips taken so far have been given to do."""
        wait_stream(self._device, self._stream)

    def _take(self, trip: Callable[[], T], ready: torch.Event | None) -> T:
        if self._broken is not None:
            raise self._broken
        try:
            with use_stream(self._stream, ready):
                return trip()
        except TransportError as error:
            self._broken = error
            raise

    def _run(self) -> None:
        while (job := self._waiting.get()) is not None:
            future, take = job
            try:
                future.set_result(take())
            except BaseException as error:  # Whoever waits for the trip raises it.
                future.set_exception(error)
            # Else the last trip's tensors would live until the next one comes.
            del job, future, take

    def _finish(self) -> None:
        atexit.unregister(self._stop)
        self._closed = True
        self._waiting.put(None)
        self._thread.join()

    def _stop(self) -> None:
        self._waiting.put(None)
        self._thread.join(timeout=_END_S)


_carriers: WeakKeyDictionary[World, dict[str, Carrier]] = WeakKeyDictionary()


def carrier_of(world: World, lane: str) -> Carrier:
    """Return the carrier of a lane; all ranks ask for it together the first time, because it lays cables.

    Trips of one lane are taken in the order of their calls, so ranks must make those in the same order; those of
    different lanes have nothing to do with each other.
    """
    carriers = _carriers.setdefault(world, {})
    if lane not in carriers:
        carriers[lane] = Carrier(world)
    return carriers[lane]
