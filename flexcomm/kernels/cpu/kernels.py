"""The CPU's kernel set: numba's loops, over as many threads as torch was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from flexcomm.kernels.counting import BINS, fill_up, raise_threshold
from flexcomm.kernels.cpu import checking, thresholds
from flexcomm.kernels.cpu.arguments import as_words, magnitude_bits, prepare_plan, source_of
from flexcomm.kernels.cpu.coefficients import MAGNITUDE
from flexcomm.kernels.cpu.mixer import mixer_of
from flexcomm.kernels.cpu.prepared import CpuReader, CpuWriter
from flexcomm.kernels.cpu.shares import cut_up, run
from flexcomm.kernels.layout import CHECKSUM_WORD
from flexcomm.kernels.per_tensor import Payload, PerTensorKernels, TensorEncoding, TensorState, ThresholdCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from flexcomm.kernels.base import Average, Problem
    from flexcomm.kernels.plan import SampleKey, TensorPlan

__all__ = ["CpuKernels"]

_LINE = 32
"""Elements of the smallest dtype in a line of cache: threads that begin there share none."""


class CpuKernels(PerTensorKernels):
    """Loops compiled by numba. ``threads`` is torch's number unless given; the bits do not depend on it."""

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def is_finite(self, x: Tensor) -> bool:
        if x.numel() == 0:
            return True
        bits, mask, limit = magnitude_bits(x.contiguous())
        shares = cut_up(bits.size, bits.size, self._threads)
        return bool(max(run(shares, lambda first, last: checking.largest_bits(bits[first:last], mask))) < limit)

    def find_threshold(self, x: Tensor, plan: TensorPlan, state: TensorState) -> ThresholdCounts:
        prepared, shares = prepare_plan(plan), cut_up(plan.chunks, plan.chunks * plan.chunk_numel, self._threads)
        job, source = prepared.job, source_of(x.contiguous(), plan, state, prepared)

        def count(bound: int) -> Tensor:
            counts = np.zeros(plan.chunks, np.int64)
            if bound <= MAGNITUDE:
                run(
                    shares,
                    lambda first, last: thresholds.count_reaching_in_chunks(first, last, source, job, bound, counts),
                )
            return torch.from_numpy(counts)

        def sort_into_bins(first: int, last: int) -> NDArray[np.int64]:
            bins = np.zeros(BINS, np.int64)
            thresholds.histogram_of_chunks(first, last, source, job, bins)
            return bins

        counts = count(job.tau_bits)
        if int(counts.sum()) <= plan.k:
            return ThresholdCounts(counts, job.tau_bits)
        bins = torch.from_numpy(np.sum(run(shares, sort_into_bins), axis=0))
        raised = raise_threshold(bins, job.tau_bits, plan.k)
        return ThresholdCounts(fill_up(count(raised.low), count(raised.high), plan.k), raised.low)

    def encode_tensor_(self, x: Tensor, words: Tensor, encoding: TensorEncoding, state: TensorState) -> bool:
        plan, layout, sample_key, threshold = encoding
        return CpuWriter(words, plan, layout, self._threads).encode_(x, sample_key, state, threshold)

    def read_counts(self, words: Tensor, plan: TensorPlan, start: int) -> Tensor | None:
        counts = np.empty(plan.chunks, np.int64)
        wrong = checking.read_counts(as_words(words)[start:], plan.chunk_numel.bit_length(), plan.chunk_numel, counts)
        return None if wrong else torch.from_numpy(counts)

    def find_problem(self, words: Tensor, payload: Payload, plan: TensorPlan) -> Problem:
        return CpuReader(words, [payload], plan, self._threads).find_problem()

    def decode_tensor_(
        self,
        words: Tensor,
        payloads: Sequence[Payload],
        plan: TensorPlan,
        sample_key: SampleKey,
        average: Average,
        out: Tensor,
    ) -> None:
        CpuReader(words, payloads, plan, self._threads).decode_(sample_key, average, out)

    def checksum(self, words: Tensor) -> int:
        source, first = as_words(words), CHECKSUM_WORD + 1
        shares = cut_up(source.size - first, source.size, self._threads)
        parts = run(
            shares, lambda begin, end: checking.add_checksum(source[first + begin : first + end], first + begin)
        )
        return int(sum(parts) + checking.add_checksum(source[:CHECKSUM_WORD], 0)) % (1 << 32)

    def mix_(
        self, x: Tensor, self_weight: float, others: Sequence[Tensor], weights: Sequence[float], out: Tensor
    ) -> Tensor:
        shares = cut_up(x.numel(), x.numel(), self._threads, _LINE)
        return torch.tensor(sum(run(shares, mixer_of(x, self_weight, others, weights, out))), dtype=torch.float64)
