"""The layout of a bucket's buffer, which follows from shapes: what is sent of each tensor, and where it lies."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

from flexcomm.compress import Compressor, TensorSpec, dense
from flexcomm.errors import CompressorError
from flexcomm.kernels import BufferPlan, Selection, TensorPlan, plan_layout
from flexcomm.kernels.layout import VERSION

_TINY_NUMEL = 64


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
    return BufferPlan.of(specs, plans, _digest(specs, plans))


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
        f"selection=<Selection.{plan.selection.rule.wire_name}: {int(plan.selection)}>, keep={plan.k!r}, "
        f"values=<ValueCode.{plan.values.name}: {int(plan.values)}>, tau={plan.tau!r}, seed={plan.seed!r}, "
        f"exact={plan.variable_length!r})"
    )
