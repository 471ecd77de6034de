"""A compressor says, for each tensor, what is sent of it. It holds settings: no tensor, no rank, no byte."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

import torch

from flexcomm.compress.bases import Basis
from flexcomm.compress.selectors import RandomK, Selector, Threshold, TopK
from flexcomm.errors import CompressorError
from flexcomm.kernels import NO_DRAW, Draw, Selection, TensorPlan, ValueCode

if TYPE_CHECKING:
    from collections.abc import Hashable

    from flexcomm.compress.settings import Settings

__all__ = ["Compressor", "Pipeline", "TensorSpec", "ValueName", "draw_for"]

ValueName = Literal["fp32", "bf16", "fp16", "int8", "sign", "sign2", "native"]
"""How a sent coefficient is written. ``native``: as the tensor's own dtype is, float64 as float32."""

NATIVE = {
    torch.float64: ValueCode.FP32,
    torch.float32: ValueCode.FP32,
    torch.bfloat16: ValueCode.BF16,
    torch.float16: ValueCode.FP16,
}


class TensorSpec(NamedTuple):
    """What a plan may depend on: the same on every rank.

    Args:
        name: what the tensor is called in residuals and messages.
        shape: its shape.
        dtype: its dtype.

    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Compressor(Protocol):
    """What is sent of a tensor, as a plan the kernels carry out.

    A compressor is a value: it compares and hashes by its settings, and prints them, because ranks compare what they
    print. ``plan`` answers the same for the same tensor, always. :func:`flexcomm.testing.check_compressor` holds one
    to the laws.
    """

    def plan(self, tensor: TensorSpec) -> TensorPlan:
        """Return what is sent of the tensor."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Pipeline:
    """A compressor: a basis, a selector and a value code, one after the other. The recipes are pipelines.

    Args:
        basis: cuts a tensor into chunks and transforms them: ``Dct`` or ``Identity``.
        selector: selects coefficients of a chunk.
        values: how selected coefficients are written.

    """

    basis: Basis
    selector: Selector
    values: ValueName = "bf16"

    def __post_init__(self) -> None:
        wrong = _complaints_of("basis", self.basis, get_args(Basis))
        wrong += _complaints_of("selector", self.selector, get_args(Selector))
        if not wrong and isinstance(self.selector, TopK) and self.selector.k > self.basis.most_in_a_chunk():
            most = self.basis.most_in_a_chunk()
            wrong.append(f"k is {self.selector.k}, but a chunk of {self.basis} holds no more than {most}")
        if self.values not in get_args(ValueName):
            wrong.append(f"values is {self.values!r}, but must be one of {', '.join(get_args(ValueName))}")
        if wrong:
            raise CompressorError(f"this compressor cannot be: {'; '.join(wrong)}.")

    def plan(self, tensor: TensorSpec) -> TensorPlan:
        """Return what is sent of the tensor."""
        if tensor.dtype not in NATIVE:
            raise CompressorError(
                f"{tensor.name!r} is {tensor.dtype}, but only {', '.join(str(dtype) for dtype in NATIVE)} can be "
                f"compressed. Convert it, or leave it out."
            )
        cut = self.basis.cut(tensor.shape)
        selector = self.selector
        return TensorPlan(
            *cut,
            transformed=self.basis.transformed,
            selection=selector.kind,
            keep=selector.keep(cut),
            values=NATIVE[tensor.dtype] if self.values == "native" else ValueCode[self.values.upper()],
            tau=selector.tau if isinstance(selector, Threshold) else 0.0,
            seed=selector.seed if isinstance(selector, RandomK) else 0,
            exact=isinstance(selector, Threshold) and selector.capacity is None,
        )


def _complaints_of(name: str, part: object, kinds: tuple[type[Settings], ...]) -> list[str]:
    if isinstance(part, kinds):
        return part.complaints()
    return [f"{name} is {part!r}, but must be one of {', '.join(kind.__name__ for kind in kinds)}"]


def draw_for(plan: TensorPlan, step: int, name: str) -> Draw:
    """Return what a shared selection depends on at this step; a function of (seed, step, name) and nothing else."""
    # numpy's integers print their type, and what is printed is hashed.
    step = int(step)
    if plan.selection is Selection.STRIDED:
        return Draw(0, step % plan.chunk_numel)
    if plan.selection is not Selection.SHUFFLED:
        return NO_DRAW
    turns = -(-plan.chunk_numel // plan.keep)
    deal, turn = divmod(step, turns)
    return Draw(_hash32((plan.seed, name, deal)), turn * plan.keep % plan.chunk_numel)


@lru_cache(maxsize=4096)
def _hash32(key: Hashable) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "little")
