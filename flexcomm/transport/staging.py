"""Tensors as transports see them: flat, contiguous, in memory they can reach; and checks of what a verb was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from flexcomm.device import is_supported, may_pin_for, supported_names, synchronize_stream
from flexcomm.errors import InvalidTensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "StagingBuffer",
    "as_bytes",
    "check_counts",
    "check_peer",
    "check_plain",
    "check_reducible",
    "check_writable",
    "deliver_all",
    "gather_output",
    "gatherv_output",
    "readable",
    "readable_apart",
    "scatter_output",
    "staging_buffer",
    "staging_buffer_filled",
]

T = TypeVar("T")

REDUCIBLE = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)


def readable(x: Tensor, *, in_reach: bool) -> Tensor:
    """``x`` flat and contiguous; on the host, complete, where the transport cannot reach ``x`` itself."""
    check_plain(x)
    # A conjugate or negative view holds other bytes than its numbers say.
    flat = x.detach().resolve_conj().resolve_neg().reshape(-1)
    if in_reach:
        return flat.contiguous()
    staged = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=may_pin_for(x)).copy_(flat, non_blocking=True)
    synchronize_stream(x.device)
    return staged


@dataclass(frozen=True)
class StagingBuffer:
    """The memory a transport writes, and the tensor that shall hold it."""

    buffer: Tensor
    target: Tensor

    def deliver(self) -> Tensor:
        """The target, holding what arrived."""
        if self.buffer.data_ptr() != self.target.data_ptr():
            self.target.detach().copy_(self.buffer.view(self.target.shape), non_blocking=True)
        return self.target


def staging_buffer(target: Tensor, *, in_reach: bool) -> StagingBuffer:
    """A flat contiguous buffer for ``target``: its own memory where that is possible."""
    check_writable(target)
    if in_reach and target.is_contiguous():
        return StagingBuffer(target.detach().view(-1), target)
    device = target.device if in_reach else torch.device("cpu")
    pinned = not in_reach and may_pin_for(target)
    return StagingBuffer(torch.empty(target.numel(), dtype=target.dtype, device=device, pin_memory=pinned), target)


def staging_buffer_filled(target: Tensor, *, in_reach: bool) -> StagingBuffer:
    """As :func:`staging_buffer`, the buffer holding what ``target`` holds: for verbs that work in place."""
    check_writable(target)
    return StagingBuffer(readable(target, in_reach=in_reach), target)


def deliver_all(places: Sequence[tuple[int, StagingBuffer]], result: T) -> T:
    """The ``result`` of an exchange, all of it in place."""
    for _, place in places:
        place.deliver()
    return result


def readable_apart(x: Tensor, place: StagingBuffer, *, in_reach: bool) -> Tensor:
    """As :func:`readable`, in other memory than ``place``: backends differ on inputs that are part of the output."""
    source = readable(x, in_reach=in_reach)
    start, end = source.data_ptr(), source.data_ptr() + source.nbytes
    other_start, other_end = place.buffer.data_ptr(), place.buffer.data_ptr() + place.buffer.nbytes
    overlaps = source.device == place.buffer.device and start < other_end and other_start < end
    return source.clone() if overlaps else source


def as_bytes(flat: Tensor) -> Tensor:
    """The same memory as uint8. Moving bytes is the one thing every backend does for every dtype."""
    # A contiguous tensor of no or one element may have any stride, which `view` minds.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def check_plain(x: Tensor) -> None:
    """Raise unless ``x`` is plain memory of this process or its GPU."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        raise InvalidTensorError(
            f"a {type(x).__name__} is not one piece of memory to send. Pass a plain tensor: x.to_local() of a DTensor."
        )
    if x.layout is not torch.strided or not is_supported(x.device):
        raise InvalidTensorError(
            f"a tensor of layout {x.layout} on {x.device} has no plain memory to send. Pass x.to_dense(), or move it "
            f"to {supported_names()}."
        )


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
        raise InvalidTensorError(
            f"{x.dtype} cannot be summed on every transport. Convert the tensor to one of {names}."
        )


def check_peer(peer: int, size: int) -> None:
    if not 0 <= peer < size:
        raise InvalidTensorError(f"peer {peer} is not in this group: its {size} ranks are 0 to {size - 1}.")


def check_counts(x: Tensor, counts: Sequence[int], rank: int, size: int) -> None:
    if len(counts) != size or any(count < 0 for count in counts):
        raise InvalidTensorError(
            f"all_gatherv got counts {list(counts)}; needed is one count from 0 on for each of {size} ranks."
        )
    if x.numel() != counts[rank]:
        raise InvalidTensorError(
            f"all_gatherv got a tensor of {x.numel()} elements on rank {rank}, whose count is {counts[rank]}. Pass "
            f"x[:counts[rank]], and the same counts on every rank."
        )


def gather_output(x: Tensor, out: Tensor | None, size: int) -> Tensor:
    return checked_output("all_gather", x, (size, *x.shape), out)


def gatherv_output(x: Tensor, counts: Sequence[int], out: Tensor | None) -> Tensor:
    return checked_output("all_gatherv", x, (sum(counts),), out)


def scatter_output(x: Tensor, out: Tensor | None, size: int) -> Tensor:
    if x.dim() == 0 or x.shape[0] != size:
        raise InvalidTensorError(
            f"reduce_scatter got a tensor of shape {list(x.shape)}; its first dim must be the {size} ranks of the "
            f"group. Pass x.view({size}, -1), padded if need be."
        )
    return checked_output("reduce_scatter", x, tuple(x.shape[1:]), out)


def checked_output(verb: str, x: Tensor, shape: tuple[int, ...], out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    if tuple(out.shape) != shape or out.dtype != x.dtype or out.device != x.device:
        raise InvalidTensorError(
            f"{verb} of a {x.dtype} tensor of shape {list(x.shape)} on {x.device} needs out of shape {list(shape)}, "
            f"the same dtype and device; got {out.dtype} of shape {list(out.shape)} on {out.device}."
        )
    return out
