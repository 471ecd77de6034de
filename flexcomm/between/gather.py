"""Gather: every node sends its buffer to all others, and each averages for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flexcomm.between.cargo import Cargo, Leg, Pending
from flexcomm.bucket import Incoming, Outgoing, regions_of
from flexcomm.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import Tensor

    from flexcomm.bucket import BucketPlan

__all__ = ["decode_gathered_", "expect", "gather", "gather_payloads", "gatherv"]


class Desk(NamedTuple):
    """What a node encodes into, and room for what all nodes did."""

    outgoing: Outgoing
    gathered: Tensor


def expect(
    cargo: Cargo, plan: BucketPlan, gathered: Tensor, senders: Sequence[str], meaning: BucketPlan | None = None
) -> Incoming:
    """Return what to open, where every sender's buffer is as long as the plan says."""
    return Incoming(plan, gathered, regions_of(senders, [plan.nbytes] * len(senders)), cargo.kernels, meaning)


def gather_payloads(cargo: Cargo) -> Generator[Pending, Any, Tensor]:
    """Gather buffers whose length follows from the plan: one collective, and no lengths to be told."""
    nbytes, desk = cargo.plan.nbytes, cargo.memory.keep("gathering", lambda: _set_desk(cargo))
    cargo.encode_(desk.outgoing, cargo.inputs, cargo.momenta)
    cargo.record.payload_bytes += nbytes
    others = (cargo.nodes - 1) * nbytes
    yield Pending(cargo.inter.all_gather(desk.outgoing.buffer, desk.gathered), "inter", others, others)
    return desk.gathered


def _set_desk(cargo: Cargo) -> Desk:
    nbytes, memory = cargo.plan.nbytes, cargo.memory
    return Desk(Outgoing(cargo.plan, memory.allocate(nbytes), cargo.kernels), memory.allocate(cargo.nodes, nbytes))


def gather_exact_payloads(cargo: Cargo) -> Generator[Pending, Any, Incoming]:
    """Gather lengths, then buffers as long as what they hold."""
    most, desk = cargo.plan.nbytes, cargo.memory.keep("gathering", lambda: _set_desk(cargo))
    nbytes = cargo.encode_(desk.outgoing, cargo.inputs, cargo.momenta)
    told = (cargo.nodes - 1) * torch.int64.itemsize
    # Answered at once by everybody, so waiting for it costs little; then the long part can be left under way.
    lengths = yield Pending(
        cargo.inter.all_gather(torch.tensor([nbytes], device="cpu")), "inter", told, told, may_rest=False
    )
    counts: list[int] = lengths.view(-1).tolist()
    for sender, count in zip(cargo.senders, counts, strict=True):
        if not 0 < count <= most:
            raise WireError(
                sender,
                "length",
                f"it announces {count} bytes, where 1 to {most} are possible: install one release on every rank.",
            )
    cargo.record.payload_bytes += nbytes
    out = desk.gathered.view(-1)[: sum(counts)]
    work = cargo.inter.all_gatherv(desk.outgoing.buffer[:nbytes], counts, out)
    yield Pending(work, "inter", (cargo.nodes - 1) * nbytes, sum(counts) - nbytes)
    return Incoming(cargo.plan, out, regions_of(cargo.senders, counts), cargo.kernels)


def decode_gathered_(cargo: Cargo, incoming: Incoming, outputs: Sequence[Tensor]) -> list[str]:
    """Fill the outputs with the average of what came; return who had nothing fit to send."""
    with cargo.record.time("decode"):
        opened = cargo.open(incoming)
        if not opened.flagged:
            cargo.decode_(incoming.meaning, opened, outputs, cargo.average)
        return opened.flagged


def gather(cargo: Cargo) -> Leg:
    gathered = yield from gather_payloads(cargo)
    incoming = cargo.memory.keep("incoming", lambda: expect(cargo, cargo.plan, gathered, cargo.senders))
    return decode_gathered_(cargo, incoming, cargo.outputs)


def gatherv(cargo: Cargo) -> Leg:
    incoming = yield from gather_exact_payloads(cargo)
    return decode_gathered_(cargo, incoming, cargo.outputs)
