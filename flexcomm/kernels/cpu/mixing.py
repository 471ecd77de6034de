"""Mixing: a weighted sum of vectors, and how far it is from one of them, in one pass over memory.

Two vectors are read and written by one loop. Of more, or of 16-bit ones, a block at a time is added up in cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba.np.numpy_support import carray
from numpy.typing import NDArray
from torch import Tensor

from flexcomm.kernels.cpu.bits import bf16_value, fp16_bits, fp16_value, nearest_bf16
from flexcomm.kernels.cpu.compiler import Float, Floats, Halves, Int, Longs, cached_kernel, compiled, summing
from flexcomm.kernels.cpu.instructions import pointer_to

Reals = NDArray[Any]  # of float32, or of float64

BFLOAT16, FLOAT16 = range(2)
_HALVES = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_BLOCK = 2048
"""Elements added up at a time: three arrays of them stay in the nearest cache."""


def mixer_of(x: Tensor, terms: list[tuple[Tensor, float]], out: Tensor) -> Callable[[int, int], float]:
    """Return what mixes a part, given where it begins and ends, and returns how far that moved, squared.

    ``terms`` are vectors and their weights; ``x`` is what distances are measured from.
    """
    if len(terms) == 2 and terms[0][0] is x and x.dtype not in _HALVES:
        own, other, filled = (one.detach().numpy() for one in (x, terms[1][0], out))
        self_weight, weight = own.dtype.type(terms[0][1]), own.dtype.type(terms[1][1])
        return lambda first, last: mix_two(own[first:last], self_weight, other[first:last], weight, filled[first:last])
    addresses = np.array([term.data_ptr() for term, _ in terms], np.int64)
    if x.dtype in _HALVES:
        halves, filled = (one.detach().view(torch.uint16).numpy() for one in (x, out))
        factors, kind = np.array([weight for _, weight in terms], np.float32), _HALVES[x.dtype]
        return lambda first, last: mix_halves(first, last, halves, filled, addresses, factors, kind)
    own, filled = x.detach().numpy(), out.detach().numpy()
    factors = np.array([weight for _, weight in terms], own.dtype)
    return lambda first, last: mix_many(first, last, own, filled, addresses, factors)


@cached_kernel
def mix_two(x: Reals, self_weight: Float, other: Reals, weight: Float, out: Reals) -> Float:
    """Fill ``out`` with ``self_weight * x + weight * other``; return how far it is from ``x``, squared."""
    # Where memory may overlap, loops do not fit into vectors: so there is one that is told of x alone.
    if x.ctypes.data == out.ctypes.data:
        return mix_two_in_place(x, self_weight, other, weight)
    return mix_two_apart(x, self_weight, other, weight, out)


@cached_kernel
def mix_many(first: Int, last: Int, x: Reals, out: Reals, terms: Longs, weights: Reals) -> Float:
    """Fill a part of ``out`` with the weighted sum of terms; return how far it is from ``x``, squared.

    Terms are given by address: numba would compile the loops anew for every number of arrays. ``x`` may be one of them.
    """
    memory, total = np.empty(_BLOCK, x.dtype), 0.0
    for begin in range(first, last, _BLOCK):
        end = min(begin + _BLOCK, last)
        sums = memory[: end - begin]
        if terms.size == 0:
            sums[:] = 0
        for number in range(terms.size):
            add_term(sums, carray(pointer_to(terms[number]), last, x.dtype)[begin:end], weights[number], number)
        total += distance(x[begin:end], sums)
        copy(out[begin:end], sums)
    return total


@cached_kernel
def mix_halves(first: Int, last: Int, x: Halves, out: Halves, terms: Longs, weights: Floats, kind: Int) -> Float:
    """Do what :func:`mix_many` does, for 16-bit elements of a kind."""
    memory, total = np.empty((3, _BLOCK), np.float32), 0.0
    for begin in range(first, last, _BLOCK):
        end = min(begin + _BLOCK, last)
        own, theirs, sums = memory[0, : end - begin], memory[1, : end - begin], memory[2, : end - begin]
        load(own, x[begin:end], kind)
        if terms.size == 0:
            sums[:] = 0
        for number in range(terms.size):
            load(theirs, carray(pointer_to(terms[number]), last, np.uint16)[begin:end], kind)
            add_term(sums, theirs, weights[number], number)
        store(out[begin:end], sums, kind)
        load(sums, out[begin:end], kind)
        total += distance(own, sums)
    return total


@compiled
def added(x: Float, self_weight: Float, other: Float, weight: Float) -> Float:
    return self_weight * x + weight * other


@summing
def mix_two_in_place(x: Reals, self_weight: Float, other: Reals, weight: Float) -> Float:
    total = 0.0
    for i in range(x.size):
        old = x[i]
        new = added(old, self_weight, other[i], weight)
        x[i] = new
        far = np.float64(new) - np.float64(old)
        total += far * far
    return total


@summing
def mix_two_apart(x: Reals, self_weight: Float, other: Reals, weight: Float, out: Reals) -> Float:
    total = 0.0
    for i in range(x.size):
        old = x[i]
        new = added(old, self_weight, other[i], weight)
        out[i] = new
        far = np.float64(new) - np.float64(old)
        total += far * far
    return total


@compiled
def add_term(sums: Reals, term: Reals, weight: Float, number: Int) -> None:
    """Add a term; the first one replaces what is there, because 0 + -0 is not -0."""
    if number == 0:
        for i in range(sums.size):
            sums[i] = weight * term[i]
    else:
        for i in range(sums.size):
            sums[i] = sums[i] + weight * term[i]


@summing
def distance(x: Reals, new: Reals) -> Float:
    total = 0.0
    for i in range(x.size):
        far = np.float64(new[i]) - np.float64(x[i])
        total += far * far
    return total


@compiled
def copy(out: Reals, new: Reals) -> None:
    for i in range(out.size):
        out[i] = new[i]


@compiled
def load(row: Floats, halves: Halves, kind: Int) -> None:
    if kind == BFLOAT16:
        for i in range(row.size):
            row[i] = bf16_value(halves[i])
    else:
        for i in range(row.size):
            row[i] = fp16_value(np.uint32(halves[i]))


@compiled
def store(halves: Halves, row: Floats, kind: Int) -> None:
    bits = row.view(np.uint32)
    if kind == BFLOAT16:
        for i in range(row.size):
            halves[i] = nearest_bf16(bits[i])
    else:
        for i in range(row.size):
            halves[i] = fp16_bits(bits[i])
