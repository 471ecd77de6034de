"""Kernels for devices that have none of their own: tensors are copied to the host, worked on there, and copied back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexcomm.kernels.base import Average, Kernels, Momentum, Payload, PayloadError, Reader, ThresholdCounts, Writer
from flexcomm.kernels.plain import PlainReader, PlainWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flexcomm.kernels.plan import Layout, SampleKey, TensorPlan

__all__ = ["StagedKernels"]


class StagedKernels:
    """The verbs of a kernel set of the host, for tensors on any device."""

    name = "staged"

    def __init__(self, host: Kernels) -> None:
        self._host = host

    def is_finite(self, x: Tensor) -> bool:
        return self._host.is_finite(x.cpu())

    def find_threshold(self, x: Tensor, plan: TensorPlan, momentum: Momentum) -> ThresholdCounts:
        found = self._host.find_threshold(x.cpu(), plan, _on_host(momentum))
        return found._replace(counts=found.counts.to(x.device))

    def encode_(
        self,
        x: Tensor,
        words: Tensor,
        plan: TensorPlan,
        layout: Layout,
        sample_key: SampleKey,
        momentum: Momentum,
        threshold: ThresholdCounts | None = None,
    ) -> bool:
        filled, staged = torch.empty_like(words, device="cpu"), _on_host(momentum)
        counted = None if threshold is None else threshold._replace(counts=threshold.counts.cpu())
        is_finite = self._host.encode_(x.cpu(), filled, plan, layout, sample_key, staged, counted)
        words.copy_(filled)
        if momentum.next_state is not None and staged.next_state is not None:
            momentum.next_state.copy_(staged.next_state)
        return is_finite

    def writer(self, words: Tensor, plan: TensorPlan, layout: Layout) -> Writer:
        return PlainWriter(self, words, plan, layout)

    def read_counts(self, words: Tensor, plan: TensorPlan, start: int) -> Tensor | None:
        nwords = -(-plan.chunks * plan.chunk_numel.bit_length() // 32)
        counts = self._host.read_counts(words[start : start + nwords].cpu(), plan, 0)
        return None if counts is None else counts.to(words.device)

    def find_error(self, words: Tensor, payload: Payload, plan: TensorPlan) -> PayloadError:
        staged, payloads = _stage(words, [payload])
        return self._host.find_error(staged, payloads[0], plan)

    def decode_(
        self,
        words: Tensor,
        payloads: Sequence[Payload],
        plan: TensorPlan,
        sample_key: SampleKey,
        average: Average,
        out: Tensor,
    ) -> None:
        staged, here = _stage(words, payloads)
        decoded = torch.empty(out.shape, dtype=out.dtype)
        self._host.decode_(staged, here, plan, sample_key, average, decoded)
        out.copy_(decoded)

    def reader(self, words: Tensor, payloads: Sequence[Payload], plan: TensorPlan) -> Reader:
        return PlainReader(self, words, payloads, plan)

    def checksum(self, words: Tensor, first: int) -> int:
        return self._host.checksum(words.cpu(), first)

    def mix_(self, x: Tensor, keep: float, others: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> Tensor:
        mixed = torch.empty(out.shape, dtype=out.dtype)
        distance = self._host.mix_(x.cpu(), keep, [other.cpu() for other in others], weights, mixed)
        out.detach().copy_(mixed)
        return distance.to(x.device)


def _on_host(momentum: Momentum) -> Momentum:
    """Return a momentum whose states are copies on the host: what is read, and memory for what is written."""
    state = None if momentum.state is None else momentum.state.cpu()
    next_state = None if momentum.next_state is None else torch.empty(momentum.next_state.shape)
    return momentum._replace(state=state, next_state=next_state)


def _stage(words: Tensor, payloads: Sequence[Payload]) -> tuple[Tensor, list[Payload]]:
    """Return the payloads' words on the host, one payload behind the other: of others' tensors, nothing is copied."""
    staged, moved, start = [], [], 0
    for payload in payloads:
        nwords = payload.layout.nwords
        staged.append(words[payload.start : payload.start + nwords].cpu())
        counts = None if payload.counts is None else payload.counts.cpu()
        moved.append(Payload(start, payload.layout, counts))
        start += nwords
    return torch.cat(staged), moved
