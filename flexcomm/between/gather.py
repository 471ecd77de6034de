"""Gather: every node sends its buffer to all others, and each averages for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flexcomm.between.cargo import Cargo, Leg, Pending
from flexcomm.bucket import regions_of
from flexcomm.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import Tensor

    from flexcomm.bucket import BucketPlan

__all__ = ["Gathered", "decode_gathered_", "gather", "gather_payloads", "gatherv"]


class Gathered(NamedTuple):
    """Buffers of several senders, one behind the other, and their lengths."""

    buffers: Tensor
    nbytes: list[int]


def gather_payloads(cargo: Cargo) -> Generator[Pending, Any, Gathered]:
    """Gather buffers whose length follows from the plan: one collective, and no lengths to be told."""
    nbytes = cargo.plan.nbytes
    buffer, out = cargo.memory.take("buffer", (nbytes,)), cargo.memory.take("gathered", (cargo.nodes, nbytes))
    cargo.encode_(cargo.plan, cargo.inputs, buffer, cargo.momenta)
    cargo.record.payload_bytes += nbytes
    others = (cargo.nodes - 1) * nbytes
    yield Pending(cargo.inter.all_gather(buffer, out), "inter", others, others)
    return Gathered(out.view(-1), [nbytes] * cargo.nodes)


def gather_exact_payloads(cargo: Cargo) -> Generator[Pending, Any, Gathered]:
    """Gather lengths, then buffers as long as what they hold."""
    most = cargo.plan.nbytes
    buffer, room = cargo.memory.take("buffer", (most,)), cargo.memory.take("gathered", (cargo.nodes * most,))
    nbytes = cargo.encode_(cargo.plan, cargo.inputs, buffer, cargo.momenta)
    told = (cargo.nodes - 1) * torch.int64.itemsize
    # Answered at once by everybody, so waiting for it costs little; then the long part can be left under way.
    lengths = yield Pending(cargo.inter.all_gather(torch.tensor([nbytes])), "inter", told, told, may_rest=False)
    counts: list[int] = lengths.view(-1).tolist()
    for sender, count in zip(cargo.senders, counts, strict=True):
        if not 0 < count <= most:
            raise WireError(
                sender,
                "length",
                f"it announces {count} bytes, where 1 to {most} are possible: install one release on every rank.",
            )
    cargo.record.payload_bytes += nbytes
    out = room[: sum(counts)]
    work = cargo.inter.all_gatherv(buffer[:nbytes], counts, out)
    yield Pending(work, "inter", (cargo.nodes - 1) * nbytes, sum(counts) - nbytes)
    return Gathered(out, counts)


def decode_gathered_(
    cargo: Cargo,
    plan: BucketPlan,
    gathered: Gathered,
    senders: Sequence[str],
    outputs: Sequence[Tensor],
    meaning: BucketPlan | None = None,
) -> list[str]:
    """Fill the outputs with the average of what was gathered; return who had nothing fit to send.

    ``meaning`` is a plan with the same payloads that says what they stand for, if that is not the plan itself.
    """
    with cargo.record.time("decode"):
        regions = regions_of(senders, gathered.nbytes)
        opened = cargo.open(plan, gathered.buffers, regions)
        if not opened.flagged:
            cargo.decode_(meaning or plan, opened, outputs, cargo.average)
        return opened.flagged


def gather(cargo: Cargo) -> Leg:
    gathered = yield from gather_payloads(cargo)
    return decode_gathered_(cargo, cargo.plan, gathered, cargo.senders, cargo.outputs)


def gatherv(cargo: Cargo) -> Leg:
    gathered = yield from gather_exact_payloads(cargo)
    return decode_gathered_(cargo, cargo.plan, gathered, cargo.senders, cargo.outputs)
