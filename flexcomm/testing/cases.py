"""What laws are tried on: plans, inputs and memory, always drawn alike, and buffers as a kernel set fills them.

Coefficients are seen through a kernel set's own calls: what a plan sends, decoded by a plan that transforms nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexcomm.codec import assemble_buffer
from flexcomm.compress import TensorSpec
from flexcomm.kernels import (
    BufferPlan,
    IndexCode,
    Kernels,
    Region,
    Selection,
    StateUpdate,
    Status,
    TensorPlan,
    ValueCode,
    plan_layout,
)
from flexcomm.kernels.layout import HEADER_NWORDS, WORD_NBYTES, Header, aligned

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ("normal", "ties", "tiny", "sparse", "wide", "zeros", "rising")
STATES = ("none", "apart", "same")
SEQUENCE = 7
PLAIN = StateUpdate()
_GARBAGE = -0x21524111
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

GEOMETRIES: tuple[tuple[tuple[int, ...], int, int, int, int, bool], ...] = (
    ((), 1, 1, 1, 1, True),
    ((1,), 1, 1, 1, 8, False),
    ((0,), 1, 0, 1, 16, False),
    ((0, 8), 1, 0, 1, 8, True),
    ((61,), 1, 61, 1, 7, True),
    ((331,), 1, 331, 1, 32, False),
    ((300,), 1, 300, 1, 100, True),
    ((3, 4, 5), 12, 5, 4, 4, True),
    ((16, 24), 16, 24, 8, 8, True),
    ((19, 23), 19, 23, 8, 16, True),
    ((9, 5), 9, 5, 5, 1, True),
    ((400,), 1, 400, 1, 256, False),
    ((70, 130), 70, 130, 64, 64, True),
    ((130,), 1, 130, 1, 64, True),
    ((576,), 1, 576, 1, 576, False),
    ((1030,), 1, 1030, 1, 1024, False),
    # Enough chunks that three threads have some each.
    ((70 * 5 - 3,), 1, 70 * 5 - 3, 1, 5, False),
    ((70 * 4,), 1, 70 * 4, 1, 4, True),
)
"""A tensor's shape, the matrix it is seen as, its rows and columns of a chunk, and whether chunks are transformed."""


@dataclass(frozen=True)
class Case:
    """One encoding of one tensor. ``held``: whether there are states, and whether they are updated in place.

    ``code`` is an index code that need not be the shortest: kernels are told, and do not choose; None: the shortest.
    """

    shape: tuple[int, ...]
    plan: TensorPlan
    code: IndexCode | None
    dtype: torch.dtype
    kind: str
    held: str
    gaps: bool
    seed: int

    def x(self, sender: int = 0) -> Tensor:
        x = numbers(self.kind, self.shape, self.seed + 1000 * sender).to(self.dtype)
        return with_gaps(x) if self.gaps else x


@dataclass(frozen=True)
class BucketCase:
    """One encoding of one bucket: cases of one tensor each, whose states are held and updated alike."""

    cases: tuple[Case, ...]

    @cached_property
    def plan(self) -> BufferPlan:
        specs = tuple(TensorSpec(f"t{number}", case.shape, case.dtype) for number, case in enumerate(self.cases))
        plan = assemble_buffer(specs, tuple(case.plan for case in self.cases))
        layouts = tuple(plan_layout(case.plan, case.plan.entries, case.code) for case in self.cases)
        nwords = HEADER_NWORDS + sum(layout.nwords for layout in layouts)
        return replace(plan, layouts=layouts, nbytes=WORD_NBYTES * aligned(nwords))

    @property
    def update(self) -> StateUpdate:
        seed = self.cases[0].seed
        return StateUpdate(decay=0.875, gain=0.75, alpha=(1.0, 1.0, 0.3)[seed // len(self.cases) % 3])

    def tensors(self, device: str, sender: int = 0) -> list[Tensor]:
        return [case.x(sender).to(device) for case in self.cases]

    def states(self, device: str, sender: int = 0) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return states in memory of their own: what is read, and what will be filled, which holds NaN before."""
        if self.cases[0].held == "none":
            return None
        seed = 1000 * sender + 500
        old = [numbers("normal", case.plan.state_shape, case.seed + seed).to(device) for case in self.cases]
        return old, old if self.cases[0].held == "same" else [torch.full_like(state, torch.nan) for state in old]


def sampled_buckets(count: int, seed: int = 0) -> list[BucketCase]:
    """Return buckets of three cases each, in which every selection meets every value code; the rest is drawn.

    In the last one a payload lies behind another of variable length, so each sender has it at another place.
    """
    draw = Random(seed).choice  # noqa: S311  (the same buckets every time)
    pairs = [(selection, values) for selection in Selection for values in ValueCode]
    cases = []
    for number in range(3 * count):
        selection, values = pairs[number % len(pairs)]
        shape, rows, cols, chunk_rows, chunk_cols, transformed = draw(GEOMETRIES)
        everything = Selection.EVERYTHING, chunk_rows * chunk_cols, values
        whole = TensorPlan(rows, cols, chunk_rows, chunk_cols, transformed, *everything)
        if selection.rule.variable_count:
            k = max(1, draw((whole.entries, whole.entries // 2, whole.entries // 8, 1)))
            tau, variable_length = draw((1e-6, 0.3, 1.0, 1e30)), draw((True, False))
            plan = replace(whole, selection=selection, k=k, tau=tau, variable_length=variable_length)
        else:
            share = 1 if selection is Selection.EVERYTHING else draw((1, 2, 7, 100))
            plan = replace(whole, selection=selection, k=max(1, whole.k // share))
        is_told = plan.sends_indices and not plan.variable_length
        code = draw((None, IndexCode.PACKED, IndexCode.ELIAS_FANO, IndexCode.BITMAP)) if is_told else None
        inputs = draw(DTYPES), draw(KINDS), draw(STATES), draw((True, False, False))
        cases.append(Case(shape, plan, code, *inputs, number))
    drawn = [BucketCase(tuple(cases[begin : begin + 3])) for begin in range(0, len(cases), 3)]
    variable = TensorPlan(1, 90, 1, 30, False, Selection.THRESHOLD, 90, ValueCode.FP32, tau=1.0, variable_length=True)
    fixed = TensorPlan(1, 8, 1, 8, False, Selection.TOP_K, 3, ValueCode.FP32)
    behind = (Case((plan.cols,), plan, None, torch.float32, "normal", "none", False, 0) for plan in (variable, fixed))
    return [*drawn, BucketCase(tuple(behind))]


def numbers(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return float32 of a kind: equal magnitudes to be told apart by place, denormals, mostly zeros, and so on."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    if kind == "ties":
        return (2 * normal).round() / 4
    if kind == "tiny":
        return normal * 1e-39
    if kind == "sparse":
        return normal * (torch.rand(shape, generator=generator) < 0.03)
    if kind == "wide":
        return normal * torch.exp2(torch.randint(-30, 15, shape, generator=generator))
    if kind == "rising":
        return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
    return torch.zeros(shape) if kind == "zeros" else normal


def with_gaps(x: Tensor) -> Tensor:
    """Return the same numbers in every second element of a larger memory, columns first."""
    spread = torch.zeros((*reversed(x.shape), 2), dtype=x.dtype, device=x.device)[..., 1]
    return spread.permute(tuple(reversed(range(x.dim())))).copy_(x)


class Sent(NamedTuple):
    """A buffer, what it was encoded by, and what the kernels said about it."""

    words: Tensor
    plan: BufferPlan
    step: int
    status: Status


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
        header = Header.unpack(words[:HEADER_NWORDS].cpu().numpy().tobytes())
        nwords = HEADER_NWORDS + header.payload_nbytes // WORD_NBYTES
    return Sent(words[:nwords], plan, step, status)


def decode(kernels: Kernels, sent: Sent, decoded_as: TensorPlan, out: Tensor) -> None:
    """Fill ``out`` with what a buffer of one tensor holds, seen as ``decoded_as``."""
    region = Region("sender", 0, sent.words.numel())
    plan = plan_single(decoded_as, sent.plan.specs[0].name)
    decoder = kernels.decoder(sent.plan, sent.words, [region], plan)
    status = Status.of(int(decoder.verify(step=sent.step, sequence=SEQUENCE)))
    require(kernels, status == Status(), f"a set's own buffer is sound: {status}")
    decoder.decode_([out], step=sent.step, average="nodes")


def sent_coefficients(kernels: Kernels, sent: Sent) -> Tensor:
    """Return the coefficients ``[chunks, chunk_numel]`` a buffer of one tensor carries, zero where it carries none."""
    plan = sent.plan.plans[0]
    found = torch.empty(plan.state_shape, dtype=torch.float32, device=sent.words.device)
    decode(kernels, sent, plan.of_coefficients(), found)
    return found


def coefficients_of(
    kernels: Kernels, x: Tensor, plan: TensorPlan, state: Tensor | None = None, update: StateUpdate = PLAIN
) -> Tensor:
    """Return ``decay * state + gain * coefficients`` of ``x``, from which the plan will select."""
    rest = None if state is None else torch.empty_like(state)
    return sent_coefficients(kernels, encode(kernels, x, plan.sending_everything(ValueCode.FP32), state, rest, update))


def elements_of(kernels: Kernels, coefficients: Tensor, plan: TensorPlan) -> Tensor:
    """Return the elements ``[rows, cols]`` that have these coefficients."""
    whole = plan.sending_everything(ValueCode.FP32)
    elements = torch.empty(plan.rows, plan.cols, dtype=torch.float32, device=coefficients.device)
    decode(kernels, encode(kernels, coefficients, whole.of_coefficients()), whole, elements)
    return elements


def require(subject: Any, condition: bool, law: str) -> None:  # a compressor, a kernel set or a transport
    """Raise ``AssertionError`` naming the law and what broke it, unless the condition holds."""
    if condition:
        return
    name = str(subject)
    if hasattr(subject, "encoder"):
        name = f"{subject.name} kernels"
    elif hasattr(subject, "send_recv"):
        name = f"{subject.name}, rank {subject.rank} of {subject.size}"
    raise AssertionError(f"{name}: broken law: {law}")


def require_equal(subject: Any, got: Tensor, expected: Tensor, law: str) -> None:
    """Raise unless both are equal in every bit: zeros have signs here."""
    bits, expected_bits = (x.cpu().contiguous().view(_INTEGERS[x.element_size()]) for x in (got, expected))
    if not (got.dtype == expected.dtype and torch.equal(bits, expected_bits)):
        require(subject, False, f"{law}\ngot      {got}\nexpected {expected}")
