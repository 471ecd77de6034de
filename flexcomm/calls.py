"""Calls: what all calls of a world share, what calls of one kind share, and one call from its start to its end.

What follows from a request and the world is planned when it is first asked for, as an :class:`Itinerary`; a call fills
in tensors, residuals and step. Collectives start in an order that follows from the order of calls and from nothing
else, so any number of buckets and of calls can be under way at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from flexcomm.between import Memory
from flexcomm.bootstrap.hang_report import explain_timeout
from flexcomm.bucket import check_numbers
from flexcomm.errors import DeadlineExceededError, FlexcommError, NonFiniteError
from flexcomm.kernels import LARGEST_MAGNITUDE, Kernels, Momentum, choose_kernels
from flexcomm.routes import Request, Route, plan_routes
from flexcomm.stats import SyncRecord
from flexcomm.walk import Luggage, walk
from flexcomm.walker import Walker

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from flexcomm.residuals import Residuals
    from flexcomm.transport import Transport
    from flexcomm.world import World

__all__ = ["Call", "Calls", "Itinerary", "calls_of", "make_itinerary"]

_MOST_ITINERARIES = 256
"""Kinds of calls that are remembered, with their buffers. Where shapes keep changing, the oldest are forgotten."""
_MOST_SPARE = 8
"""Memories that a bucket keeps for calls under way at once; a burst of more gives its own back."""


@dataclass(eq=False)
class Stage:
    """A bucket's route, and what this rank needs to walk it: momenta without a memory, and memory no call uses now."""

    route: Route
    dense_nbytes: int
    momenta: list[Momentum]
    free: list[Memory]


@dataclass(eq=False)
class Itinerary:
    """What calls that ask for the same have in common, on rank ``rank`` of ``ranks`` in each of ``nodes`` nodes.

    ``whole`` says whether all ranks take part, or those of one local rank alone. ``senders[r][n]`` is what to call the
    rank that holds local rank r on node n. ``agreed_after`` are the numbers of the calls before, 0 for none, after
    which all ranks were found to ask for this: numbers, for one that is forgotten must not live on here.
    """

    request: Request
    device: torch.device
    nodes: int
    ranks: int
    rank: int
    whole: bool
    senders: list[list[str]]
    number: int = field(default_factory=count(1).__next__)
    agreed_after: set[int] = field(default_factory=set)

    @cached_property
    def kernels(self) -> Kernels:
        return choose_kernels(self.device)

    @cached_property
    def names(self) -> list[str]:
        return [spec.name for spec in self.request.specs]

    @cached_property
    def stages(self) -> list[Stage]:
        """The buckets. Not to be asked for before ranks agree: a plan that fails on one would fail there alone."""
        return [self._plan_stage(route) for route in plan_routes(self.request, self.nodes, self.ranks)]

    def _plan_stage(self, route: Route) -> Stage:
        mine = route.pieces[self.rank]
        numel = sum(piece.last - piece.first for piece in mine)
        return Stage(route, numel * route.dtype.itemsize, [Momentum(gain=1.0 / self.ranks)] * len(mine), [])


def make_itinerary(world: World, intra: Transport, request: Request, device: torch.device) -> Itinerary:
    """Return what follows from a request; ``intra`` joins the ranks of a node that take part."""
    whole = intra is world.intra
    pairs = world.topology.inter_groups if whole else [world.topology.inter_groups[world.topology.local_rank]]
    senders = [[f"rank {rank} (node {node})" for node, rank in enumerate(ranks)] for ranks in pairs]
    return Itinerary(request, device, world.inter.size, intra.size, intra.rank, whole, senders)


@dataclass(eq=False)
class Calls:
    """What the calls of one world share. It does not hold the world, which would then never end."""

    under_way: deque[Call] = field(default_factory=deque)
    sequence: int = 0
    count: int = 0
    previous: Itinerary | None = None
    previous_whole: Itinerary | None = None
    itineraries: dict[Hashable, Itinerary] = field(default_factory=dict)

    def remember(self, key: Hashable, itinerary: Itinerary) -> None:
        """Keep an itinerary. What was agreed stays agreed, so ranks need not forget the same ones."""
        if len(self.itineraries) >= _MOST_ITINERARIES:
            del self.itineraries[next(iter(self.itineraries))]
        self.itineraries[key] = itinerary

    def agree(self, world: World, itinerary: Itinerary) -> None:
        """Return when all ranks concerned ask for the same, and asked for the same before."""
        # The ranks of a node may exchange different shards: those are no business of all ranks.
        previous = self.previous_whole if itinerary.whole else self.previous
        number = 0 if previous is None else previous.number
        if number not in itinerary.agreed_after:
            before = "none" if previous is None else str(previous.request.fields())
            verb = "start_sync" if itinerary.whole else "start_exchange"
            agree = world.agree if itinerary.whole else world.agree_inter
            agree(itinerary.request.fields() | {"call": verb, "call before": before})
            itinerary.agreed_after.add(number)
        self.previous = itinerary
        if itinerary.whole:
            self.previous_whole = itinerary

    def finish_up_to(self, call: Call) -> None:
        """Finish calls in the order they were started: their collectives must start in one order on all ranks."""
        while call in self.under_way:
            self.under_way.popleft().finish()


_calls: WeakKeyDictionary[World, Calls] = WeakKeyDictionary()


def calls_of(world: World) -> Calls:
    """Return what the calls of a world share."""
    calls = _calls.get(world)
    if calls is None:
        calls = _calls[world] = Calls()
    return calls


class Call:
    """The walks of one call's buckets, and what becomes of them.

    ``outputs`` are contiguous, and all that a call writes but for the residuals' spare memory.
    """

    def __init__(
        self,
        world: World,
        intra: Transport,
        itinerary: Itinerary,
        tensors: list[Tensor],
        outputs: list[Tensor],
        residuals: Residuals | None,
        step: int | None,
    ) -> None:
        self.calls = calls_of(world)
        self.record = SyncRecord(syncs=1)
        self._world, self._intra, self._itinerary, self._residuals = world, intra, itinerary, residuals
        self._step = self.calls.count if step is None else step
        check_numbers(self._step, self.calls.sequence)
        self._outputs = [x.detach() for x in outputs]
        self._tensors = [x.detach() for x in tensors]
        if itinerary.request.nonfinite == "zero":
            self._tensors = [_without_nonfinite(x) for x in self._tensors]
        self._lent: list[str] = []
        self._walks: list[Walker] = []
        self._taken: list[tuple[Stage, Memory]] = []
        self._refusal: FlexcommError | None = None
        self._error: BaseException | None = None
        self._committed = False

    def start(self) -> None:
        """Take every bucket to where it is between nodes; the next one is encoded while one is on the wire."""
        self._agree()
        self.calls.count += 1
        if self._residuals is not None:
            self._residuals.claim(self._itinerary.names)
        try:
            stages = self._itinerary.stages
            # At once: a rank that gets stuck at one of them must stay in step with those that do not.
            first, self.calls.sequence = self.calls.sequence + 1, self.calls.sequence + len(stages)
            for sequence, stage in enumerate(stages, first):
                self._walks.append(Walker(walk(self._pack(stage, sequence)), self.record))
            for walker in self._walks:
                walker.begin()
            for walker in self._walks:
                walker.go_on_to_rest()
        except DeadlineExceededError as error:
            explained = explain_timeout(self._world, error, self.calls.sequence)
            self._give_up(explained)
            raise explained from error
        except BaseException as error:
            self._give_up(error)
            raise
        self.calls.under_way.append(self)

    def _agree(self) -> None:
        try:
            self.calls.agree(self._world, self._itinerary)
        except DeadlineExceededError as error:
            raise explain_timeout(self._world, error, self.calls.sequence) from error

    def finish(self) -> None:
        """Take every bucket to its end. What goes wrong is kept for those who ask for the result."""
        try:
            while sum(walker.go_on_once() for walker in self._walks):
                pass
            failures = [failure for failure in (self._refusal, *(one.failure for one in self._walks)) if failure]
            if failures:
                raise failures[0]
            self._settle([sender for walker in self._walks for sender in walker.flagged])
        except DeadlineExceededError as error:
            self._give_up(explain_timeout(self._world, error, self.calls.sequence))
        except BaseException as error:
            self._give_up(error)
            if not isinstance(error, Exception):
                raise

    def check(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error

    def undo(self) -> None:
        """Give the residuals back what this call took out of them, and take what it added; once, and if it changed any.

        For those who find, after a call succeeded, that what it belongs to did not.
        """
        if self._residuals is not None and self._committed:
            self._committed = False
            self._residuals.undo(self._lent)

    def has_arrived(self) -> bool:
        return all(walker.has_arrived() for walker in self._walks)

    def _pack(self, stage: Stage, sequence: int) -> Luggage:
        memory = stage.free.pop() if stage.free else Memory(self._itinerary.device)
        self._taken.append((stage, memory))
        self.record.dense_bytes += stage.dense_nbytes
        momenta, unfit = stage.momenta, ""
        if self._residuals is not None:
            try:
                momenta = self._borrow(stage.route, self._residuals)
            except FlexcommError as refusal:
                # Others may have no part of these residuals, and would wait: so this rank goes along, with nothing.
                self._refusal, unfit = self._refusal or refusal, str(refusal)
        return Luggage(
            route=stage.route,
            tensors=self._tensors,
            outputs=self._outputs,
            momenta=momenta,
            unfit=unfit,
            step=self._step,
            sequence=sequence,
            average=self._itinerary.request.average,
            kernels=self._itinerary.kernels,
            intra=self._intra,
            inter=self._world.inter,
            names=self._itinerary.senders,
            memory=memory,
            record=self.record,
        )

    def _borrow(self, route: Route, residuals: Residuals) -> list[Momentum]:
        momenta, share = [], 1.0 / self._intra.size
        for piece in route.pieces[self._intra.rank]:
            momenta.append(residuals.lend(piece.spec.name, piece.plan, self._itinerary.device, share))
            self._lent.append(piece.spec.name)
        return momenta

    def _settle(self, flagged: list[str]) -> None:
        """Keep what came of it or, if somebody had nothing fit to send, do what was asked for then."""
        if flagged and self._itinerary.request.nonfinite == "raise":
            raise NonFiniteError(
                f"{', '.join(dict.fromkeys(flagged))} had NaN, infinity or a magnitude of 2**100 or more to send, or "
                f"residuals that do not fit (then its own error says so), and nothing was changed on any rank. Skip "
                f"this step; if that happens often, lower the learning rate or the loss scale, clip, or pass "
                f"nonfinite='skip'."
            )
        if flagged:
            for out in self._outputs:
                out.zero_()
            self.record.skipped = 1
        if self._residuals is not None:
            (self._residuals.give_up if flagged else self._residuals.commit)(self._lent)
            self._committed = not flagged
            self._residuals.release(self._itinerary.names)
        for stage, memory in self._taken:
            if len(stage.free) < _MOST_SPARE:
                stage.free.append(memory)
        self._world.add_stats(self.record, sequence=self.calls.sequence, step=self._step)

    def _give_up(self, error: BaseException) -> None:
        """Leave everything as it was. Buffers are not used again: a cable may still write into them."""
        self._error = error
        if self._residuals is not None:
            self._residuals.give_up(self._lent)
            self._residuals.release(self._itinerary.names)


def _without_nonfinite(x: Tensor) -> Tensor:
    return torch.where(x.abs() < LARGEST_MAGNITUDE, x, 0.0)
