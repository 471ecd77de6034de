"""Recipes: named compositions, one call each. ``docs/compressors.md`` says which one is for which link."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexcomm.compress.bases import Dct, Identity
from flexcomm.compress.pipeline import NATIVE, Pipeline, ValueName
from flexcomm.compress.selectors import Everything, RandomK, Striding, Threshold, TopK, TopRate
from flexcomm.errors import CompressorError

if TYPE_CHECKING:
    import torch

__all__ = ["demo", "dense", "random_k", "sign", "striding", "threshold", "top_k"]


def demo(k: int = 32, chunk: int = 64, values: ValueName = "bf16") -> Pipeline:
    """Send the ``k`` fastest-moving components of every chunk of ``chunk x chunk``: DeMo's rule.

    Of a flat tensor, whose chunks hold ``chunk`` elements, ``k`` of those.
    """
    return Pipeline(Dct(chunk), TopK(k), values)


def top_k(rate: float, values: ValueName = "bf16") -> Pipeline:
    """Send the share ``rate`` of largest magnitude."""
    return Pipeline(Identity(), TopRate(rate), values)


def threshold(tau: float, capacity: float | None = 1 / 16, values: ValueName = "bf16") -> Pipeline:
    """Send every element whose magnitude reaches ``tau``, up to the share ``capacity``; ``None``: without limit."""
    return Pipeline(Identity(), Threshold(tau, capacity), values)


def random_k(rate: float, seed: int = 0, values: ValueName = "bf16") -> Pipeline:
    """Send a random share, the same on every rank: no indices travel, and it scales to many nodes."""
    return Pipeline(Identity(), RandomK(rate, seed), values)


def striding(rate: float, values: ValueName = "bf16") -> Pipeline:
    """Send evenly spaced elements, moving on by one with every step; no indices travel."""
    return Pipeline(Identity(), Striding(rate), values)


def sign(values: ValueName = "sign") -> Pipeline:
    """Send every element's sign, and one magnitude for every chunk."""
    return Pipeline(Identity(), Everything(), values)


def dense(dtype: torch.dtype | None = None, values: ValueName = "native") -> Pipeline:
    """Send everything, as ``dtype``, even if it is wider than the tensor's; without one, as the tensor's own."""
    if dtype is None:
        return Pipeline(Identity(), Everything(), values)
    if dtype not in tuple(NATIVE) or values != "native":
        raise CompressorError(
            f"dense cannot send as dtype={dtype!r} with values={values!r}: give one of {', '.join(map(str, NATIVE))} "
            f"as dtype, or values alone."
        )
    names: dict[str, ValueName] = {"FP32": "fp32", "BF16": "bf16", "FP16": "fp16"}
    return Pipeline(Identity(), Everything(), names[NATIVE[dtype].name])
