"""The orthonormal DCT-II as a short list of operations on rows, the same list for every kernel set.

A list, and not a formula: float addition does not associate, so kernel sets agree to the bit only if they add in the
same order. It follows the stable recursion of Plonka and Tasche (Fast and numerically stable algorithms for discrete
cosine transforms, 2005): an even length splits into a DCT-II and a DCT-IV of half the length by sums and differences;
a DCT-IV of even length is plane rotations, two DCT-II and sums and differences. An odd length is a dense product.
The list computes ``sqrt(n)`` times the orthonormal transform; the caller scales once, by ``1 / sqrt(n)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

BUTTERFLY = 0
"""(i, j) <- (i + j, i - j)"""
MIX = 1
"""(i, j) <- (c0*i + c1*j, c2*i + c3*j)"""
SCALE = 2
"""i <- c0*i"""
ADD_SCALED = 3
"""i <- i + c0*j"""

_ROOT2 = math.sqrt(2.0)
_SUM_AND_DIFFERENCE = (1.0, 1.0, 1.0, -1.0)

Entry = Callable[[int, int, int], float]


@dataclass(frozen=True, eq=False)
class Program:
    """Operations on the rows of a workspace, in order.

    Row ``i`` of the input is put into row ``inputs[i]`` of ``height`` rows, all others are zero; then output ``k`` is
    in row ``outputs[k]``. ``steps`` holds ``[code, i, j]``, ``factors`` the constants ``[c0, c1, c2, c3]``.
    """

    height: int
    inputs: NDArray[np.int32]
    outputs: NDArray[np.int32]
    steps: NDArray[np.int32]
    factors: NDArray[np.float32]


@lru_cache(maxsize=64)
def plan_dct(length: int) -> Program:
    """Return the list that turns ``length`` rows into ``sqrt(length)`` times their orthonormal DCT-II."""
    builder, inputs = _Builder(length), list(range(length))
    outputs = builder.dct2(inputs)
    steps = np.array([step[:3] for step in builder.steps], np.int32).reshape(-1, 3)
    factors = np.array([step[3:] for step in builder.steps], np.float32).reshape(-1, 4)
    return Program(builder.height, np.array(inputs, np.int32), np.array(outputs, np.int32), steps, factors)


@lru_cache(maxsize=64)
def plan_inverse_dct(length: int) -> Program:
    """Return the transposed list: every step transposed, in reverse order."""
    forward = plan_dct(length)
    steps, factors = forward.steps[::-1].copy(), forward.factors[::-1, [0, 2, 1, 3]].copy()
    added = steps[:, 0] == ADD_SCALED
    steps[added] = steps[added][:, [0, 2, 1]]
    return Program(forward.height, forward.outputs, forward.inputs, steps, factors)


class _Builder:
    """Appends steps that work in place on rows, and answers where the outputs are."""

    def __init__(self, length: int) -> None:
        self.height = length
        self.steps: list[tuple[float, ...]] = []

    def dct2(self, rows: list[int]) -> list[int]:
        if len(rows) == 1:
            return rows
        if len(rows) % 2:
            return self.dense(rows, _dct2_entry)
        first, last = rows[: len(rows) // 2], rows[: len(rows) // 2 - 1 : -1]
        for i, j in zip(first, last, strict=True):
            self.step(BUTTERFLY, i, j, *_SUM_AND_DIFFERENCE)
        return [row for pair in zip(self.dct2(first), self.dct4(last), strict=True) for row in pair]

    def dct4(self, rows: list[int]) -> list[int]:
        count, half = len(rows), len(rows) // 2
        if count == 1:
            return rows
        if count % 2:
            return self.dense(rows, _dct4_entry)
        first, last = rows[:half], rows[: half - 1 : -1]
        for number, (i, j) in enumerate(zip(first, last, strict=True)):
            angle = (2 * number + 1) * math.pi / (4 * count)
            flip = -1.0 if number % 2 else 1.0
            self.step(MIX, i, j, math.cos(angle), math.sin(angle), -flip * math.sin(angle), flip * math.cos(angle))
        a, b = self.dct2(first), self.dct2(last)
        self.step(SCALE, a[0], a[0], _ROOT2)
        self.step(SCALE, b[0], b[0], -_ROOT2)
        outputs = [a[0]]
        for m in range(1, half):
            self.step(BUTTERFLY, a[m], b[half - m], *_SUM_AND_DIFFERENCE)
            outputs += [b[half - m], a[m]]
        return [*outputs, b[0]]

    def dense(self, rows: list[int], entry: Entry) -> list[int]:
        outputs = list(range(self.height, self.height + len(rows)))
        self.height += len(rows)
        for k, output in enumerate(outputs):
            for i, row in enumerate(rows):
                self.step(ADD_SCALED, output, row, entry(len(rows), k, i))
        return outputs

    def step(self, code: int, i: int, j: int, c0: float, c1: float = 0.0, c2: float = 0.0, c3: float = 0.0) -> None:
        self.steps.append((code, i, j, c0, c1, c2, c3))


def _dct2_entry(length: int, k: int, i: int) -> float:
    return 1.0 if k == 0 else _ROOT2 * math.cos((2 * i + 1) * k * math.pi / (2 * length))


def _dct4_entry(length: int, k: int, i: int) -> float:
    return _ROOT2 * math.cos((2 * i + 1) * (2 * k + 1) * math.pi / (4 * length))
