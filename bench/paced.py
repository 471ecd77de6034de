"""Links of a chosen rate in software, on one host and without root. docs/transports.md says what they leave out.

[Note: the model] Each node has one full-duplex link to a switch that never blocks. An operation sends and receives, on
each of the P ranks of its group,

    all_gather of n bytes a rank        (P - 1) n
    all_gatherv                         sends (P - 1) of its own part, receives everybody else's
    all_reduce of n bytes               2 (P - 1) / P n, a ring's
    reduce_scatter of n bytes a rank    (P - 1) / P n, a ring's
    broadcast of n bytes                the root sends n, the others receive n: a pipeline
    send_recv                           the messages to and from other ranks
    barrier                             nothing

and is through when its bytes have passed at the link's rate, in each direction behind all that this rank started
before. The ranks of a node share its link evenly. The time passes while Python computes; what really moves the data
(gloo, MPI) does so meanwhile, at full speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from flexcomm.errors import InvalidArgumentError
from flexcomm.transport import Handle, Transport
from flexcomm.transport.base import Expired, Operation
from flexcomm.world import World

T = TypeVar("T")


def pace(world: World, *, rate_bits_per_s: float) -> World:
    """Return ``world`` as if each of its nodes had one full-duplex link of a given rate to the others.

    All ranks call it together. It paces ``inter`` and ``control``, and the clones that mixing makes of ``inter``; the
    transports inside a node stay as they are. Closing either world closes both.

    Args:
        world: what :func:`flexcomm.connect` returned.
        rate_bits_per_s: of each node's link, in each direction.

    Raises:
        InvalidArgumentError: the rate is not a positive number.
        ConfigMismatchError: ranks gave different rates.

    Example::

        with flexcomm.connect(ranks_per_node=2) as world:
            world = bench.paced.pace(world, rate_bits_per_s=20e6)
            ...  # hierarchical_sync, optimizers, mixing: all as over links of 20 Mbit/s

    """
    if not 0 < rate_bits_per_s < float("inf"):
        raise InvalidArgumentError(f"rate_bits_per_s={rate_bits_per_s} is not a rate: pass bits per second above 0.")
    world.agree({"rate_bits_per_s of pace": rate_bits_per_s})
    if world.topology.nodes == 1:
        return world
    link, local_size = Link(rate_bits_per_s), world.topology.local_size
    return world.with_transports(
        inter=lambda inter: PacedTransport(inter, link, sharers=local_size),
        # A ring through all ranks, node after node, leaves each node once.
        control=lambda control: PacedTransport(control, link, sharers=1),
    )


class Link:
    """A node's link, as one of its ranks sees it.

    Args:
        rate_bits_per_s: in each direction.
        clock: returns the seconds since some moment.
        sleep: returns that many seconds of ``clock`` later.

    """

    def __init__(
        self,
        rate_bits_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate_bits_per_s = rate_bits_per_s
        self.clock = clock
        self.sleep = sleep
        self._lock = threading.Lock()
        self._sent_s = self._received_s = float("-inf")

    def carry(self, sent_nbytes: float, received_nbytes: float) -> float:
        """Queue bytes in each direction, and return the moment at which all of them are through."""
        with self._lock:
            now_s = self.clock()
            if sent_nbytes:
                self._sent_s = max(now_s, self._sent_s) + 8 * sent_nbytes / self.rate_bits_per_s
            if received_nbytes:
                self._received_s = max(now_s, self._received_s) + 8 * received_nbytes / self.rate_bits_per_s
            return max(self._sent_s if sent_nbytes else now_s, self._received_s if received_nbytes else now_s)


class PacedTransport:
    """``transport``, whose operations take as long as ``link`` needs for their bytes; see [Note: the model].

    Args:
        transport: what moves the data.
        link: shared by all paced transports of this rank.
        sharers: how many ranks of this node send over the link at the same time.

    """

    def __init__(self, transport: Transport, link: Link, *, sharers: int = 1) -> None:
        self.name = f"{transport.name} paced to {link.rate_bits_per_s / 1e6:g} Mbit/s"
        self.rank = transport.rank
        self.size = transport.size
        self.timeout_s = transport.timeout_s
        self._transport = transport
        self._link = link
        self._sharers = sharers

    def __str__(self) -> str:
        return self.name

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        handle = self._transport.all_gather(x, out)
        others = (self.size - 1) * x.nbytes
        return self._carry("all_gather", handle, others, others)

    def all_gatherv(self, x: Tensor, counts: Sequence[int], out: Tensor | None = None) -> Operation[tuple[Tensor, ...]]:
        handle = self._transport.all_gatherv(x, counts, out)
        received = (sum(counts) - counts[self.rank]) * x.element_size()
        return self._carry("all_gatherv", handle, (self.size - 1) * x.nbytes, received)

    def all_reduce(self, x: Tensor) -> Operation[Tensor]:
        handle = self._transport.all_reduce(x)
        around = 2 * (self.size - 1) / self.size * x.nbytes
        return self._carry("all_reduce", handle, around, around)

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        handle = self._transport.reduce_scatter(x, out)
        around = (self.size - 1) / self.size * x.nbytes
        return self._carry("reduce_scatter", handle, around, around)

    def broadcast(self, x: Tensor, root: int = 0) -> Operation[Tensor]:
        handle = self._transport.broadcast(x, root)
        is_root = self.rank == root
        return self._carry("broadcast", handle, x.nbytes if is_root else 0, 0 if is_root else x.nbytes)

    def send_recv(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Operation[tuple[Tensor, ...]]:
        handle = self._transport.send_recv(sends, receives)
        sent, received = (sum(x.nbytes for peer, x in some if peer != self.rank) for some in (sends, receives))
        return self._carry("send_recv", handle, sent, received)

    def barrier(self) -> Operation[None]:
        return self._carry("barrier", self._transport.barrier(), 0, 0)

    def _carry(self, verb: str, handle: Handle[T], sent_nbytes: float, received_nbytes: float) -> Operation[T]:
        """Charge the link for what was started, not before: what is refused costs nothing, and has no size."""
        through_s = self._link.carry(self._sharers * sent_nbytes, self._sharers * received_nbytes)
        request = _PacedRequest(handle, through_s, self._link)
        return Operation(verb, self, request, handle.wait, handle)


class _PacedRequest:
    """Done when ``handle`` is, and the link has carried its bytes."""

    def __init__(self, handle: Handle[object], through_s: float, link: Link) -> None:
        self._handle = handle
        self._through_s = through_s
        self._link = link

    def done(self) -> bool:
        return self._link.clock() >= self._through_s and self._handle.done()

    def wait(self, timeout_s: float) -> None:
        deadline_s = self._link.clock() + timeout_s
        self._handle.wait()
        left_s = min(self._through_s, deadline_s) - self._link.clock()
        if left_s > 0:
            self._link.sleep(left_s)
        if self._through_s > deadline_s:
            raise Expired
