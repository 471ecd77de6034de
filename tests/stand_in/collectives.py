"""A backend of torch.distributed that behaves as NCCL does, over gloo and host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

LONGEST_WAIT_S = 15.0
"""For other ranks, in a collective: they come sooner, or never."""
_PAUSE_S = 0.01

Given = tuple[str, list[Tensor], list[Tensor], int, str]
"""A verb, its outputs and inputs, the root or the peer, and how it reduces."""


class Enqueued(NamedTuple):
    """A collective, or a batch of messages, as a rank enqueued it."""

    group: str
    ranks: tuple[int, ...]
    what: tuple[tuple[str, int, int], ...]  # verb, root or peer by its rank in the group, and bytes
    thread: str

    @classmethod
    def read(cls, group: str, ranks: Sequence[int], what: Sequence[Sequence[Any]], thread: str) -> Enqueued:
        """Return it from what JSON has made of it."""
        return cls(group, tuple(ranks), tuple((verb, peer, nbytes) for verb, peer, nbytes in what), thread)


LOG: list[Enqueued] = []
"""What this rank enqueued, in order, on all groups."""


class Collectives:
    """The collectives of one group, each carried out when it is enqueued. Communicators are made when first needed."""

    def __init__(self, options: Any, identify: Callable[[torch.device], str]) -> None:
        self._options, self._identify = options, identify
        self._rank, self._size = options.group_rank, options.group_size
        self._communicators: dict[tuple[int, ...], dist.ProcessGroupGloo] = {}
        self._lock = threading.Lock()

    def carry_out(self, calls: list[Given], is_batch: bool) -> None:
        """Do one verb, or a batch of several at once."""
        what = tuple((verb, root, sum(x.nbytes for x in (*outs, *ins))) for verb, outs, ins, root, _ in calls)
        ranks = tuple(self._options.global_ranks_in_group) or tuple(range(self._size))
        LOG.append(Enqueued(self._options.group_id, ranks, what, threading.current_thread().name))
        with self._lock:
            members = tuple(range(self._size))
            # For a single message NCCL makes a communicator of two; a batch goes over that of the group.
            if calls[0][0] in ("send", "recv") and not is_batch:
                members = tuple(sorted({self._rank, calls[0][3]}))
            group = self._communicator(members)
            works = []
            for verb, outputs, inputs, root, reduction in calls:
                if verb == "send":
                    works += [group.send([as_bytes(x)], members.index(root), 0) for x in inputs]
                elif verb == "recv":
                    works += [group.recv([as_bytes(x)], members.index(root), 0) for x in outputs]
                else:
                    _VERBS[verb](group, self._rank, outputs, inputs, root, reduction)
            for work in works:
                work.wait()

    def close(self) -> None:
        self._communicators.clear()

    def _communicator(self, members: tuple[int, ...]) -> dist.ProcessGroupGloo:
        if members in self._communicators:
            return self._communicators[members]
        limit = min(self._options.timeout, timedelta(seconds=LONGEST_WAIT_S))
        store = dist.PrefixStore(f"communicator {members}/", self._options.store)
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        device = torch.device(kind.type, torch.accelerator.current_device_index())
        store.set(f"{self._rank}", self._identify(device))
        devices: dict[bytes, int] = {}
        end_s = time.monotonic() + limit.total_seconds()
        for rank in members:
            # Asked again and again: a wait of the store that ends without it prints much.
            while not store.check([f"{rank}"]):
                if time.monotonic() > end_s:
                    raise RuntimeError(
                        f"rank {rank} of {members} did not come to make their communicator: a group's first collective "
                        f"takes all of its ranks."
                    )
                time.sleep(_PAUSE_S)
            other = devices.setdefault(store.get(f"{rank}"), rank)
            if other != rank:
                raise RuntimeError(f"Duplicate GPU detected : rank {other} and rank {rank} both on one device")
        made = dist.ProcessGroupGloo(store, members.index(self._rank), len(members), limit)
        self._communicators[members] = made
        return made


def make_backend(native: Any, name: str, identify: Callable[[torch.device], str]) -> Callable[[Any, Any], Any]:
    """Return what torch calls to make a group's backend."""

    def make(options: Any, _: Any) -> Any:
        return native.make_backend(options.group_rank, options.group_size, name, Collectives(options, identify))

    return make


def as_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


def gather_bytes(group: dist.ProcessGroupGloo, x: Tensor) -> list[Tensor]:
    """Return what all ranks have of a tensor."""
    everybodys = [torch.empty_like(x) for _ in range(group.size())]
    if x.numel():
        group.allgather([[as_bytes(one) for one in everybodys]], [as_bytes(x)]).wait()
    return everybodys


def reduced(tensors: Sequence[Tensor], reduction: str) -> Tensor:
    """Return a reduction, in the order of ranks; of sixteen bits in float32."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = tensors[0].to(wide, copy=True)
    for other in tensors[1:]:
        if reduction == "min":
            total = torch.minimum(total, other.to(wide))
        elif reduction == "max":
            total = torch.maximum(total, other.to(wide))
        elif reduction == "product":
            total *= other.to(wide)
        else:
            total += other.to(wide)
    return (total / len(tensors) if reduction == "avg" else total).to(dtype)


def _all_reduce(group: Any, rank: int, outputs: list[Tensor], inputs: list[Tensor], root: int, reduction: str) -> None:
    del inputs, rank, root
    for x in outputs:
        x.copy_(reduced(gather_bytes(group, x), reduction))


def _reduce(group: Any, rank: int, outputs: list[Tensor], inputs: list[Tensor], root: int, reduction: str) -> None:
    del inputs
    for x in outputs:
        total = reduced(gather_bytes(group, x), reduction)
        if rank == root:
            x.copy_(total)


def _broadcast(group: Any, rank: int, outputs: list[Tensor], inputs: list[Tensor], root: int, reduction: str) -> None:
    del inputs, rank, reduction
    for x in outputs:
        x.copy_(gather_bytes(group, x)[root])


def _all_gather(group: Any, rank: int, outputs: list[Tensor], inputs: list[Tensor], root: int, reduction: str) -> None:
    del rank, root, reduction
    _fill(outputs, gather_bytes(group, inputs[0]))


def _gather(group: Any, rank: int, outputs: list[Tensor], inputs: list[Tensor], root: int, reduction: str) -> None:
    del reduction
    everybodys = gather_bytes(group, inputs[0])
    if rank == root:
        _fill(outputs, everybodys)


def _scatter(group: Any, rank: int, outputs: list[Tensor], inputs: list[Tensor], root: int, reduction: str) -> None:
    del reduction
    given = (
        torch.cat([x.reshape(-1) for x in inputs])
        if rank == root
        else outputs[0].new_empty(outputs[0].numel() * group.size())
    )
    rows = gather_bytes(group, given)[root].view(group.size(), -1)
    outputs[0].copy_(rows[rank].view(outputs[0].shape))


def _reduce_scatter(
    group: Any, rank: int, outputs: list[Tensor], inputs: list[Tensor], root: int, reduction: str
) -> None:
    del root
    flat = torch.cat([x.reshape(-1) for x in inputs]).view(group.size(), -1)
    own = [one[rank] for one in gather_bytes(group, flat)]
    outputs[0].copy_(reduced(own, reduction).view(outputs[0].shape))


def _all_to_all(group: Any, rank: int, outputs: list[Tensor], inputs: list[Tensor], root: int, reduction: str) -> None:
    del root, reduction
    outputs[rank].copy_(inputs[rank].view(outputs[rank].shape))
    works = [
        start([as_bytes(x)], peer, 0)
        for start, some in ((group.recv, outputs), (group.send, inputs))
        for peer, x in enumerate(some)
        if peer != rank and x.numel()
    ]
    for work in works:
        work.wait()


def _fill(outputs: list[Tensor], parts: Sequence[Tensor]) -> None:
    """Write parts one behind the other to outputs, one for each or one for all."""
    if len(outputs) == 1:
        outputs[0].reshape(-1).copy_(torch.cat([one.reshape(-1) for one in parts]))
        return
    for out, one in zip(outputs, parts, strict=True):
        out.copy_(one.view(out.shape))


_VERBS: dict[str, Callable[[Any, int, list[Tensor], list[Tensor], int, str], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
