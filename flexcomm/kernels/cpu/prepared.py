"""Writers and readers of payloads: what the loops are told of memory that stays the same is made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from flexcomm.kernels.base import Average, Problem
from flexcomm.kernels.cpu import checking, decoding, encoding
from flexcomm.kernels.cpu.arguments import (
    NO_COUNTS,
    as_floats,
    as_words,
    before_of,
    bits_before,
    coding_of,
    prepare_plan,
    sections_of,
    source_of,
    target_of,
    views_of,
    with_key,
)
from flexcomm.kernels.cpu.records import Target
from flexcomm.kernels.cpu.shares import cut_up, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from flexcomm.kernels.cpu.records import Job, Source
    from flexcomm.kernels.layout import Layout
    from flexcomm.kernels.per_tensor import Payload, TensorState, ThresholdCounts
    from flexcomm.kernels.plan import SampleKey, TensorPlan

__all__ = ["CpuReader", "CpuWriter"]

_CHUNKS_PER_WORD = 32
"""So many chunks end at a word, whatever their number of bits: threads that begin there share no word."""


class CpuWriter:
    """A payload's place."""

    def __init__(self, words: Tensor, plan: TensorPlan, layout: Layout, threads: int | None) -> None:
        self._plan, self._threads = plan, threads
        self._prepared, self._coding = prepare_plan(plan), coding_of(layout)
        self._words = as_words(words)
        scales, values = self._words[layout.scales :].view(np.uint16), views_of(self._words[layout.values :])
        self._target = Target(self._words[layout.indices :], 0, scales, values, 0)

    def encode_(
        self, x: Tensor, sample_key: SampleKey, state: TensorState, threshold: ThresholdCounts | None = None
    ) -> bool:
        self._words.fill(0)
        plan = self._plan
        if plan.chunks == 0:
            return True
        job = with_key(self._prepared.job, sample_key)
        source, next_state = source_of(x.contiguous(), plan, state, self._prepared), as_floats(state.state_out)
        if threshold is not None:
            return self._encode_variable_(source, next_state, job._replace(tau_bits=threshold.tau_bits), threshold)
        broken = run(
            self._shares(),
            lambda first, last: encoding.encode_chunks(
                first, last, source, next_state, job, self._coding, NO_COUNTS, self._target
            ),
        )
        return not any(broken)

    def _encode_variable_(
        self, source: Source, next_state: NDArray[np.float32], job: Job, threshold: ThresholdCounts
    ) -> bool:
        target, coding, before = self._target, self._coding, before_of([threshold.counts])
        ranges: list[_WordRange] = []

        def encode(first: int, last: int) -> int:
            begin, end = (bits_before(before, chunk, job, coding) for chunk in (first, last))
            indices = _WordRange(target.indices, begin[0], end[0])
            values = _WordRange(target.values.full, begin[1], end[1])
            ranges.extend((indices, values))
            mine = Target(indices.words, indices.origin, target.scales, views_of(values.words), values.origin)
            return int(encoding.encode_chunks(first, last, source, next_state, job, coding, before, mine))

        encoding.write_counts(self._words, threshold.counts.numpy(), self._plan.chunk_numel.bit_length())
        broken = run(self._shares(), encode)
        for piece in ranges:
            piece.join_()
        return not any(broken)

    def _shares(self) -> list[tuple[int, int]]:
        chunks = self._plan.chunks
        return cut_up(chunks, chunks * self._plan.chunk_numel, self._threads, _CHUNKS_PER_WORD)


class _WordRange:
    """Words for one share of a variable payload, which may meet its neighbours' inside a word; joined afterwards."""

    def __init__(self, target: NDArray[np.uint32], first_bit: int, last_bit: int) -> None:
        self._target, self._first = target, first_bit >> 5
        self.origin = self._first << 5
        self.words = np.zeros((last_bit + 31 >> 5) - self._first, np.uint32)

    def join_(self) -> None:
        self._target[self._first : self._first + self.words.size] |= self.words


class CpuReader:
    """The places of the payloads that several senders sent of one tensor."""

    def __init__(self, words: Tensor, payloads: Sequence[Payload], plan: TensorPlan, threads: int | None) -> None:
        self._plan, self._threads, self._prepared = plan, threads, prepare_plan(plan)
        self._words = views_of(as_words(words))
        self._sections = np.array([sections_of(payload) for payload in payloads], np.int64)
        counts = [payload.counts for payload in payloads if payload.counts is not None]
        self._before = before_of(counts) if plan.is_variable else NO_COUNTS

    def find_problem(self) -> Problem:
        if self._plan.chunks == 0:
            return Problem.NONE
        errors = run(
            self._shares(),
            lambda first, last: checking.find_error_in_payloads(
                first, last, self._prepared.job, self._words, self._sections, self._before
            ),
        )
        # The loop counts the problems of a payload from 1 on.
        return Problem(Problem.INDEX - 1 + min(error for error in errors if error)) if any(errors) else Problem.NONE

    def decode_(self, sample_key: SampleKey, average: Average, out: Tensor) -> None:
        if self._plan.chunks == 0:
            return
        dense = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        job, target = with_key(self._prepared.job, sample_key), target_of(dense, self._plan, self._prepared)
        by_contributors = int(average == "contributors")
        run(
            self._shares(),
            lambda first, last: decoding.decode_chunks(
                first, last, target, job, self._words, self._sections, self._before, by_contributors
            ),
        )
        if dense is not out:
            out.copy_(dense)

    def _shares(self) -> list[tuple[int, int]]:
        return cut_up(self._plan.chunks, self._plan.chunks * self._plan.chunk_numel, self._threads)
