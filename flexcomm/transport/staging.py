"""The verbs of a transport on tensors of any layout, over a backend that takes flat, contiguous buffers.

Here arguments are checked, and each tensor gets a buffer: its own memory where that is contiguous and in the backend's
reach, else a copy, on the host where need be. The transports without a backend of their own are here, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexcomm.device import KINDS, copy_to_host, may_pin_for, synchronize_event
from flexcomm.errors import InvalidTensorError, TransportError
from flexcomm.transport.base import Finished, Handle, Messages, Operation, Request, Transport, enqueues

REDUCIBLE = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.bfloat16: "UINT16_T",
    torch.float16: "UINT16_T",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
}
"""What verbs can add, and as what MPI moves it; it has no 16-bit floats."""


class StagingBuffer(NamedTuple):
    """The memory a backend writes, and the tensor that shall hold it."""

    buffer: Tensor
    target: Tensor

    def deliver(self) -> Tensor:
        if self.buffer.data_ptr() != self.target.data_ptr():
            self.target.detach().copy_(self.buffer.view(self.target.shape), non_blocking=True)
        return self.target


class BufferTransport(ABC):
    """A base for transports: a backend says which memory it reaches, and starts work on flat buffers.

    Its methods ``_start_...`` are called after all checks. An input buffer never overlaps an output; messages to this
    rank itself are copied here. Those of gathers also get the caller's tensor, of which the input may be a copy: ranks
    may differ in the memory their backends reach, but must start the same work.
    """

    name: str
    _start_all_gather: Callable[[Tensor, Tensor, Tensor], Request]
    _start_all_gatherv: Callable[[Tensor, Tensor, Tensor, Sequence[int]], Request]
    _start_all_reduce: Callable[[Tensor], Request]
    _start_reduce_scatter: Callable[[Tensor, Tensor], Request]
    _start_broadcast: Callable[[Tensor, int], Request]
    _start_send_recv: Callable[[Messages, Messages], Request]
    _start_barrier: Callable[[], Request]

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._closed = False

    def __str__(self) -> str:
        return f"{self.name} on rank {self.rank} of {self.size}"

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        source, place = self._source_and_place("all_gather", x, (self.size, *x.shape), out)
        request = self._start_all_gather(source, place.buffer, x)
        return Operation("all_gather", self, request, place.deliver, (source, place))

    def all_gatherv(self, x: Tensor, counts: Sequence[int], out: Tensor | None = None) -> Operation[tuple[Tensor, ...]]:
        if len(counts) != self.size or any(count < 0 for count in counts):
            raise InvalidTensorError(
                f"all_gatherv got counts {list(counts)}; needed is one count from 0 on for each of {self.size} ranks."
            )
        if x.numel() != counts[self.rank]:
            raise InvalidTensorError(
                f"all_gatherv got a tensor of {x.numel()} elements on rank {self.rank}, whose count is "
                f"{counts[self.rank]}. Pass x[:counts[rank]], and the same counts on every rank."
            )
        source, place = self._source_and_place("all_gatherv", x, (sum(counts),), out)
        request = self._start_all_gatherv(source, place.buffer, x, counts)
        return Operation(
            "all_gatherv", self, request, lambda: torch.split(place.deliver(), list(counts)), (source, place)
        )

    def all_reduce(self, x: Tensor) -> Operation[Tensor]:
        check_reducible(x)
        place = self._place_filled("all_reduce", x)
        return Operation("all_reduce", self, self._start_all_reduce(place.buffer), place.deliver, place)

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Operation[Tensor]:
        check_reducible(x)
        if x.dim() == 0 or x.shape[0] != self.size:
            raise InvalidTensorError(
                f"reduce_scatter got a tensor of shape {list(x.shape)}; its first dim must be the {self.size} ranks of "
                f"the group. Pass x.view({self.size}, -1), padded if need be."
            )
        source, place = self._source_and_place("reduce_scatter", x, tuple(x.shape[1:]), out)
        request = self._start_reduce_scatter(source, place.buffer)
        return Operation("reduce_scatter", self, request, place.deliver, (source, place))

    def broadcast(self, x: Tensor, root: int = 0) -> Operation[Tensor]:
        check_peer(root, self.size)
        place = self._place_filled("broadcast", x)
        return Operation("broadcast", self, self._start_broadcast(place.buffer, root), place.deliver, place)

    def send_recv(self, sends: Messages, receives: Messages) -> Operation[tuple[Tensor, ...]]:
        for peer, _ in (*sends, *receives):
            check_peer(peer, self.size)
        sources = [(peer, self._source("send_recv", x)) for peer, x in sends]
        places = [(peer, self._place_for("send_recv", x)) for peer, x in receives]
        own_sources = [source for peer, source in sources if peer == self.rank]
        own_buffers = [place.buffer for peer, place in places if peer == self.rank]
        if [(x.dtype, x.numel()) for x in own_sources] != [(x.dtype, x.numel()) for x in own_buffers]:
            raise InvalidTensorError(
                f"rank {self.rank} sends itself {[x.numel() for x in own_sources]} elements and receives "
                f"{[x.numel() for x in own_buffers]}: messages to oneself must match in number, dtype and size."
            )
        for source, buffer in zip(own_sources, own_buffers, strict=True):
            buffer.copy_(source)
        request = self._start_send_recv(
            [(peer, source) for peer, source in sources if peer != self.rank],
            [(peer, place.buffer) for peer, place in places if peer != self.rank],
        )
        return Operation(
            "send_recv", self, request, lambda: tuple(place.deliver() for _, place in places), (sources, places)
        )

    def barrier(self) -> Operation[None]:
        return Operation("barrier", self, self._start_barrier(), lambda: None)

    def enqueues(self, device: torch.device) -> bool:
        """Return whether work on this device's tensors is enqueued there; a backend of the host's blocks a thread."""
        del device
        return False

    @abstractmethod
    def _reaches(self, x: Tensor, verb: str) -> bool:
        """Return whether the backend may be handed the memory of ``x`` itself, to do that verb."""

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"{self}: this world is closed. Connect again, or close it later.")

    def _source(self, verb: str, x: Tensor) -> Tensor:
        """Return ``x`` flat and contiguous; on the host, complete, where the backend does not reach ``x`` itself."""
        check_plain(x)
        # A conjugate or negative view holds other bytes than its numbers say.
        flat = x.detach().resolve_conj().resolve_neg().reshape(-1)
        if self._reaches(x, verb):
            return flat.contiguous()
        staged, copied = copy_to_host(flat)
        synchronize_event(copied, self.timeout_s)
        return staged

    def _source_and_place(
        self, verb: str, x: Tensor, shape: tuple[int, ...], out: Tensor | None
    ) -> tuple[Tensor, StagingBuffer]:
        """Return what is sent of ``x``, and the buffer for ``out``, a new tensor if there is none, in other memory."""
        if out is None:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        elif tuple(out.shape) != shape or out.dtype != x.dtype or out.device != x.device:
            raise InvalidTensorError(
                f"{verb} of a {x.dtype} tensor of shape {list(x.shape)} on {x.device} needs out of shape "
                f"{list(shape)}, the same dtype and device; got {out.dtype} of shape {list(out.shape)} on {out.device}."
            )
        place, source = self._place_for(verb, out), self._source(verb, x)
        # Backends differ on inputs that are part of the output.
        start, end = source.data_ptr(), source.data_ptr() + source.nbytes
        other_start, other_end = place.buffer.data_ptr(), place.buffer.data_ptr() + place.buffer.nbytes
        overlaps = source.device == place.buffer.device and start < other_end and other_start < end
        return source.clone() if overlaps else source, place

    def _place_for(self, verb: str, target: Tensor) -> StagingBuffer:
        """Return a flat contiguous buffer for ``target``: its own memory where that is possible."""
        check_writable(target)
        in_reach = self._reaches(target, verb)
        if in_reach and target.is_contiguous():
            return StagingBuffer(target.detach().view(-1), target)
        device = target.device if in_reach else torch.device("cpu")
        pinned = not in_reach and may_pin_for(target)
        return StagingBuffer(torch.empty(target.numel(), dtype=target.dtype, device=device, pin_memory=pinned), target)

    def _place_filled(self, verb: str, target: Tensor) -> StagingBuffer:
        """Return a buffer that holds what ``target`` holds, for verbs that work in place."""
        check_writable(target)
        return StagingBuffer(self._source(verb, target), target)


class LoopbackTransport(BufferTransport):
    """A transport of one rank: outputs are copies of inputs."""

    name = "loopback"

    def __init__(self, timeout_s: float = 300.0) -> None:
        super().__init__(rank=0, size=1, timeout_s=timeout_s)

    def enqueues(self, device: torch.device) -> bool:
        return KINDS[device.type].has_streams

    def _reaches(self, x: Tensor, verb: str) -> bool:
        del x, verb
        return True

    def _copy(self, source: Tensor, buffer: Tensor, *_: object) -> Finished:
        buffer.copy_(source)
        return Finished()

    def _do_nothing(self, *_: object) -> Finished:
        return Finished()

    _start_all_gather = _start_all_gatherv = _start_reduce_scatter = _copy
    # Messages that this rank sends itself have been copied.
    _start_all_reduce = _start_broadcast = _start_send_recv = _start_barrier = _do_nothing


class PerDeviceTransport:
    """Host tensors over ``host``, an accelerator's over ``device``, on the same ranks: ``auto`` with GPUs."""

    def __init__(self, host: Transport, device: Transport) -> None:
        self.name = f"{host.name} for host tensors, {device.name} for device tensors"
        self.rank, self.size, self.timeout_s = host.rank, host.size, host.timeout_s
        self._host, self._device = host, device

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Handle[Tensor]:
        return self._for(x).all_gather(x, out)

    def all_gatherv(self, x: Tensor, counts: Sequence[int], out: Tensor | None = None) -> Handle[tuple[Tensor, ...]]:
        return self._for(x).all_gatherv(x, counts, out)

    def all_reduce(self, x: Tensor) -> Handle[Tensor]:
        return self._for(x).all_reduce(x)

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Handle[Tensor]:
        return self._for(x).reduce_scatter(x, out)

    def broadcast(self, x: Tensor, root: int = 0) -> Handle[Tensor]:
        return self._for(x).broadcast(x, root)

    def send_recv(self, sends: Messages, receives: Messages) -> Handle[tuple[Tensor, ...]]:
        return self._for(*(x for _, x in (*sends, *receives))).send_recv(sends, receives)

    def barrier(self) -> Handle[None]:
        return self._host.barrier()

    def enqueues(self, device: torch.device) -> bool:
        return enqueues(self._device, device)

    def _for(self, *tensors: Tensor) -> Transport:
        return self._host if all(x.is_cpu for x in tensors) else self._device


def as_bytes(flat: Tensor) -> Tensor:
    """Return the same memory as uint8. Moving bytes is the one thing every backend does for every dtype."""
    # A contiguous tensor of no or one element may have any stride, which `view` minds.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def check_plain(x: Tensor) -> None:
    """Raise unless ``x`` is plain memory of this process or its GPU."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        raise InvalidTensorError(
            f"a {type(x).__name__} is not one piece of memory to send. Pass a plain tensor: x.to_local() of a DTensor."
        )
    if x.layout is not torch.strided or x.device.type not in KINDS:
        advice = f"pass x.to_dense(), or move it to {' or '.join(KINDS)}."
        raise InvalidTensorError(f"a tensor of layout {x.layout} on {x.device} has no plain memory to send: {advice}")


def check_writable(x: Tensor) -> None:
    """Raise unless every element of ``x`` is memory of its own, holding what it says."""
    check_plain(x)
    strides = x.stride()
    is_expanded = 0 in strides and any(step == 0 and n > 1 for step, n in zip(strides, x.shape, strict=True))
    if is_expanded or x.is_conj() or x.is_neg():
        raise InvalidTensorError(
            f"a tensor of shape {list(x.shape)} that is expanded, conjugated or negated cannot be written. Pass "
            f"x.clone(), or the tensor behind it."
        )


def check_reducible(x: Tensor) -> None:
    if x.dtype not in REDUCIBLE:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE)
        raise InvalidTensorError(f"{x.dtype} cannot be summed on every transport: convert it to one of {names}.")


def check_peer(peer: int, size: int) -> None:
    if not 0 <= peer < size:
        raise InvalidTensorError(f"peer {peer} is not in this group: its {size} ranks are 0 to {size - 1}.")
