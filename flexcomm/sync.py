"""The one verb: average tensors over all ranks, in full inside a node, compressed between nodes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Generic, TypedDict, TypeVar, Unpack, cast

import torch
from torch import Tensor

from flexcomm.calls import Call, Itinerary, calls_of, make_itinerary
from flexcomm.compress import TensorSpec
from flexcomm.errors import CompressorError, InvalidArgumentError, InvalidTensorError
from flexcomm.outputs import check_outputs
from flexcomm.routes import NonFinitePolicy, Request
from flexcomm.transport import LoopbackTransport
from flexcomm.world import World, default_world

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flexcomm.between import Algorithm
    from flexcomm.compress import Compressor
    from flexcomm.kernels import Average
    from flexcomm.pieces import Piece
    from flexcomm.residuals import Residuals
    from flexcomm.stats import SyncRecord
    from flexcomm.transport import Transport

__all__ = [
    "BUCKET_BYTES",
    "SyncHandle",
    "SyncOptions",
    "hierarchical_sync",
    "plan_residuals",
    "start_exchange",
    "start_sync",
]

BUCKET_BYTES = 16 << 20
"""Dense bytes of a bucket. docs/benchmarks.md shows what other sizes cost."""

_PIECE = re.compile(r"\[\d+:\d+\]$")

T = TypeVar("T", Tensor, list[Tensor])


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
    out: Tensor | Sequence[Tensor] | None
    """Where the averages go, instead of new tensors: as the tensors are, contiguous, in memory of their own."""


def hierarchical_sync(tensors: T, compressor: Compressor, **options: Unpack[SyncOptions]) -> T:
    """Return the average of every rank's tensor, or tensors, as far as ``compressor`` sends it between nodes.

    All ranks call it with equal shapes, dtypes and options, and hold the same bits afterwards. What is passed in is not
    changed; nothing is, by a call that raises.
    """
    return start_sync(tensors, compressor, **options).wait()


def start_sync(tensors: T, compressor: Compressor, **options: Unpack[SyncOptions]) -> SyncHandle[T]:
    """Start :func:`hierarchical_sync`, and return when everything is on its way between the nodes."""
    world = _world_of(options)
    return _start(world, world.intra, tensors, compressor, options)


def start_exchange(shards: T, compressor: Compressor, **options: Unpack[SyncOptions]) -> SyncHandle[T]:
    """Start the leg between nodes alone: for shards that were averaged inside the node before, as FSDP does.

    Ranks of equal local rank pass equal shapes; the ranks of a node may hold unequal ones. What is done about a NaN is
    agreed among the former only.
    """
    world = _world_of(options)
    return _start(world, LoopbackTransport(world.inter.timeout_s), shards, compressor, options)


def plan_residuals(
    tensors: list[Tensor], compressor: Compressor, *, inside: bool, **options: Unpack[SyncOptions]
) -> list[Piece | None]:
    """Return, for each tensor, the piece that this rank's residuals hold: None if it holds nothing of it.

    ``inside`` says whether the ranks of a node add up their tensors, as in ``start_sync``, or not, as in
    ``start_exchange``. Nothing is sent. The state of a piece is called ``piece.spec.name`` and float32 of
    ``piece.plan.state_shape``.
    """
    world = _world_of(options)
    intra = world.intra if inside else LoopbackTransport(world.inter.timeout_s)
    itinerary = _itinerary_for(world, intra, tensors, compressor, options)
    held: list[Piece | None] = [None] * len(tensors)
    for stage in itinerary.stages:
        route = stage.route
        for number, piece in zip(route.numbers[intra.rank], route.pieces[intra.rank], strict=True):
            held[number] = piece
    return held


class SyncHandle(Generic[T]):
    """A synchronisation under way. Handles of a world are finished in the order they were started."""

    def __init__(self, call: Call, result: T) -> None:
        self._call = call
        self._result: T = result

    def wait(self) -> T:
        """Return the averages; calling again returns them again. Raises what went wrong, every time."""
        self._call.calls.finish_up_to(self._call)
        self._call.check()
        return self._result

    def done(self) -> bool:
        """Return whether what was sent between nodes has arrived: then ``wait`` has the rest to do."""
        return self._call.has_arrived()

    def undo(self) -> None:
        """Take back what this call did to its residuals, if it did, before another call uses them.

        For a step of several calls, one of which failed. All ranks do it, or none.
        """
        self._call.undo()

    @property
    def record(self) -> SyncRecord:
        """What it cost so far."""
        return self._call.record


def _world_of(options: SyncOptions) -> World:
    strange = options.keys() - SyncOptions.__annotations__.keys()
    if strange:
        raise InvalidArgumentError(
            f"got {', '.join(sorted(strange))}, but the options are {', '.join(SyncOptions.__annotations__)}."
        )
    return options.get("world") or default_world()


def _start(world: World, intra: Transport, tensors: T, compressor: Compressor, options: SyncOptions) -> SyncHandle[T]:
    single = isinstance(tensors, Tensor)
    xs = cast("list[Tensor]", [tensors] if single else list(tensors))
    itinerary = _itinerary_for(world, intra, xs, compressor, options)
    outputs = _outputs_for(xs, itinerary, options.get("out"))
    call = Call(world, intra, itinerary, xs, outputs, options.get("residuals"), options.get("step"))
    call.start()
    return SyncHandle(call, cast("T", outputs[0] if single else outputs))


def _itinerary_for(
    world: World, intra: Transport, tensors: list[Tensor], compressor: Compressor, options: SyncOptions
) -> Itinerary:
    """Return what calls like this one have in common; the first of them makes it."""
    named = options.get("names")
    names = None if named is None else tuple(named)
    settings = (
        compressor,
        options.get("average", "nodes"),
        options.get("algorithm", "auto"),
        options.get("nonfinite", "raise"),
        options.get("bucket_bytes", BUCKET_BYTES),
        options.get("residuals") is not None,
    )
    shapes, dtypes = tuple([x.shape for x in tensors]), tuple([x.dtype for x in tensors])
    key = (shapes, dtypes, frozenset([x.device for x in tensors]), names, settings, intra is world.intra)
    calls = calls_of(world)
    try:
        known = calls.itineraries.get(key)
    except TypeError as error:
        raise CompressorError(
            f"{compressor!r} cannot be hashed ({error}): make it a frozen dataclass, so that its plans can be kept."
        ) from error
    if known is None:
        request = Request(_specs_of(tensors, names), *settings)
        known = make_itinerary(world, intra, request, _device_of(tensors))
        calls.remember(key, known)
    return known


def _specs_of(tensors: list[Tensor], names: tuple[str, ...] | None) -> tuple[TensorSpec, ...]:
    if names is None:
        names = tuple(str(number) for number in range(len(tensors)))
    if len(names) != len(tensors) or len(set(names)) != len(names) or not all(isinstance(one, str) for one in names):
        raise InvalidArgumentError(
            f"{len(tensors)} tensors need as many names, all different strings, but got {list(names)}: pass one for "
            f"each."
        )
    taken = [name for name in names if _PIECE.search(name)]
    if taken:
        raise InvalidArgumentError(
            f"{', '.join(taken)}: names that end in [number:number] stand for pieces of tensors; choose others."
        )
    return tuple(TensorSpec(name, tuple(x.shape), x.dtype) for name, x in zip(names, tensors, strict=True))


def _device_of(tensors: list[Tensor]) -> torch.device:
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        raise InvalidTensorError(
            f"the tensors of one call are on {', '.join(sorted(map(str, devices)))}: move them to one device, or call "
            f"once for each."
        )
    device = devices.pop() if devices else torch.device("cpu")
    if device.type not in ("cpu", "cuda") or any(x.layout is not torch.strided for x in tensors):
        raise InvalidTensorError(
            f"tensors are on {device}, with layouts {', '.join(sorted({str(x.layout) for x in tensors}))}: make them "
            f"dense tensors on cpu or cuda."
        )
    return device


def _outputs_for(tensors: list[Tensor], itinerary: Itinerary, out: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    """Return the tensors to be filled: those given, once they are known to be fit for that, else new ones."""
    if out is None:
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    outputs = [out] if isinstance(out, Tensor) else list(out)
    check_outputs(tensors, outputs, itinerary.names)
    return outputs
