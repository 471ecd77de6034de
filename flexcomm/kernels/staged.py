"""Kernels for devices that have none of their own: tensors are copied to the host, worked on there, and copied back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexcomm.kernels.base import STORE, Average, BucketDecoder, Epilogue, Kernels, States, StateUpdate, Tensors
from flexcomm.kernels.cpu import CpuKernels
from flexcomm.kernels.layout import BufferPlan, Region


class StagedKernels:
    """The calls of a kernel set of the host, for tensors on any device."""

    name = "staged"

    def __init__(self, host: Kernels | None = None) -> None:
        self._host = host or CpuKernels()

    def encoder(self, plan: BufferPlan, words: Tensor) -> StagedEncoder:
        return StagedEncoder(self._host, plan, words)

    def decoder(
        self,
        plan: BufferPlan,
        words: Tensor,
        regions: Sequence[Region],
        decoded_as: BufferPlan | None = None,
        summed: int = 1,
    ) -> StagedDecoder:
        staged = torch.empty_like(words, device="cpu")
        return StagedDecoder(self._host.decoder(plan, staged, regions, decoded_as, summed), staged, words)

    def mix_(self, x: Tensor, self_weight: float, others: Tensors, weights: Sequence[float], out: Tensor) -> Tensor:
        mixed = torch.empty(out.shape, dtype=out.dtype, device="cpu")
        distance = self._host.mix_(x.cpu(), self_weight, [other.cpu() for other in others], weights, mixed)
        out.detach().copy_(mixed)
        return distance.to(x.device)


class StagedEncoder:
    """An encoder of a buffer on the host, which is then copied to ``words``."""

    def __init__(self, kernels: Kernels, plan: BufferPlan, words: Tensor) -> None:
        self._words, self._staged = words, torch.empty_like(words, device="cpu")
        self._host = kernels.encoder(plan, self._staged)

    def encode_(
        self, tensors: Tensors, states: States, states_out: States, update: StateUpdate, *, step: int, sequence: int
    ) -> int:
        # In place: a copy on the host may be the state itself, whose successor could be lost if this raises.
        here = None if states is None else [state.to("cpu", copy=True) for state in states]
        status = int(self._host.encode_([x.cpu() for x in tensors], here, here, update, step=step, sequence=sequence))
        for state, staged in zip(states_out or (), here or (), strict=True):
            state.copy_(staged)
        self._words.copy_(self._staged)
        return status

    def rollback_(self, tensors: Tensors, states: Tensors, update: StateUpdate, *, step: int) -> None:
        here = [state.to("cpu", copy=True) for state in states]
        self._host.rollback_([x.cpu() for x in tensors], here, update, step=step)
        for state, staged in zip(states, here, strict=True):
            state.copy_(staged)

    def mark_nonfinite_(self, *, step: int, sequence: int) -> None:
        self._host.mark_nonfinite_(step=step, sequence=sequence)
        self._words.copy_(self._staged)


class StagedDecoder:
    """A decoder of buffers that :meth:`verify` copies to the host."""

    def __init__(self, host: BucketDecoder, staged: Tensor, words: Tensor) -> None:
        self._host, self._staged, self._words = host, staged, words

    def verify(self, *, step: int, sequence: int) -> int:
        self._staged.copy_(self._words)
        return int(self._host.verify(step=step, sequence=sequence))

    def decode_(self, outputs: Tensors, *, step: int, average: Average, epilogue: Epilogue = STORE) -> None:
        self._staged.copy_(self._words)  # Again: sums are decoded without being verified.
        here = [out.to("cpu", copy=True, memory_format=torch.contiguous_format) for out in outputs]
        self._host.decode_(here, step=step, average=average, epilogue=epilogue)
        for out, staged in zip(outputs, here, strict=True):
            out.copy_(staged)
