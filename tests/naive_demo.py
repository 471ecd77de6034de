"""DeMo's rule as published, written down naively: dense matrices in float64, momentum in elements.

Per node: decay the momentum, add the gradient, transform chunks, pick the k largest coefficients of each, and subtract
their inverse transform from the momentum. Then, for all: average coefficients over the nodes that sent them, and
transform back (Peng, Quesnelle, Kingma: DeMo, 2024).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# Relative to the largest: 50 gradients are added, each after a transform of some ten roundings of up to 2**-24, which
# at random make about sqrt(500) / 2 of them. Up to 7.5 are measured here.
ROUNDING = 2.0**-24 * 16
# Coefficients closer than both their errors may be picked differently in float32 and float64. The seeds avoid them.
CLOSEST = 2 * ROUNDING

Floats = NDArray[np.float64]


def dct_matrix(length: int) -> Floats:
    k, i = np.meshgrid(np.arange(length), np.arange(length), indexing="ij")
    matrix = math.sqrt(2 / length) * np.cos((2 * i + 1) * k * math.pi / (2 * length))
    matrix[0] /= math.sqrt(2)
    return np.asarray(matrix)


class NaiveDemo:
    """One tensor, padded with zeros to whole chunks; every node's momentum is held in elements."""

    def __init__(
        self,
        rows: int,
        cols: int,
        chunk_rows: int,
        chunk_cols: int,
        k: int,
        *,
        nodes: int,
        decay: float,
        rate: float,
    ) -> None:
        self.decay, self.rate = decay, rate
        self.rows, self.cols, self.height, self.width, self.k = rows, cols, chunk_rows, chunk_cols, k
        self.down, self.along = dct_matrix(chunk_rows), dct_matrix(chunk_cols)
        padded = (-(-rows // chunk_rows) * chunk_rows, -(-cols // chunk_cols) * chunk_cols)
        self.momenta = [np.zeros(padded) for _ in range(nodes)]
        self.closest = math.inf

    def step(self, gradients: list[Floats]) -> Floats:
        shape = self.momenta[0].shape
        total, contributors, update = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for momentum, gradient in zip(self.momenta, gradients, strict=True):
            momentum *= self.decay
            momentum[: self.rows, : self.cols] += self.rate * gradient
            for chunk in self.chunks():
                coefficients = self.down @ momentum[chunk] @ self.along.T
                sent = self.largest(coefficients)
                total[chunk] += np.where(sent, coefficients, 0.0)
                contributors[chunk] += sent
                momentum[chunk] -= self.down.T @ np.where(sent, coefficients, 0.0) @ self.along
        mean = total / np.maximum(contributors, 1.0)
        for chunk in self.chunks():
            update[chunk] = self.down.T @ mean[chunk] @ self.along
        return update[: self.rows, : self.cols]

    def chunks(self) -> list[tuple[slice, slice]]:
        height, width = self.momenta[0].shape
        return [
            (slice(top, top + self.height), slice(left, left + self.width))
            for top in range(0, height, self.height)
            for left in range(0, width, self.width)
        ]

    def largest(self, coefficients: Floats) -> NDArray[np.bool_]:
        magnitudes = np.sort(np.abs(coefficients), axis=None)[::-1]
        last, next_one = magnitudes[self.k - 1], magnitudes[self.k]
        self.closest = min(self.closest, (last - next_one) / magnitudes[0])
        return np.abs(coefficients) >= last
