"""Tensors a caller gives for averages to be written into: checked before anything moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from flexcomm.errors import InvalidArgumentError, InvalidTensorError


def check_outputs(tensors: Sequence[Tensor], outputs: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise unless every output is as its tensor is, contiguous, and in memory that neither inputs nor others use."""
    if len(outputs) != len(tensors):
        raise InvalidArgumentError(
            f"out has {len(outputs)} tensors for {len(tensors)} to be averaged: pass one for each, in the same order."
        )
    for name, x, out in zip(names, tensors, outputs, strict=True):
        if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
            gaps = "" if out.is_contiguous() else ", not contiguous"
            raise InvalidTensorError(
                f"out for {name} is {out.dtype} {list(out.shape)} on {out.device}{gaps}, but must be contiguous "
                f"{x.dtype} {list(x.shape)} on {x.device}: make it by torch.empty({list(x.shape)}, dtype={x.dtype}, "
                f"device={str(x.device)!r})."
            )
    _check_apart(
        [_Span(x.data_ptr(), _end(x), False, name) for name, x in zip(names, tensors, strict=True)]
        + [_Span(out.data_ptr(), _end(out), True, name) for name, out in zip(names, outputs, strict=True)]
    )


class _Span(NamedTuple):
    """The addresses a tensor's elements lie between."""

    begin: int
    end: int
    is_output: bool
    name: str

    def __str__(self) -> str:
        return f"out for {self.name}" if self.is_output else f"the tensor {self.name}"


def _end(x: Tensor) -> int:
    if x.is_contiguous():
        return x.data_ptr() + x.nbytes
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.itemsize


def _check_apart(spans: list[_Span]) -> None:
    """Raise if an output meets anything else; inputs may share memory among themselves."""
    reaching = reaching_output = _Span(0, 0, False, "")
    for span in sorted(span for span in spans if span.begin < span.end):
        other = reaching if span.is_output else reaching_output
        if span.begin < other.end:
            raise InvalidTensorError(
                f"{span} shares memory with {other}: inputs are not changed, and every average is written, so give "
                f"out memory of its own, by torch.empty_like."
            )
        if span.end > reaching.end:
            reaching = span
        if span.is_output:
            reaching_output = span
