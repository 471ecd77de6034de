"""What the loops are given: plans as numbers, tensors as numpy's arrays over the same memory."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from flexcomm.kernels.base import LARGEST_MAGNITUDE
from flexcomm.kernels.butterflies import plan_dct, plan_inverse_dct
from flexcomm.kernels.counting import entries_before, threshold_bits
from flexcomm.kernels.cpu.records import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    Coding,
    Job,
    Memory,
    Source,
    Transform,
    Words,
)
from flexcomm.kernels.cpu.selection import SELECTIONS
from flexcomm.kernels.cpu.values import CODES
from flexcomm.kernels.plan import NO_SAMPLE_KEY, Selection, check_implemented

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from flexcomm.kernels.layout import Layout
    from flexcomm.kernels.per_tensor import Payload, TensorState
    from flexcomm.kernels.plan import SampleKey, TensorPlan

__all__ = [
    "NO_COUNTS",
    "PreparedPlan",
    "as_floats",
    "as_words",
    "before_of",
    "bits_before",
    "coding_of",
    "magnitude_bits",
    "prepare_plan",
    "sections_of",
    "source_of",
    "target_of",
    "views_of",
    "with_key",
]

NO_COUNTS = np.empty((0, 0), np.int64)
_NO_FLOATS = np.empty((0, 0), np.float32)
_NO_SINGLES, _NO_DOUBLES, _NO_HALVES = np.empty(0, np.float32), np.empty(0, np.float64), np.empty(0, np.uint16)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_KINDS = {torch.float32: FLOAT32, torch.float64: FLOAT64, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


def _memory(x: Tensor) -> Memory:
    """Return a contiguous tensor's elements as the loops take them."""
    kind = _KINDS[x.dtype]
    if kind == FLOAT32:
        return Memory(kind, x.detach().numpy().reshape(-1), _NO_DOUBLES, _NO_HALVES)
    if kind == FLOAT64:
        return Memory(kind, _NO_SINGLES, x.detach().numpy().reshape(-1), _NO_HALVES)
    return Memory(kind, _NO_SINGLES, _NO_DOUBLES, x.detach().view(torch.uint16).numpy().reshape(-1))


def magnitude_bits(x: Tensor) -> tuple[NDArray[Any], int, int]:
    """Return the elements as integers, the mask that takes off the sign, and the first magnitude that is too large."""
    integers, mask, limit = _magnitudes(x.dtype)
    return x.detach().view(integers).numpy().reshape(-1), mask, limit


@lru_cache(maxsize=8)
def _magnitudes(dtype: torch.dtype) -> tuple[torch.dtype, int, int]:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    mask = (1 << (8 * dtype.itemsize - 1)) - 1
    return integers, mask, int(torch.tensor(LARGEST_MAGNITUDE, dtype=dtype).view(integers))


def as_floats(state: Tensor | None) -> NDArray[np.float32]:
    return _NO_FLOATS if state is None else state.numpy()


def as_words(words: Tensor) -> NDArray[np.uint32]:
    return words.numpy().view(np.uint32)


def views_of(words: NDArray[np.uint32]) -> Words:
    return Words(words, words.view(np.uint16), words.view(np.int8))


class PreparedPlan(NamedTuple):
    """What the loops are told of a plan, made once: its numbers, and the lists of operations there and back.

    A pair of lists is for the columns of a chunk and for its rows.
    """

    job: Job
    forward: tuple[Transform, Transform]
    inverse: tuple[Transform, Transform]


@lru_cache(maxsize=4096)
def prepare_plan(plan: TensorPlan) -> PreparedPlan:
    height, width = (plan.chunk_rows, plan.chunk_cols) if plan.transformed else (1, 1)
    check_implemented("cpu", plan, SELECTIONS, CODES)
    selection = Selection.EVERYTHING if plan.sends_everything else plan.selection
    values = plan.values.format
    job = Job(
        rows=plan.rows,
        cols=plan.cols,
        chunk_rows=plan.chunk_rows,
        chunk_cols=plan.chunk_cols,
        grid_cols=plan.grid_cols,
        chunk_numel=plan.chunk_numel,
        transformed=int(plan.transformed),
        selection=int(selection),
        needs_magnitudes=int(selection.rule.needs_magnitudes),
        is_variable=int(plan.is_variable),
        k=plan.k,
        tau_bits=threshold_bits(plan.tau),
        values=int(plan.values),
        value_bits=values.bits,
        scales=values.scales,
        nonfinite_mask=values.nonfinite_mask,
        key=NO_SAMPLE_KEY.key,
        start=NO_SAMPLE_KEY.start,
    )
    return PreparedPlan(
        job,
        (_transform(height, inverse=False), _transform(width, inverse=False)),
        (_transform(height, inverse=True), _transform(width, inverse=True)),
    )


@lru_cache(maxsize=64)
def _transform(length: int, *, inverse: bool) -> Transform:
    program = plan_inverse_dct(length) if inverse else plan_dct(length)
    return Transform(program.height, program.inputs, program.outputs, program.steps, program.factors)


def with_key(job: Job, sample_key: SampleKey) -> Job:
    """Return the job of a step."""
    return job if sample_key is NO_SAMPLE_KEY else job._replace(key=sample_key.key, start=sample_key.start)


def source_of(x: Tensor, plan: TensorPlan, state: TensorState, prepared: PreparedPlan) -> Source:
    """Return what the loops read."""
    decay, factor = np.float32(state.update.decay), np.float32(plan.scale(state.update.gain))
    stays = np.float32(1.0 - state.update.alpha)
    return Source(_memory(x), as_floats(state.state), decay, factor, stays, *prepared.forward)


def target_of(out: Tensor, plan: TensorPlan, prepared: PreparedPlan) -> Source:
    """Return what the loops write."""
    return Source(_memory(out), _NO_FLOATS, _ONE, np.float32(plan.scale(1.0)), _ZERO, *prepared.inverse)


def before_of(counts: Sequence[Tensor]) -> NDArray[np.int64]:
    """Return how many entries precede each chunk ``[senders, chunks + 1]``; nothing if every chunk has as many."""
    return np.stack([entries_before(one).numpy() for one in counts]) if counts else NO_COUNTS


def bits_before(before: NDArray[np.int64], chunk: int, job: Job, coding: Coding) -> tuple[int, int]:
    """Return how many bits of indices and of values precede a chunk."""
    entries = int(before[0, chunk]) if before.size else chunk * job.k
    return entries * coding.entry_bits + chunk * coding.chunk_bits, entries * job.value_bits


def coding_of(layout: Layout) -> Coding:
    return Coding(*layout.coding)


def sections_of(payload: Payload) -> tuple[int, ...]:
    """Return where indices, scales and values begin, and how the indices are written: payloads differ in that, too."""
    layout, start = payload.layout, payload.start
    return start + layout.indices, start + layout.scales, start + layout.values, *layout.coding
