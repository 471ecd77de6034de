"""Driving a walk: waiting for its collectives one after the other, and keeping what became of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from flexcomm.errors import FlexcommError, TransportError

if TYPE_CHECKING:
    from flexcomm.between import Pending
    from flexcomm.stats import SyncRecord
    from flexcomm.walk import Walk

__all__ = ["Walker"]


class Walker:
    """A walk, and the collective it waits for.

    A walk that fails keeps why. The others of its call still go to their ends: the ranks that did not fail would wait
    for this one there. Only what happens to a cable ends all of them.
    """

    def __init__(self, walk: Walk, record: SyncRecord) -> None:
        self.flagged: list[str] = []
        self.failure: FlexcommError | None = None
        self._walk = walk
        self._record = record
        self._pending: Pending | None = None
        self._since_s = 0.0

    def begin(self) -> None:
        self._step(None)

    def go_on_to_rest(self) -> None:
        """Go on until a collective is under way behind which the caller may compute."""
        while self._pending is not None and not self._pending.may_rest:
            self.go_on_once()

    def go_on_once(self) -> bool:
        """Wait for the collective under way and start the next; return whether there is one."""
        if self._pending is None:
            return False
        with self._record.time("waiting"):
            result = self._pending.handle.wait()
        self._record.add_seconds(self._pending.level, time.perf_counter() - self._since_s)
        self._step(result)
        return self._pending is not None

    def has_arrived(self) -> bool:
        return self._pending is None or self._pending.handle.done()

    def _step(self, result: Any) -> None:
        try:
            self._pending = self._walk.send(result)
        except StopIteration as end:
            self._pending, self.flagged = None, end.value
            return
        except TransportError:
            raise
        except FlexcommError as failure:
            self._pending, self.failure = None, failure
            return
        self._since_s = time.perf_counter()
        self._record.count(self._pending.level, self._pending.sent_bytes, self._pending.received_bytes)
