"""Reduce: where everybody sends the same coefficients, their values are added on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from flexcomm.between.cargo import Cargo, Leg, Pending
from flexcomm.bucket import Opened, Outgoing, unchecked
from flexcomm.errors import ConfigMismatchError
from flexcomm.kernels import Selection, TensorPlan, ValueCode
from flexcomm.wire import HEADER_NBYTES

if TYPE_CHECKING:
    from torch import Tensor

    from flexcomm.bucket import BucketPlan

__all__ = ["can_be_reduced", "densified", "reduce"]

_DIGEST_BITS = 64
_DTYPES = {ValueCode.FP32: torch.float32, ValueCode.BF16: torch.bfloat16, ValueCode.FP16: torch.float16}
_EXACT_COUNTS = {torch.float32: 1 << 24, torch.bfloat16: 1 << 8, torch.float16: 1 << 11}
"""How far each type counts without rounding."""


class Desk(NamedTuple):
    """A buffer, the part of it that is summed, and at its end the numbers that say whether sums mean anything."""

    outgoing: Outgoing
    opened: Opened
    summed: Tensor
    digest: Tensor
    unfit: Tensor


def reduce(cargo: Cargo) -> Leg:
    """Sum the values, for everybody sends the same coefficients.

    No header travels, but a digest of it does, one number a bit: where all agree, each sums up to none or to all. The
    last number counts those who have nothing fit to send.
    """
    desk, nodes = cargo.memory.keep("reducing", lambda: _set_desk(cargo)), cargo.nodes
    cargo.encode_(desk.outgoing, cargo.inputs, cargo.momenta)
    bits = _digest_bits(cargo)
    desk.digest.copy_(bits)
    desk.unfit.fill_(bool(cargo.unfit))
    cargo.record.payload_bytes += desk.summed.nbytes
    moved = 2 * desk.summed.nbytes * (nodes - 1) // nodes
    yield Pending(cargo.inter.all_reduce(desk.summed), "inter", moved, moved)
    with cargo.record.time("decode"):
        if not torch.equal(desk.digest, (bits * nodes).to(desk.digest)):
            raise ConfigMismatchError(
                "nodes disagree on what they add up: their tensors, compressor, step or order of calls differ. Nothing "
                "was changed. Make them equal on every rank."
            )
        unfit = desk.unfit.item()
        if unfit:
            return [f"{unfit:g} of {nodes} nodes"]
        cargo.decode_(cargo.plan, desk.opened, cargo.outputs, "nodes")
        if nodes > 1:
            for out in cargo.outputs:
                out.div_(nodes)
    return []


def _set_desk(cargo: Cargo) -> Desk:
    plan, dtype = cargo.plan, _sum_dtype(cargo.plan)
    assert dtype is not None, "plans are asked before they are reduced"  # noqa: S101  (our own invariant)
    tail = (_DIGEST_BITS + 1) * dtype.itemsize
    buffer = cargo.memory.allocate(plan.nbytes + -(-tail // 4) * 4)
    summed = buffer[HEADER_NBYTES : plan.nbytes + tail].view(dtype)
    return Desk(
        Outgoing(plan, buffer, cargo.kernels),
        unchecked(plan, buffer, cargo.kernels),
        summed,
        summed[-_DIGEST_BITS - 1 : -1],
        summed[-1:],
    )


def _digest_bits(cargo: Cargo) -> Tensor:
    mixed = hash((cargo.plan.digest, cargo.step, cargo.sequence))  # integers hash alike in every process
    octets = np.frombuffer(mixed.to_bytes(_DIGEST_BITS // 8, "little", signed=True), np.uint8)
    return torch.from_numpy(np.unpackbits(octets, bitorder="little").astype(np.float32))


def can_be_reduced(plan: BucketPlan, nodes: int) -> bool:
    """Return whether everybody sends the same coefficients, as numbers of one type that can count the nodes."""
    dtype = _sum_dtype(plan)
    return dtype is not None and nodes <= _EXACT_COUNTS[dtype] and all(map(_is_shared, plan.plans))


def _sum_dtype(plan: BucketPlan) -> torch.dtype | None:
    codes = {one.values for one in plan.plans} or {ValueCode.FP32}
    return _DTYPES.get(codes.pop()) if len(codes) == 1 else None


def _is_shared(plan: TensorPlan) -> bool:
    shared = plan.selection in (Selection.EVERYTHING, Selection.SHUFFLED, Selection.STRIDED)
    return shared or (plan.selection is Selection.LARGEST and plan.keep == plan.chunk_numel)


def densified(plan: TensorPlan, dtype: torch.dtype) -> TensorPlan:
    """Return a plan that sends everything of what this one thins out, in the same coordinates."""
    values = {torch.bfloat16: ValueCode.BF16, torch.float16: ValueCode.FP16}.get(dtype, ValueCode.FP32)
    return replace(
        plan, selection=Selection.EVERYTHING, keep=plan.chunk_numel, values=values, tau=0.0, seed=0, exact=False
    )
