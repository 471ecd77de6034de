"""The orthonormal DCT-II as a short list of operations on rows, the same list for every kernel set.

A list, and not a formula: float addition does not associate, so kernel sets agree to the bit only if they add in the
same order. It follows the stable recursion of Plonka and Tasche (Fast and numerically stable algorithms for discrete
cosine transforms, 2005): an even length splits into a DCT-II and a DCT-IV of half the length by sums and differences;
a DCT-IV of even length is plane rotations, a DCT-II, a DST-II and sums and differences; the sine transforms split
alike, and spare the changes of sign that two DCT-II would need. An odd length is a dense product. The list computes
``sqrt(n)`` times the orthonormal transform; the caller scales once, by ``1 / sqrt(n)``.

[Note: fused operations] A product that is added is rounded once, with the sum, wherever the list adds one: by the fused
multiply-add that every CPU with AVX2 or NEON has, and every GPU. A rotation is then three operations instead of six, as
three shears, and 64 elements take 544 instead of 726.
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
ROTATE = 1
"""i <- i + c0*j, then j <- j + c1*i, then i <- i + c0*j"""
SCALE = 2
"""i <- c0*i"""
ADD_SCALED = 3
"""i <- i + c0*j"""

_ROOT2 = math.sqrt(2.0)

Entry = Callable[[int, int, int], float]


@dataclass(frozen=True, eq=False)
class Program:
    """Operations on the rows of a workspace, in order.

    Row ``i`` of the input is put into row ``inputs[i]`` of ``height`` rows, all others are zero; then output ``k`` is
    in row ``outputs[k]``. ``steps`` holds ``[code, i, j]``, ``factors`` the constants ``[c0, c1]``.
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
    factors = np.array([step[3:] for step in builder.steps], np.float32).reshape(-1, 2)
    return Program(builder.height, np.array(inputs, np.int32), np.array(outputs, np.int32), steps, factors)


@lru_cache(maxsize=64)
def plan_inverse_dct(length: int) -> Program:
    """Return the transposed list: every step transposed, in reverse order."""
    forward = plan_dct(length)
    steps = forward.steps[::-1].copy()
    sheared = np.isin(steps[:, 0], (ROTATE, ADD_SCALED))
    steps[sheared] = steps[sheared][:, [0, 2, 1]]
    return Program(forward.height, forward.outputs, forward.inputs, steps, forward.factors[::-1].copy())


def plan_levels(program: Program) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the order of steps by level, and where in it each level begins and the last one ends.

    No step of a level writes what another of them reads or writes, so all can be done at once, with the same bits.
    A transform of 64 rows has 281 steps but 10 levels.
    """
    last_write, last_use = [0] * program.height, [0] * program.height
    levels = []
    for code, i, j in program.steps.tolist():
        written, read = rows_of_step(code, i, j)
        level = 1 + max([last_use[row] for row in written] + [last_write[row] for row in read])
        for row in written:
            last_write[row] = last_use[row] = level
        for row in read:
            last_use[row] = max(last_use[row], level)
        levels.append(level)
    order = np.argsort(levels, kind="stable").astype(np.int64)
    bounds = np.searchsorted(np.sort(levels), np.arange(1, max(levels, default=0) + 2))
    return order, bounds.astype(np.int32)


def rows_of_step(code: int, i: int, j: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which rows a step writes, and which it only reads."""
    if code == SCALE:
        return (i,), ()
    return ((i,), (j,)) if code == ADD_SCALED else ((i, j), ())


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
        sums, differences = self.butterflies(rows)
        return _alternating(self.dct2(sums), self.dct4(differences))

    def dst2(self, rows: list[int]) -> list[int]:
        if len(rows) == 1:
            return rows
        if len(rows) % 2:
            return self.dense(rows, _dst2_entry)
        sums, differences = self.butterflies(rows)
        return _alternating(self.dst4(sums), self.dst2(differences))

    def dst4(self, rows: list[int]) -> list[int]:
        """Append a DST-IV: a DCT-IV of the reversed input, every second output negated."""
        return self.dct4(rows[::-1], is_sine=True)

    def dct4(self, rows: list[int], *, is_sine: bool = False) -> list[int]:
        count, half = len(rows), len(rows) // 2
        if count == 1:
            return rows
        if count % 2:
            return self.dense(rows[::-1], _dst4_entry) if is_sine else self.dense(rows, _dct4_entry)
        root_of_last = _ROOT2 if is_sine else -_ROOT2
        first, last = rows[:half], rows[: half - 1 : -1]
        if count == 2:
            self.scaled_rotation(first[0], last[0], math.pi / 8, _ROOT2, root_of_last)
            return rows
        for number, (i, j) in enumerate(zip(first, last, strict=True)):
            angle = (2 * number + 1) * math.pi / (4 * count)
            self.step(ROTATE, i, j, math.tan(angle / 2), -math.sin(angle))
        a, b = self.dct2(first), self.dst2(last)
        self.step(SCALE, a[0], a[0], _ROOT2)
        self.step(SCALE, b[-1], b[-1], root_of_last)
        outputs = [a[0]]
        for of_a, of_b in zip(a[1:], b, strict=False):
            # A difference with its sign changed is one the other way round.
            total, difference = (of_b, of_a) if is_sine else (of_a, of_b)
            self.step(BUTTERFLY, total, difference)
            outputs += [difference, total]
        return [*outputs, b[-1]]

    def butterflies(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Append sums and differences of the first and the last row, and so on; return the rows that have them."""
        half = len(rows) // 2
        pairs = list(zip(rows[:half], rows[: half - 1 : -1], strict=True))
        for i, j in pairs:
            self.step(BUTTERFLY, i, j)
        return [i for i, _ in pairs], [j for _, j in pairs]

    def scaled_rotation(self, i: int, j: int, angle: float, of_i: float, of_j: float) -> None:
        """Append a rotation and a product for each row, in four operations instead of five."""
        tangent, cosine = math.tan(angle), math.cos(angle)
        self.step(ADD_SCALED, i, j, tangent)
        self.step(SCALE, i, i, of_i * cosine)
        self.step(SCALE, j, j, of_j / cosine)
        self.step(ADD_SCALED, j, i, -tangent * of_j / of_i)

    def dense(self, rows: list[int], entry: Entry) -> list[int]:
        outputs = list(range(self.height, self.height + len(rows)))
        self.height += len(rows)
        for k, output in enumerate(outputs):
            for i, row in enumerate(rows):
                self.step(ADD_SCALED, output, row, entry(len(rows), k, i))
        return outputs

    def step(self, code: int, i: int, j: int, c0: float = 0.0, c1: float = 0.0) -> None:
        self.steps.append((code, i, j, c0, c1))


def _alternating(even: list[int], odd: list[int]) -> list[int]:
    return [row for pair in zip(even, odd, strict=True) for row in pair]


def _dct2_entry(length: int, k: int, i: int) -> float:
    return 1.0 if k == 0 else _ROOT2 * math.cos((2 * i + 1) * k * math.pi / (2 * length))


def _dct4_entry(length: int, k: int, i: int) -> float:
    return _ROOT2 * math.cos((2 * i + 1) * (2 * k + 1) * math.pi / (4 * length))


def _dst2_entry(length: int, k: int, i: int) -> float:
    root = 1.0 if k == length - 1 else _ROOT2
    return root * math.sin((2 * i + 1) * (k + 1) * math.pi / (2 * length))


def _dst4_entry(length: int, k: int, i: int) -> float:
    return _ROOT2 * math.sin((2 * i + 1) * (2 * k + 1) * math.pi / (4 * length))
