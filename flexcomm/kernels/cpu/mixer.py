"""Which loop mixes vectors, and what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from flexcomm.kernels.cpu import mixing
from flexcomm.kernels.cpu.records import BFLOAT16, FLOAT16

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Mixer = Callable[[int, int], float]

__all__ = ["mixer_of"]

_HALVES = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


def mixer_of(x: Tensor, self_weight: float, others: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> Mixer:
    """Return what mixes a part, given where it begins and ends, and returns how far that moved, squared."""
    terms = [term for term in zip((x, *others), (self_weight, *weights), strict=True) if term[1] != 0.0]
    if x.dtype in _HALVES:
        return _mixer_of_halves(x, terms, out)
    if len(terms) == 2 and terms[0][0] is x:
        return _mixer_of_two(x, terms, out)
    return _mixer_of_many(x, terms, out)


def _mixer_of_two(x: Tensor, terms: list[tuple[Tensor, float]], out: Tensor) -> Mixer:
    own, other, filled = x.detach().numpy(), terms[1][0].detach().numpy(), out.detach().numpy()
    self_weight, weight = own.dtype.type(terms[0][1]), own.dtype.type(terms[1][1])
    return lambda first, last: mixing.mix_two(
        own[first:last], self_weight, other[first:last], weight, filled[first:last]
    )


def _mixer_of_many(x: Tensor, terms: list[tuple[Tensor, float]], out: Tensor) -> Mixer:
    own, filled = x.detach().numpy(), out.detach().numpy()
    addresses, weights = _addresses(terms), np.array([weight for _, weight in terms], own.dtype)
    return lambda first, last: mixing.mix_many(first, last, own, filled, addresses, weights)


def _mixer_of_halves(x: Tensor, terms: list[tuple[Tensor, float]], out: Tensor) -> Mixer:
    own, filled = (tensor.detach().view(torch.uint16).numpy() for tensor in (x, out))
    addresses, weights = _addresses(terms), np.array([weight for _, weight in terms], np.float32)
    kind = _HALVES[x.dtype]
    return lambda first, last: mixing.mix_halves(first, last, own, filled, addresses, weights, kind)


def _addresses(terms: list[tuple[Tensor, float]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([term.data_ptr() for term, _ in terms], np.int64)
