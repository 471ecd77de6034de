"""The layout of a bucket's buffer, which follows from shapes: what is sent of each tensor, and where it lies."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from flexcomm.codec.wire import ALIGNMENT, HEADER_NWORDS, VERSION, WORD_NBYTES, plan_layout
from flexcomm.compress import Compressor, TensorSpec, dense
from flexcomm.errors import CompressorError
from flexcomm.kernels import Layout, Selection, TensorPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BufferPlan", "aligned", "assemble_buffer", "is_dense", "plan_buffer", "plan_tensor"]

_TINY_NUMEL = 64


@dataclass(frozen=True)
class BufferPlan:
    """What follows from names, shapes, dtypes and compressor: equal on every rank, or ``digest`` tells.

    ``nbytes`` is the length of every buffer or, of a plan of variable length, the greatest; ``layouts`` are those of
    payloads that are as long as they may get.
    """

    specs: tuple[TensorSpec, ...]
    plans: tuple[TensorPlan, ...]
    layouts: tuple[Layout, ...]
    nbytes: int
    digest: int

    @cached_property
    def variable_length(self) -> bool:
        """Whether buffers are as long as what they hold, so that lengths must be exchanged."""
        return any(plan.variable_length for plan in self.plans)

    @cached_property
    def nwords(self) -> int:
        """The same length in words."""
        return self.nbytes // WORD_NBYTES

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Where each payload begins, in words, in a buffer that is as long as it may get."""
        ends = accumulate((layout.nwords for layout in self.layouts), initial=HEADER_NWORDS)
        return tuple(ends)[:-1]

    @cached_property
    def is_variable(self) -> bool:
        """Whether the number of entries depends on the data."""
        return any(plan.is_variable for plan in self.plans)

    @cached_property
    def count(self) -> int:
        """Entries in a buffer; -1 if it depends on the data."""
        return -1 if self.is_variable else sum(plan.entries for plan in self.plans)


def plan_buffer(specs: Sequence[TensorSpec], compressor: Compressor) -> BufferPlan:
    """Return how these tensors share a buffer. A tensor that would be longer than if sent whole is sent whole."""
    try:
        hash(compressor)
    except TypeError as error:
        raise CompressorError(
            f"{compressor} cannot be hashed ({error}), but plans are kept by the settings they follow from: make "
            f"{type(compressor).__name__} a dataclass(frozen=True) of settings that can be."
        ) from error
    plain = tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in specs)
    return _plan_bucket(plain, compressor)


@lru_cache(maxsize=1024)
def _plan_bucket(specs: tuple[TensorSpec, ...], compressor: Compressor) -> BufferPlan:
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CompressorError(f"several tensors of one bucket are called {', '.join(twice)}: give each its own name.")
    return assemble_buffer(specs, tuple(plan_tensor(spec, compressor) for spec in specs))


def assemble_buffer(specs: tuple[TensorSpec, ...], plans: tuple[TensorPlan, ...]) -> BufferPlan:
    """Return how tensors with these plans share a buffer."""
    layouts = tuple(plan_layout(plan, plan.entries) for plan in plans)
    nwords = HEADER_NWORDS + sum(layout.nwords for layout in layouts)
    return BufferPlan(specs, plans, layouts, aligned(nwords) * WORD_NBYTES, _digest(specs, plans))


def plan_tensor(spec: TensorSpec, compressor: Compressor) -> TensorPlan:
    """Return what is sent of a tensor: what the compressor plans, or all of it where that is shorter.

    Args:
        spec: the tensor.
        compressor: plans what is sent.

    """
    plan, whole = compressor.plan(spec), dense().plan(spec)
    if plan.rows * plan.cols != math.prod(spec.shape):
        raise CompressorError(
            f"{compressor} plans {plan.rows} x {plan.cols} elements for {spec.name} of {list(spec.shape)}: its "
            f"plan must cover the tensor exactly."
        )
    if is_dense(plan):
        return plan
    # A variable length is known only afterwards; a tiny tensor's payload is judged by its greatest length.
    entries = 0 if plan.variable_length and plan.cols * plan.rows > _TINY_NUMEL else plan.entries
    return plan if plan_layout(plan, entries).nwords <= plan_layout(whole, whole.entries).nwords else whole


def is_dense(plan: TensorPlan) -> bool:
    """Return whether a plan sends every element as a float: in a dtype that was asked for, so none replaces it."""
    return plan.selection is Selection.EVERYTHING and not plan.transformed and not plan.values.format.scales


def _digest(specs: tuple[TensorSpec, ...], plans: tuple[TensorPlan, ...]) -> int:
    text = _digest_text(specs, plans)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _digest_text(specs: tuple[TensorSpec, ...], plans: tuple[TensorPlan, ...]) -> str:
    """Return the text of docs/wire.md that is hashed. It is a part of the format: names in it are not the classes'."""
    tensors = [(spec.name, spec.shape, str(spec.dtype)) for spec in specs]
    described = [_describe(plan) for plan in plans]
    listed = f"({described[0]},)" if len(described) == 1 else f"({', '.join(described)})"
    return f"({VERSION}, {tensors!r}, {listed})"


def _describe(plan: TensorPlan) -> str:
    return (
        f"TensorPlan(rows={plan.rows!r}, cols={plan.cols!r}, chunk_rows={plan.chunk_rows!r}, "
        f"chunk_cols={plan.chunk_cols!r}, transformed={plan.transformed!r}, "
        f"selection=<Selection.{plan.selection.name}: {int(plan.selection)}>, keep={plan.k!r}, "
        f"values=<ValueCode.{plan.values.name}: {int(plan.values)}>, tau={plan.tau!r}, seed={plan.seed!r}, "
        f"exact={plan.variable_length!r})"
    )


def aligned(nwords: int) -> int:
    step = ALIGNMENT // WORD_NBYTES
    return -(-nwords // step) * step
