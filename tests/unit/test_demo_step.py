"""Fifty steps of DeMo on three nodes, against the published rule written down naively.

The rule (Peng, Quesnelle, Kingma: DeMo, 2024), per node: decay the momentum, add the gradient, transform chunks,
pick the k largest coefficients of each, and subtract their inverse transform from the momentum. Then, for all: average
coefficients over the nodes that sent them, and transform back. Here with dense matrices in float64, and the momentum
kept in elements, as published; ours keeps coefficients, and never transforms what it subtracts.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flexcomm.bucket import decode_bucket_, encode_bucket_, plan_bucket, regions_of
from flexcomm.compress import TensorSpec, demo
from flexcomm.kernels import Kernels, Momentum, ReferenceKernels, TensorPlan
from flexcomm.kernels.cpu import CpuKernels
from flexcomm.testing.coefficients import elements_of

NODES, STEPS, DECAY, RATE = 3, 50, 0.999, 1e-3

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

    def __init__(self, rows: int, cols: int, chunk_rows: int, chunk_cols: int, k: int) -> None:
        self.rows, self.cols, self.height, self.width, self.k = rows, cols, chunk_rows, chunk_cols, k
        self.down, self.along = dct_matrix(chunk_rows), dct_matrix(chunk_cols)
        padded = (-(-rows // chunk_rows) * chunk_rows, -(-cols // chunk_cols) * chunk_cols)
        self.momenta = [np.zeros(padded) for _ in range(NODES)]
        self.closest = math.inf

    def step(self, gradients: list[Floats]) -> Floats:
        shape = self.momenta[0].shape
        total, contributors, update = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for momentum, gradient in zip(self.momenta, gradients, strict=True):
            momentum *= DECAY
            momentum[: self.rows, : self.cols] += RATE * gradient
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


class OurDemo:
    """The same by flexcomm: one bucket a step, momentum in coefficients."""

    def __init__(self, shape: tuple[int, ...], k: int, chunk: int, kernels: Kernels) -> None:
        self.bucket = plan_bucket((TensorSpec("x", shape, torch.float32),), demo(k, chunk, values="fp32"))
        self.kernels, self.shape = kernels, shape
        self.states = [torch.zeros(self.plan.state_shape) for _ in range(NODES)]

    @property
    def plan(self) -> TensorPlan:
        return self.bucket.plans[0]

    def step(self, gradients: list[torch.Tensor], number: int) -> torch.Tensor:
        gathered = torch.empty(NODES, self.bucket.nbytes, dtype=torch.uint8)
        for state, gradient, buffer in zip(self.states, gradients, gathered, strict=True):
            momenta = [Momentum(state, state, decay=DECAY, gain=RATE)]
            encode_bucket_(
                self.bucket, [gradient], buffer, step=number, sequence=0, kernels=self.kernels, momenta=momenta
            )
        update = torch.empty(self.shape)
        regions = regions_of([f"node {node}" for node in range(NODES)], [self.bucket.nbytes] * NODES)
        decode_bucket_(
            self.bucket,
            gathered.view(-1),
            regions,
            [update],
            step=number,
            sequence=0,
            kernels=self.kernels,
            average="contributors",
        )
        return update


def gradients_of(shape: tuple[int, ...], seed: int, step: int) -> list[torch.Tensor]:
    """What all nodes share, and as much of each node's own."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    shared = torch.randn(shape, generator=generator)
    return [shared + torch.randn(shape, generator=generator) for _ in range(NODES)]


def relative_difference(got: torch.Tensor, expected: Floats) -> float:
    return float(np.abs(got.double().numpy() - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("shape", "k", "seed"), [((64, 128), 32, 1), ((70, 130), 32, 2), ((130,), 8, 0)], ids=str)
def test_fifty_steps_are_the_published_rules(shape: tuple[int, ...], k: int, seed: int) -> None:
    ours = OurDemo(shape, k, 64, CpuKernels(1))
    rows, cols = (1, *shape)[-2:]
    naive = NaiveDemo(rows, cols, 64 if rows > 1 else 1, 64, k)
    for step in range(STEPS):
        gradients = gradients_of(shape, seed, step)
        update = ours.step(gradients, step)
        expected = naive.step([gradient.double().view(rows, cols).numpy() for gradient in gradients])
        assert naive.closest > CLOSEST, "inputs with a near tie show nothing: change the seed"
        assert relative_difference(update.view(rows, cols), expected) <= ROUNDING
    for state, momentum in zip(ours.states, naive.momenta, strict=True):
        kept = elements_of(ours.kernels, state, ours.plan)
        assert relative_difference(kept, momentum[:rows, :cols]) <= ROUNDING


def test_the_reference_takes_the_same_steps_to_the_bit() -> None:
    ours = [OurDemo((70, 130), 32, 64, kernels) for kernels in (CpuKernels(1), ReferenceKernels())]
    for step in range(3):
        one, other = (each.step(gradients_of((70, 130), 2, step), step) for each in ours)
        assert torch.equal(one, other)


def test_an_average_over_nodes_is_another_rule() -> None:
    """Were the tolerance so wide that both pass, it would show nothing."""
    naive = NaiveDemo(64, 128, 64, 64, 32)
    gradients = gradients_of((64, 128), 1, 0)
    expected = naive.step([gradient.double().numpy() for gradient in gradients])
    ours = OurDemo((64, 128), 32, 64, CpuKernels(1))
    assert relative_difference(ours.step(gradients, 0) / NODES, expected) > 1000 * ROUNDING
