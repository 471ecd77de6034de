"""The one verb: average tensors over all ranks, in full inside a node, compressed between nodes.

Collectives start in an order that follows from the order of calls and from nothing else, so any number of buckets and
of calls can be under way at once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, Unpack, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flexcomm.between import Algorithm, Memory, Pending
from flexcomm.compress import TensorSpec
from flexcomm.errors import (
    DeadlineExceededError,
    FlexcommError,
    InvalidArgumentError,
    InvalidTensorError,
    NonFiniteError,
    TransportError,
)
from flexcomm.inquiry import explain_deadline
from flexcomm.kernels import LARGEST_MAGNITUDE, Average, Momentum, choose_kernels
from flexcomm.routes import NonFinitePolicy, Request, Route, plan_routes
from flexcomm.stats import SyncRecord
from flexcomm.transport import LoopbackTransport
from flexcomm.walk import Luggage, Walk, walk
from flexcomm.world import World, connect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flexcomm.compress import Compressor
    from flexcomm.pieces import Piece
    from flexcomm.residuals import Residuals
    from flexcomm.transport import Transport

__all__ = ["BUCKET_BYTES", "SyncHandle", "SyncOptions", "hierarchical_sync", "start_exchange", "start_sync"]

BUCKET_BYTES = 32 << 20
"""Dense bytes of a bucket. docs/benchmarks.md shows what other sizes cost."""

T = TypeVar("T", Tensor, list[Tensor])
log = logging.getLogger(__name__)


class SyncOptions(TypedDict, total=False):
    """What a synchronisation can be told beside what and how: equal on all ranks, but for the residuals' contents."""

    world: World | None
    """The ranks; those that ``flexcomm.connect()`` finds, if none are given."""
    residuals: Residuals | None
    """Keep what was not sent, and add it next time."""
    names: Sequence[str] | None
    """What tensors are called in residuals and messages; their positions, if not given."""
    step: int | None
    """Tells random and striding compressors which coordinates are due; calls are counted, if not given."""
    average: Average
    """Divide by the number of nodes, or, coefficient by coefficient, of those that sent it."""
    algorithm: Algorithm
    """The way between nodes; ``auto`` takes the one with the fewest bytes."""
    nonfinite: NonFinitePolicy
    """What a NaN on any rank does on all: raise, skip the call (all get zeros, residuals stay), or count as zero."""
    bucket_bytes: int
    """Dense bytes that travel together."""


def hierarchical_sync(tensors: T, compressor: Compressor, **options: Unpack[SyncOptions]) -> T:
    """Return the average of every rank's tensor, or tensors, as far as ``compressor`` sends it between nodes.

    All ranks call it with equal shapes, dtypes and options, and hold the same bits afterwards. What is passed in is not
    changed; nothing is, by a call that raises.
    """
    return start_sync(tensors, compressor, **options).wait()


def start_sync(tensors: T, compressor: Compressor, **options: Unpack[SyncOptions]) -> SyncHandle[T]:
    """Start :func:`hierarchical_sync`, and return when everything is on its way between the nodes."""
    world = options.get("world") or default_world()
    return _start(world, world.intra, tensors, compressor, options)


def start_exchange(shards: T, compressor: Compressor, **options: Unpack[SyncOptions]) -> SyncHandle[T]:
    """Start the leg between nodes alone: for shards that were averaged inside the node before, as FSDP does.

    Ranks of equal local rank pass equal shapes; the ranks of a node may hold unequal ones. What is done about a NaN is
    agreed among the former only.
    """
    world = options.get("world") or default_world()
    return _start(world, LoopbackTransport(world.inter.timeout_s), shards, compressor, options)


@lru_cache(maxsize=1)
def default_world() -> World:
    """Return the world of calls that name none, connected when first needed."""
    return connect()


class SyncHandle(Generic[T]):
    """A synchronisation under way. Handles of a world are finished in the order they were started."""

    def __init__(self, sync: _Sync, single: bool) -> None:
        self._sync = sync
        self._single = single

    def wait(self) -> T:
        """Return the averages; calling again returns them again. Raises what went wrong, every time."""
        self._sync.state.finish_up_to(self._sync)
        outputs = self._sync.result()
        return cast("T", outputs[0] if self._single else outputs)

    def done(self) -> bool:
        """Return whether what was sent between nodes has arrived: then ``wait`` has the rest to do."""
        return self._sync.has_arrived()

    @property
    def record(self) -> SyncRecord:
        """What it cost so far."""
        return self._sync.record


def _start(world: World, intra: Transport, tensors: T, compressor: Compressor, options: SyncOptions) -> SyncHandle[T]:
    single = isinstance(tensors, Tensor)
    xs = cast("list[Tensor]", [tensors] if single else list(tensors))
    residuals, step = options.get("residuals"), options.get("step")
    request = Request(
        specs=_specs_of(xs, options.get("names")),
        compressor=compressor,
        average=options.get("average", "nodes"),
        algorithm=options.get("algorithm", "auto"),
        nonfinite=options.get("nonfinite", "raise"),
        bucket_bytes=options.get("bucket_bytes", BUCKET_BYTES),
        keeps_residuals=residuals is not None,
    )
    state = _state_of(world)
    state.agree(world, request, whole=intra is world.intra)
    sync = _Sync(world, state, request, intra, xs, residuals, state.calls if step is None else step)
    state.calls += 1
    sync.start()
    state.under_way.append(sync)
    return SyncHandle(sync, single)


def _specs_of(tensors: list[Tensor], names: Sequence[str] | None) -> tuple[TensorSpec, ...]:
    names = [str(number) for number in range(len(tensors))] if names is None else list(names)
    if len(names) != len(tensors) or len(set(names)) != len(names):
        raise InvalidArgumentError(
            f"{len(tensors)} tensors need as many names, all different, but got {names}: pass one for each."
        )
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        raise InvalidTensorError(
            f"the tensors of one call are on {', '.join(sorted(map(str, devices)))}: move them to one device, or call "
            f"once for each."
        )
    return tuple(TensorSpec(name, tuple(x.shape), x.dtype) for name, x in zip(names, tensors, strict=True))


@dataclass(eq=False)
class _State:
    """What the calls of one world share. It does not hold the world, which would then never end."""

    under_way: deque[_Sync] = field(default_factory=deque)
    sequence: int = 0
    calls: int = 0
    previous: Request | None = None
    previous_whole: Request | None = None
    agreed: set[tuple[Request, bool, Request | None]] = field(default_factory=set)
    memories: dict[tuple[Route, torch.device], list[Memory]] = field(default_factory=dict)

    def agree(self, world: World, request: Request, *, whole: bool) -> None:
        """Return when all ranks concerned ask for the same, and asked for the same before."""
        # The ranks of a node may exchange different shards: those are no business of all ranks.
        previous = self.previous_whole if whole else self.previous
        key = (request, whole, previous)
        if key not in self.agreed:
            before = "none" if previous is None else str(previous.fields())
            fields = request.fields() | {"call": "start_sync" if whole else "start_exchange", "call before": before}
            (world.agree if whole else world.agree_between)(fields)
            self.agreed.add(key)
        self.previous = request
        if whole:
            self.previous_whole = request

    def take_memory(self, route: Route, device: torch.device) -> Memory:
        free = self.memories.setdefault((route, device), [])
        return free.pop() if free else Memory(device)

    def finish_up_to(self, sync: _Sync) -> None:
        """Finish calls in the order they were started: their collectives must start in one order on all ranks."""
        while sync in self.under_way:
            self.under_way.popleft().finish()


_states: WeakKeyDictionary[World, _State] = WeakKeyDictionary()


def _state_of(world: World) -> _State:
    return _states.setdefault(world, _State())


class _Sync:
    """The walks of one call's buckets, and what becomes of them."""

    def __init__(
        self,
        world: World,
        state: _State,
        request: Request,
        intra: Transport,
        tensors: list[Tensor],
        residuals: Residuals | None,
        step: int,
    ) -> None:
        self.state = state
        self.record = SyncRecord(syncs=1)
        self._world = world
        self._request, self._intra, self._residuals, self._step = request, intra, residuals, step
        self._outputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
        self._tensors = [_without_nonfinite(x) if request.nonfinite == "zero" else x.detach() for x in tensors]
        self._names = [spec.name for spec in request.specs]
        self._lent: list[str] = []
        self._walks: list[_Walker] = []
        self._memories: list[tuple[Route, Memory]] = []
        self._error: BaseException | None = None

    def start(self) -> None:
        """Take every bucket to where it is between nodes; the next one is encoded while one is on the wire."""
        if self._residuals is not None:
            self._residuals.claim(self._names)
        try:
            for route in plan_routes(self._request, self._world.inter.size, self._intra.size):
                self._walks.append(_Walker(walk(self._pack(route)), self.record))
            for walker in self._walks:
                walker.begin()
            for walker in self._walks:
                walker.go_on_to_rest()
        except DeadlineExceededError as error:
            explained = explain_deadline(self._world, error, self.state.sequence)
            self._give_up(explained)
            raise explained from error
        except BaseException as error:
            self._give_up(error)
            raise

    def finish(self) -> None:
        """Take every bucket to its end. What goes wrong is kept for those who ask for the result."""
        try:
            while sum(walker.go_on_once() for walker in self._walks):
                pass
            failures = [walker.failure for walker in self._walks if walker.failure]
            if failures:
                raise failures[0]
            self._settle([sender for walker in self._walks for sender in walker.flagged])
        except DeadlineExceededError as error:
            self._give_up(explain_deadline(self._world, error, self.state.sequence))
        except BaseException as error:
            self._give_up(error)
            if not isinstance(error, Exception):
                raise

    def result(self) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs

    def has_arrived(self) -> bool:
        return all(walker.has_arrived() for walker in self._walks)

    def _pack(self, route: Route) -> Luggage:
        world, device = self._world, self._tensors[route.tensors[0]].device
        memory = self.state.take_memory(route, device)
        self._memories.append((route, memory))
        self.state.sequence += 1
        mine = route.pieces[self._intra.rank]
        self.record.dense_bytes += sum(piece.last - piece.first for piece in mine) * route.dtype.itemsize
        return Luggage(
            route=route,
            tensors=self._tensors,
            outputs=self._outputs,
            momenta=[self._momentum(piece, device) for piece in mine],
            step=self._step,
            sequence=self.state.sequence,
            average=self._request.average,
            kernels=choose_kernels(device),
            intra=self._intra,
            inter=world.inter,
            names=_names_of(world, self._intra),
            memory=memory,
            record=self.record,
        )

    def _momentum(self, piece: Piece, device: torch.device) -> Momentum:
        share = 1.0 / self._intra.size
        if self._residuals is None:
            return Momentum(gain=share)
        momentum = self._residuals.lend(piece.spec.name, piece.plan, device, share)
        self._lent.append(piece.spec.name)
        return momentum

    def _settle(self, flagged: list[str]) -> None:
        """Keep what came of it or, if somebody had nothing fit to send, do what was asked for then."""
        if flagged and self._request.nonfinite == "raise":
            raise NonFiniteError(
                f"{', '.join(dict.fromkeys(flagged))} had NaN, infinity or a magnitude of 2**100 or more to send, and "
                f"nothing was changed on any rank. Skip this step; if that happens often, lower the learning rate or "
                f"the loss scale, clip, or pass nonfinite='skip'."
            )
        if flagged:
            for out in self._outputs:
                out.zero_()
            self.record.skipped = 1
        if self._residuals is not None:
            (self._residuals.give_up if flagged else self._residuals.commit)(self._lent)
            self._residuals.release(self._names)
        for route, memory in self._memories:
            self.state.memories[route, self._outputs[route.tensors[0]].device].append(memory)
        self._world.enter(self.record, sequence=self.state.sequence, step=self._step)

    def _give_up(self, error: BaseException) -> None:
        """Leave everything as it was. Buffers are not used again: a cable may still write into them."""
        self._error = error
        if self._residuals is not None:
            self._residuals.give_up(self._lent)
            self._residuals.release(self._names)


class _Walker:
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


def _without_nonfinite(x: Tensor) -> Tensor:
    return torch.where(x.abs() < LARGEST_MAGNITUDE, x, 0.0).detach()


def _names_of(world: World, intra: Transport) -> list[list[str]]:
    """Return what to call the ranks of each local rank, node by node; of this rank's own alone, if it walks alone."""
    pairs = world.topology.pairs if intra is world.intra else [world.topology.pairs[world.topology.local_rank]]
    return [[f"rank {rank} (node {node})" for node, rank in enumerate(ranks)] for ranks in pairs]
