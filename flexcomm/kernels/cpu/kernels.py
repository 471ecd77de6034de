"""The CPU's kernel set: numba's loops, over as many threads as torch was given."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flexcomm.kernels.counting import BINS, fill_up, raise_threshold
from flexcomm.kernels.cpu import checking, decoding, encoding, surveying
from flexcomm.kernels.cpu.arguments import (
    NO_COUNTS,
    as_floats,
    as_words,
    before_of,
    bits_before,
    coding_of,
    job_of,
    magnitude_bits,
    sections_of,
    source_of,
    target_of,
    views_of,
)
from flexcomm.kernels.cpu.coefficients import MAGNITUDE
from flexcomm.kernels.cpu.records import Target
from flexcomm.kernels.protocol import Average, Fault, Momentum, Payload, Survey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from flexcomm.kernels.plan import Draw, Layout, TensorPlan

__all__ = ["CpuKernels"]

_SMALLEST_SHARE = 1 << 16
"""Elements below which a second thread costs more than it saves."""
_CHUNKS_PER_WORD = 32
"""So many chunks end at a word, whatever their number of bits: threads that begin there share no word."""


class CpuKernels:
    """Loops compiled by numba. ``threads`` is torch's number unless given; the bits do not depend on it."""

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def is_fit(self, x: Tensor) -> bool:
        if x.numel() == 0:
            return True
        bits, mask, limit = magnitude_bits(x.contiguous())
        shares = self._share(bits.size, bits.size)
        largest = max(self._run(shares, lambda first, last: checking.largest_bits(bits[first:last], mask)))
        return bool(largest < limit)

    def survey(self, x: Tensor, plan: TensorPlan, momentum: Momentum) -> Survey:
        job, source, shares = job_of(plan), source_of(x.contiguous(), plan, momentum), self._share_chunks(plan)

        def count(bound: int) -> Tensor:
            counts = np.zeros(plan.chunks, np.int64)
            if bound <= MAGNITUDE:
                self._run(
                    shares,
                    lambda first, last: surveying.count_reaching_in_chunks(first, last, source, job, bound, counts),
                )
            return torch.from_numpy(counts)

        def sort_into_bins(first: int, last: int) -> NDArray[np.int64]:
            bins = np.zeros(BINS, np.int64)
            surveying.histogram_of_chunks(first, last, source, job, bins)
            return bins

        counts = count(job.tau_bits)
        if int(counts.sum()) <= plan.keep:
            return Survey(counts, job.tau_bits)
        bins = torch.from_numpy(np.sum(self._run(shares, sort_into_bins), axis=0))
        raised = raise_threshold(bins, job.tau_bits, plan.keep)
        return Survey(fill_up(count(raised.low), count(raised.high), plan.keep), raised.low)

    def encode_(
        self,
        x: Tensor,
        words: Tensor,
        plan: TensorPlan,
        layout: Layout,
        draw: Draw,
        momentum: Momentum,
        survey: Survey | None = None,
    ) -> bool:
        words.zero_()
        if plan.chunks == 0:
            return True
        job, source, payload = job_of(plan, draw), source_of(x.contiguous(), plan, momentum), as_words(words)
        next_state, coding, before = as_floats(momentum.next_state), coding_of(layout), NO_COUNTS
        indices, values = payload[layout.indices :], payload[layout.values :]
        whole = Target(indices, 0, payload[layout.scales :].view(np.uint16), views_of(values), 0)
        pieces: list[_Piece] = []

        def encode(first: int, last: int) -> int:
            target = whole
            if survey is not None:
                begin, end = (bits_before(before, chunk, job, coding) for chunk in (first, last))
                mine = _Piece(indices, begin[0], end[0]), _Piece(values, begin[1], end[1])
                pieces.extend(mine)
                target = Target(mine[0].words, mine[0].origin, whole.scales, views_of(mine[1].words), mine[1].origin)
            return int(encoding.encode_chunks(first, last, source, next_state, job, coding, before, target))

        if survey is not None:
            job, before = job._replace(tau_bits=survey.tau_bits), before_of([survey.counts])
            encoding.write_counts(payload, survey.counts.numpy(), plan.chunk_numel.bit_length())
        broken = sum(self._run(self._share_chunks(plan, _CHUNKS_PER_WORD), encode))
        for piece in pieces:
            piece.join_()
        return bool(broken == 0)

    def read_counts(self, words: Tensor, plan: TensorPlan, start: int) -> Tensor | None:
        counts = np.empty(plan.chunks, np.int64)
        wrong = checking.read_counts(as_words(words)[start:], plan.chunk_numel.bit_length(), plan.chunk_numel, counts)
        return None if wrong else torch.from_numpy(counts)

    def find_fault(self, words: Tensor, payload: Payload, plan: TensorPlan) -> Fault:
        if plan.chunks == 0:
            return Fault.NONE
        job, source, before = job_of(plan), views_of(as_words(words)), _before_of([payload])
        sections, coding = np.array(sections_of(payload), np.int64), coding_of(payload.layout)
        faults = self._run(
            self._share_chunks(plan),
            lambda first, last: checking.find_fault_in_chunks(first, last, job, coding, source, sections, before),
        )
        return Fault(min((fault for fault in faults if fault), default=Fault.NONE))

    def decode_(
        self,
        words: Tensor,
        payloads: Sequence[Payload],
        plan: TensorPlan,
        draw: Draw,
        average: Average,
        out: Tensor,
    ) -> None:
        if plan.chunks == 0:
            return
        dense = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        job, target = job_of(plan, draw), target_of(dense, plan)
        source, before = views_of(as_words(words)), _before_of(payloads)
        sections = np.array([sections_of(payload) for payload in payloads], np.int64)
        by_contributors = int(average == "contributors")
        self._run(
            self._share_chunks(plan),
            lambda first, last: decoding.decode_chunks(
                first, last, target, job, source, sections, before, by_contributors
            ),
        )
        if dense is not out:
            out.copy_(dense)

    def checksum(self, words: Tensor, first: int) -> int:
        source = as_words(words)
        shares = self._share(source.size, source.size)
        parts = self._run(shares, lambda begin, end: checking.add_checksum(source[begin:end], first + begin))
        return int(sum(parts)) % (1 << 32)

    def _share_chunks(self, plan: TensorPlan, multiple: int = 1) -> list[tuple[int, int]]:
        return self._share(plan.chunks, plan.chunks * plan.chunk_numel, multiple)

    def _share(self, count: int, work: int, multiple: int = 1) -> list[tuple[int, int]]:
        """Cut ``range(count)`` into one part per thread, each a multiple long and worth a thread's while."""
        threads = torch.get_num_threads() if self._threads is None else self._threads
        parts = max(1, min(threads, work // _SMALLEST_SHARE))
        length = max(1, -(-count // (parts * multiple))) * multiple
        return [(first, min(first + length, count)) for first in range(0, count, length)]

    @staticmethod
    def _run(shares: list[tuple[int, int]], work: Callable[[int, int], Any]) -> list[Any]:
        """Do the shares, the first one here; the answers in order."""
        others = [_pool(os.getpid()).submit(work, first, last) for first, last in shares[1:]]
        return [work(*share) for share in shares[:1]] + [other.result() for other in others]


class _Piece:
    """Words for one share of a variable payload, which may meet its neighbours' inside a word; joined afterwards."""

    def __init__(self, target: NDArray[np.uint32], first_bit: int, last_bit: int) -> None:
        self._target, self._first = target, first_bit >> 5
        self.origin = self._first << 5
        self.words = np.zeros((last_bit + 31 >> 5) - self._first, np.uint32)

    def join_(self) -> None:
        self._target[self._first : self._first + self.words.size] |= self.words


@lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:  # noqa: ARG001  (a forked child has the object but not its threads)
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="flexcomm-kernels")


def _before_of(payloads: Sequence[Payload]) -> NDArray[np.int64]:
    return before_of([payload.counts for payload in payloads if payload.counts is not None])
