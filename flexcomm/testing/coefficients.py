"""The coefficient domain, seen through a kernel set's own calls: a plan that transforms nothing shows what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flexcomm.codec import assemble_buffer
from flexcomm.compress import TensorSpec
from flexcomm.kernels import BufferPlan, Kernels, Problem, Region, Selection, StateUpdate, Status, TensorPlan, ValueCode
from flexcomm.kernels.layout import WORD_NBYTES, Header

PLAIN = StateUpdate()
_GARBAGE = -0x21524111
SEQUENCE = 7


class Sent(NamedTuple):
    """A buffer, what it was encoded by, and what the kernels said about it."""

    words: Tensor
    plan: BufferPlan
    step: int
    status: Status

    @property
    def is_sound(self) -> bool:
        return self.status.problem is Problem.NONE


def plan_single(plan: TensorPlan, name: str = "x") -> BufferPlan:
    """Return the plan of a bucket of one tensor."""
    return assemble_buffer((TensorSpec(name, (plan.rows, plan.cols), torch.float32),), (plan,))


def encode(
    kernels: Kernels,
    x: Tensor,
    plan: TensorPlan,
    state: Tensor | None = None,
    state_out: Tensor | None = None,
    update: StateUpdate = PLAIN,
    *,
    step: int = 0,
    name: str = "x",
) -> Sent:
    """Return the buffer of ``x`` alone."""
    states = None if state is None or state_out is None else ([state], [state_out])
    return encode_bucket(kernels, plan_single(plan, name), [x], states, update, step=step)


def encode_bucket(
    kernels: Kernels,
    plan: BufferPlan,
    tensors: Sequence[Tensor],
    states: tuple[list[Tensor], list[Tensor]] | None = None,
    update: StateUpdate = PLAIN,
    *,
    step: int = 0,
) -> Sent:
    """Return the buffer of tensors, whose ``states`` are those read and those written.

    Its words held garbage before, so a word that was forgotten shows.
    """
    words = torch.full((plan.nwords,), _GARBAGE, dtype=torch.int32, device=tensors[0].device)
    encoder, (before, after) = kernels.encoder(plan, words), states or (None, None)
    status = Status.of(int(encoder.encode_(tensors, before, after, update, step=step, sequence=SEQUENCE)))
    nwords = plan.nwords
    if plan.variable_length:
        header = Header.unpack(words[:16].cpu().numpy().tobytes())
        nwords = 16 + header.payload_nbytes // WORD_NBYTES
    return Sent(words[:nwords], plan, step, status)


def decode(kernels: Kernels, sent: Sent, decoded_as: TensorPlan, out: Tensor) -> None:
    """Fill ``out`` with what a buffer of one tensor holds, seen as ``decoded_as``."""
    region = Region("sender", 0, sent.words.numel())
    plan = plan_single(decoded_as, sent.plan.specs[0].name)
    decoder = kernels.decoder(sent.plan, sent.words, [region], plan)
    word = int(decoder.verify(step=sent.step, sequence=SEQUENCE))
    if word:
        raise AssertionError(f"{kernels.name} kernels: their own buffer is refused: {Status.of(word)}")
    decoder.decode_([out], step=sent.step, average="nodes")


def sent_coefficients(kernels: Kernels, sent: Sent) -> Tensor:
    """Return the coefficients ``[chunks, chunk_numel]`` a buffer of one tensor carries, zero where it carries none."""
    plan = sent.plan.plans[0]
    found = torch.empty(plan.state_shape, dtype=torch.float32, device=sent.words.device)
    decode(kernels, sent, _flat(plan), found)
    return found


def coefficients_of(
    kernels: Kernels, x: Tensor, plan: TensorPlan, state: Tensor | None = None, update: StateUpdate = PLAIN
) -> Tensor:
    """Return ``decay * state + gain * coefficients`` of ``x``, from which the plan will select."""
    rest = None if state is None else torch.empty_like(state)
    return sent_coefficients(kernels, encode(kernels, x, everything_of(plan), state, rest, update))


def elements_of(kernels: Kernels, coefficients: Tensor, plan: TensorPlan) -> Tensor:
    """Return the elements ``[rows, cols]`` that have these coefficients."""
    whole = everything_of(plan)
    elements = torch.empty(plan.rows, plan.cols, dtype=torch.float32, device=coefficients.device)
    decode(kernels, encode(kernels, coefficients, _flat(whole)), whole, elements)
    return elements


def everything_of(plan: TensorPlan) -> TensorPlan:
    """Return the plan that cuts and transforms alike, but sends everything as it is."""
    return replace(
        plan,
        selection=Selection.EVERYTHING,
        k=plan.chunk_numel,
        values=ValueCode.FP32,
        tau=0.0,
        seed=0,
        variable_length=False,
    )


def _flat(plan: TensorPlan) -> TensorPlan:
    """Return the plan of a tensor whose elements are what the plan's coefficients are."""
    chunks, length = plan.state_shape
    return replace(plan, rows=1, cols=chunks * length, chunk_rows=1, chunk_cols=length, transformed=False)
