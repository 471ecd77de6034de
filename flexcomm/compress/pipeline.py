"""The Protocol of a compressor, and Pipeline, which the recipes return. It holds settings: no tensor, no rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, get_args

import torch

from flexcomm.compress.parts import Basis, Selector, Settings, TopK
from flexcomm.errors import CompressorError
from flexcomm.kernels import TensorPlan, TensorSpec, ValueCode, ValueName

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of tensors that can be compressed."""


class Compressor(Protocol):
    """Plans what is sent of a tensor; the kernels do what the plan says.

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
        wrong = _complaints_of("basis", self.basis, Basis)
        wrong += _complaints_of("selector", self.selector, Selector)
        if not wrong and isinstance(self.selector, TopK) and self.selector.k > self.basis.most_in_a_chunk():
            most = self.basis.most_in_a_chunk()
            wrong.append(f"k is {self.selector.k}, but a chunk of {self.basis} holds no more than {most}")
        if self.values not in get_args(ValueName):
            wrong.append(f"values is {self.values!r}, but must be one of {', '.join(get_args(ValueName))}")
        if wrong:
            raise CompressorError(f"this compressor cannot be: {'; '.join(wrong)}.")

    def plan(self, tensor: TensorSpec) -> TensorPlan:
        """Return what is sent of the tensor."""
        if tensor.dtype not in DTYPES:
            raise CompressorError(
                f"{tensor.name!r} is {tensor.dtype}, but only {', '.join(str(dtype) for dtype in DTYPES)} can be "
                f"compressed. Convert it, or leave it out."
            )
        cut = self.basis.cut(tensor.shape)
        selector = self.selector
        return TensorPlan(
            *cut,
            transformed=self.basis.transformed,
            selection=selector.selection,
            k=selector.choose_k(cut),
            values=ValueCode.of(tensor.dtype) if self.values == "native" else ValueCode[self.values.upper()],
            tau=selector.tau,
            seed=selector.seed,
            variable_length=selector.variable_length,
        )


def _complaints_of(name: str, part: object, base: type[Settings]) -> list[str]:
    if isinstance(part, base):
        return part.complaints()
    kinds = ", ".join(kind.__name__ for kind in _leaves_of(base))
    return [f"{name} is {part!r}, but must be one of {kinds}"]


def _leaves_of(base: type[Settings]) -> list[type[Settings]]:
    children = base.__subclasses__()
    return [leaf for child in children for leaf in _leaves_of(child)] if children else [base]
