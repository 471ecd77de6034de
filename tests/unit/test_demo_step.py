"""Fifty steps of DeMo on three nodes, against the published rule written down naively.

That one keeps the momentum in elements, as published; ours keeps coefficients, and never transforms what it subtracts.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flexcomm.codec import Decoder, Encoder, plan_buffer
from flexcomm.compress import TensorSpec, demo, top_k
from flexcomm.kernels import Kernels, ReferenceKernels, StateUpdate, TensorPlan
from flexcomm.kernels.cpu import CpuKernels
from flexcomm.testing.cases import elements_of, encode, sent_coefficients
from tests.naive_demo import CLOSEST, ROUNDING, Floats, NaiveDemo

NODES, STEPS, DECAY, RATE = 3, 50, 0.999, 1e-3


class OurDemo:
    """The same by flexcomm: one bucket a step, momentum in coefficients."""

    def __init__(self, shape: tuple[int, ...], k: int, chunk: int, kernels: Kernels) -> None:
        self.bucket = plan_buffer((TensorSpec("x", shape, torch.float32),), demo(k, chunk, values="fp32"))
        self.kernels, self.shape = kernels, shape
        self.states = [torch.zeros(self.plan.state_shape) for _ in range(NODES)]

    @property
    def plan(self) -> TensorPlan:
        return self.bucket.plans[0]

    def step(self, gradients: list[torch.Tensor], number: int) -> torch.Tensor:
        gathered = torch.empty(NODES, self.bucket.nbytes, dtype=torch.uint8)
        for state, gradient, buffer in zip(self.states, gradients, gathered, strict=True):
            encoder = Encoder(self.bucket, buffer, self.kernels)
            assert not encoder.encode_([gradient], [state], [state], StateUpdate(DECAY, RATE), step=number, sequence=0)
        update = torch.empty(self.shape)
        decoder = Decoder(self.bucket, gathered, [f"node {node}" for node in range(NODES)], self.kernels)
        assert decoder.verify(step=number, sequence=0) == []
        decoder.decode_([update], step=number, average="contributors")
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
    naive = NaiveDemo(rows, cols, 64 if rows > 1 else 1, 64, k, nodes=NODES, decay=DECAY, rate=RATE)
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
    naive = NaiveDemo(64, 128, 64, 64, 32, nodes=NODES, decay=DECAY, rate=RATE)
    gradients = gradients_of((64, 128), 1, 0)
    expected = naive.step([gradient.double().numpy() for gradient in gradients])
    ours = OurDemo((64, 128), 32, 64, CpuKernels(1))
    assert relative_difference(ours.step(gradients, 0) / NODES, expected) > 1000 * ROUNDING


@pytest.mark.parametrize("kernels", [CpuKernels(1), ReferenceKernels()], ids=["cpu", "reference"])
@pytest.mark.parametrize("keep", [5, 64], ids=["some", "all"])
def test_a_share_of_what_was_sent_stays(kernels: Kernels, keep: int) -> None:
    """``decay * state + gain * coefficients == alpha * decoded + state_out``: exact, for powers of two."""
    plan = plan_buffer((TensorSpec("x", (64,), torch.float32),), top_k(keep / 64, values="fp32")).plans[0]
    x, state = torch.arange(64.0), torch.arange(64.0).flip(0).view(plan.state_shape).clone()
    before = 0.5 * state + 2.0 * x.view(plan.state_shape)
    rest = torch.empty_like(state)
    decoded = sent_coefficients(kernels, encode(kernels, x, plan, state, rest, StateUpdate(0.5, 2.0, 0.25)))
    assert int((decoded != 0).sum()) == keep
    assert torch.equal(before, 0.25 * decoded + rest)
