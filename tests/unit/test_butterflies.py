"""The list of operations is the orthonormal DCT-II, whatever the length, and every interpreter does it alike."""

from __future__ import annotations

import ctypes
import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flexcomm.kernels.butterflies import ADD_SCALED, BUTTERFLY, ROTATE, SCALE, Program, plan_dct, plan_inverse_dct
from flexcomm.kernels.reference.transform import add_product, apply

LENGTHS = [*range(1, 34), 48, 64, 100, 128]

Matrix = NDArray[np.float32]

_FMAF = ctypes.CDLL("libm.so.6").fmaf
_FMAF.argtypes, _FMAF.restype = [ctypes.c_float] * 3, ctypes.c_float
fused = np.frompyfunc(_FMAF, 3, 1)
"""The C library's ``x * y + z``, rounded once."""


def orthonormal_dct(length: int) -> NDArray[np.float64]:
    k, i = np.meshgrid(np.arange(length), np.arange(length), indexing="ij")
    matrix = math.sqrt(2 / length) * np.cos((2 * i + 1) * k * math.pi / (2 * length))
    matrix[0] /= math.sqrt(2)
    return np.asarray(matrix)


def run(program: Program, rows: Matrix) -> Matrix:
    """Do what the steps say, one float32 operation after the other, each rounded once."""
    work = np.zeros((program.height, rows.shape[1]), np.float32)
    work[program.inputs] = rows
    for (code, i, j), (c0, c1) in zip(program.steps, program.factors, strict=True):
        a, b = work[i].copy(), work[j].copy()
        if code == BUTTERFLY:
            work[i], work[j] = a + b, a - b
        elif code == ROTATE:
            work[i] = fused(c0, b, a)
            work[j] = fused(c1, work[i], b)
            work[i] = fused(c0, work[j], work[i])
        elif code == SCALE:
            work[i] = c0 * a
        elif code == ADD_SCALED:
            work[i] = fused(c0, b, a)
        else:
            pytest.fail(f"there is no operation {code}")
    return work[program.outputs]


def rounding(length: int) -> float:
    """How far a column of unit norm may be off: so many operations one behind the other, each rounded once or twice.

    A halving takes up to three, and a dense product of the odd part as many as it has terms.
    """
    odd = length // (length & -length)
    return 2.0**-23 * (1 + 3 * math.log2(length // odd) + odd)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_list_is_the_orthonormal_dct_times_the_root_of_its_length(length: int) -> None:
    got = run(plan_dct(length), np.eye(length, dtype=np.float32)) / math.sqrt(length)
    errors = np.linalg.norm(got - orthonormal_dct(length), axis=0)
    assert errors.max() <= rounding(length)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_inverse_list_is_the_transpose(length: int) -> None:
    got = run(plan_inverse_dct(length), np.eye(length, dtype=np.float32)) / math.sqrt(length)
    errors = np.linalg.norm(got - orthonormal_dct(length).T, axis=0)
    assert errors.max() <= rounding(length)


@pytest.mark.parametrize("length", LENGTHS)
def test_there_and_back_is_the_identity(length: int) -> None:
    x = np.random.default_rng(length).standard_normal((length, 5)).astype(np.float32)
    back = run(plan_inverse_dct(length), run(plan_dct(length), x)) / np.float32(length)
    assert np.linalg.norm(back - x) <= 2 * rounding(length) * np.linalg.norm(x)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_reference_does_the_steps_one_by_one(length: int) -> None:
    chunks = np.random.default_rng(length).standard_normal((3, length, 4)).astype(np.float32)
    for program in (plan_dct(length), plan_inverse_dct(length)):
        got = apply(program, torch.from_numpy(chunks)).numpy()
        assert np.array_equal(got, np.stack([run(program, chunk) for chunk in chunks]))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (BUTTERFLY, [[5.0], [1.0]]),
        (ROTATE, [[3 + 2 * 2.0 + 2 * 37.0], [2.0 + 5 * 7.0]]),
        (SCALE, [[6.0], [2.0]]),
        (ADD_SCALED, [[3 + 2 * 2.0], [2.0]]),
    ],
)
def test_an_operation_does_what_its_name_says(code: int, expected: list[list[float]]) -> None:
    rows, factors = np.arange(2, dtype=np.int32), np.array([[2.0, 5.0]], np.float32)
    program = Program(2, rows, rows, np.array([[code, 0, 1]], np.int32), factors)
    got = apply(program, torch.tensor([[[3.0], [2.0]]]))[0]
    assert got.tolist() == expected


@pytest.mark.parametrize("length", [2, 8, 64, 1024])
def test_a_power_of_two_takes_few_operations_and_no_spare_rows(length: int) -> None:
    program = plan_dct(length)
    operations = {BUTTERFLY: 2, ROTATE: 3, SCALE: 1, ADD_SCALED: 1}
    assert program.height == length
    assert sum(operations[code] for code in program.steps[:, 0].tolist()) <= 1.5 * length * math.log2(length)


def test_constants_become_one_coefficient() -> None:
    assert run(plan_dct(8), np.ones((8, 1), np.float32))[:, 0].tolist() == [8.0, *[0.0] * 7]


def test_a_product_is_added_with_one_rounding() -> None:
    """Halfway between two floats, and so near that float64 would round it to there; at the ends of exponents, too."""
    near_halfway = [1 + 2.0**-12, 1 - 2.0**-12, 1 + 2.0**-23, 2 - 2.0**-23, 1 + 3 * 2.0**-12]
    scales = [2.0**-149, 2.0**-126, 2.0**-75, 2.0**-24, 1.0, 2.0**24, 2.0**100]
    values = np.array([sign * x * scale for sign, x, scale in product((1, -1), near_halfway, scales)], np.float32)
    x, y = (one.reshape(-1) for one in np.meshgrid(values, values))
    for factor in np.array([*near_halfway, 2.0**-30, 0.0], np.float32):
        got = add_product(torch.from_numpy(x), torch.tensor(float(factor), dtype=torch.float64), torch.from_numpy(y))
        assert got.tolist() == [
            _nearest(Fraction(float(factor)) * Fraction(b) + Fraction(a))
            for a, b in zip(x.tolist(), y.tolist(), strict=True)
        ]


def _nearest(exact: Fraction) -> float:
    """Return the nearest float32, of two the even one."""
    size = abs(exact)
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length() - 24, -149)
    while size >= Fraction(2) ** (exponent + 24):
        exponent += 1
    while exponent > -149 and size < Fraction(2) ** (exponent + 23):
        exponent -= 1
    rounded = float(round(size / Fraction(2) ** exponent) * Fraction(2) ** exponent)
    return math.copysign(rounded, exact) if exact else 0.0
