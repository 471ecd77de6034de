"""The CPU's kernel set: numba's loops, over as many threads as torch was given."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flexcomm.kernels.butterflies import plan_dct, plan_inverse_dct
from flexcomm.kernels.cpu import passes
from flexcomm.kernels.cpu.records import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    Coding,
    Job,
    Memory,
    Source,
    Target,
    Transform,
    Words,
)
from flexcomm.kernels.plan import NO_DRAW, Selection
from flexcomm.kernels.protocol import LARGEST_MAGNITUDE, Average, Fault, Momentum, Payload, Survey

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
_NO_FLOATS = np.empty((0, 0), np.float32)
_NO_LONGS = np.empty((0, 0), np.int64)
_BINS = 1 << 15
_KINDS = {torch.float32: FLOAT32, torch.float64: FLOAT64, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


class CpuKernels:
    """Loops compiled by numba. ``threads`` is torch's number unless given; the bits do not depend on it."""

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def is_fit(self, x: Tensor) -> bool:
        if x.numel() == 0:
            return True
        bits, mask, limit = _magnitude_bits(x.contiguous())
        shares = self._share(bits.size, bits.size, 1)
        largest = max(self._run(shares, lambda first, last: passes.largest_bits(bits[first:last], mask)))
        return bool(largest < limit)

    def survey(self, x: Tensor, plan: TensorPlan, momentum: Momentum) -> Survey:
        job, source, shares = _job(plan), _source(x.contiguous(), plan, momentum), self._shares(plan)

        def count(tau_bits: int) -> NDArray[np.int64]:
            counts, asked = np.empty(plan.chunks, np.int64), job._replace(tau_bits=tau_bits)
            self._run(shares, lambda first, last: passes.survey_chunks(first, last, source, asked, counts))
            return counts

        def bins(first: int, last: int) -> NDArray[np.int64]:
            found = np.zeros(_BINS, np.int64)
            passes.histogram_of_chunks(first, last, source, job, found)
            return found

        tau_bits = job.tau_bits
        counts = count(tau_bits)
        if counts.sum() > plan.keep:
            tau_bits = _raised_threshold(np.sum(self._run(shares, bins), axis=0), plan.keep, tau_bits)
            counts = count(tau_bits)
        return Survey(torch.from_numpy(counts), tau_bits)

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
        job, source, target = _job(plan, draw), _source(x.contiguous(), plan, momentum), _words(words)
        next_state, coding, before = _floats(momentum.next_state), _coding(layout), _NO_LONGS
        if survey is not None:
            counts = survey.counts.numpy()
            job, before = job._replace(tau_bits=survey.tau_bits), _before([counts])
            passes.write_counts(target[layout.counts :], counts, plan.chunk_numel.bit_length())
        pieces: list[_Piece] = []

        def encode(first: int, last: int) -> int:
            # Shares of a variable payload may meet inside a word: each fills words of its own, joined afterwards.
            begin, end = (_bits_before(before, chunk, job, coding) for chunk in (first, last))
            own = survey is not None
            indices = _Piece(target[layout.indices :], begin[0], end[0], own=own)
            values = _Piece(target[layout.values :], begin[1], end[1], own=own)
            pieces.extend((indices, values))
            scales = target[layout.scales :].view(np.uint16)
            place = Target(indices.words, indices.origin, scales, _views(values.words), values.origin)
            return int(passes.encode_chunks(first, last, source, next_state, job, coding, before, place))

        broken = sum(self._run(self._shares(plan), encode))
        for piece in pieces:
            piece.join_()
        return bool(broken == 0)

    def read_counts(self, words: Tensor, plan: TensorPlan, start: int) -> Tensor | None:
        counts = np.empty(plan.chunks, np.int64)
        wrong = passes.read_counts(_words(words)[start:], plan.chunk_numel.bit_length(), plan.chunk_numel, counts)
        return None if wrong else torch.from_numpy(counts)

    def find_fault(self, words: Tensor, payload: Payload, plan: TensorPlan) -> Fault:
        if plan.chunks == 0:
            return Fault.NONE
        job, source, before = _job(plan), _views(_words(words)), _before_of([payload])
        sections, coding = np.array(_sections(payload), np.int64), _coding(payload.layout)
        faults = self._run(
            self._shares(plan),
            lambda first, last: passes.find_fault_in_chunks(first, last, job, coding, source, sections, before),
        )
        return next((Fault(fault) for fault in faults if fault), Fault.NONE)

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
        job, target = _job(plan, draw), _target(dense, plan)
        source, before = _views(_words(words)), _before_of(payloads)
        sections = np.array([_sections(payload) for payload in payloads], np.int64)
        by_contributors = int(average == "contributors")
        self._run(
            self._shares(plan),
            lambda first, last: passes.decode_chunks(
                first, last, target, job, source, sections, before, by_contributors
            ),
        )
        if dense is not out:
            out.copy_(dense)

    def checksum(self, words: Tensor, first: int) -> int:
        source = _words(words)
        shares = self._share(source.size, source.size, 1)
        parts = self._run(shares, lambda begin, end: passes.add_checksum(source[begin:end], first + begin))
        return int(sum(parts)) % (1 << 32)

    def _shares(self, plan: TensorPlan) -> list[tuple[int, int]]:
        return self._share(plan.chunks, plan.chunks * plan.chunk_numel, _CHUNKS_PER_WORD)

    def _share(self, count: int, work: int, multiple: int) -> list[tuple[int, int]]:
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
    """Words one share of a payload fills: the payload's own, or a copy's, to be joined with its neighbours'."""

    def __init__(self, target: NDArray[np.uint32], first_bit: int, last_bit: int, *, own: bool) -> None:
        self._target, self._first = target, first_bit >> 5
        self._own = own
        self.origin = self._first << 5 if own else 0
        self.words = np.zeros((last_bit + 31 >> 5) - self._first, np.uint32) if own else target

    def join_(self) -> None:
        if self._own:
            self._target[self._first : self._first + self.words.size] |= self.words


@lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:  # noqa: ARG001  (a forked child has the object but not its threads)
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="flexcomm-kernels")


def _memory(x: Tensor) -> Memory:
    """Return a contiguous tensor's elements as the loops take them."""
    flat = x.detach().view(-1)
    empty = Memory(_KINDS[x.dtype], np.empty(0, np.float32), np.empty(0, np.float64), np.empty(0, np.uint16))
    if x.dtype == torch.float32:
        return empty._replace(floats=flat.numpy())
    if x.dtype == torch.float64:
        return empty._replace(doubles=flat.numpy())
    return empty._replace(halves=flat.view(torch.uint16).numpy())


def _magnitude_bits(x: Tensor) -> tuple[NDArray[Any], int, int]:
    """Return the elements as integers, the mask that takes off the sign, and the first magnitude that is unfit."""
    limit = torch.tensor(LARGEST_MAGNITUDE, dtype=x.dtype)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    mask = (1 << (8 * x.element_size() - 1)) - 1
    return x.detach().view(-1).view(integers).numpy(), mask, int(limit.view(integers))


def _floats(state: Tensor | None) -> NDArray[np.float32]:
    return _NO_FLOATS if state is None else state.numpy()


def _words(words: Tensor) -> NDArray[np.uint32]:
    return words.numpy().view(np.uint32)


def _views(words: NDArray[np.uint32]) -> Words:
    return Words(words, words.view(np.uint16), words.view(np.int8))


def _job(plan: TensorPlan, draw: Draw = NO_DRAW) -> Job:
    whole = plan.keep == plan.chunk_numel and not plan.is_variable
    return Job(
        rows=plan.rows,
        cols=plan.cols,
        chunk_rows=plan.chunk_rows,
        chunk_cols=plan.chunk_cols,
        grid_cols=plan.grid_cols,
        chunk_numel=plan.chunk_numel,
        transformed=int(plan.transformed),
        selection=int(Selection.EVERYTHING if whole else plan.selection),
        keep=plan.keep,
        tau_bits=int(np.float32(plan.tau).view(np.int32)),
        values=int(plan.values),
        value_bits=plan.values.bits,
        scales=plan.values.scales,
        key=draw.key,
        start=draw.start,
    )


def _source(x: Tensor, plan: TensorPlan, momentum: Momentum) -> Source:
    """Return what the loops read, with the lists of operations down the columns of a chunk and along its rows."""
    height, width = (plan.chunk_rows, plan.chunk_cols) if plan.transformed else (1, 1)
    factor = np.float32(momentum.gain / math.sqrt(plan.chunk_numel) if plan.transformed else momentum.gain)
    return Source(
        memory=_memory(x),
        state=_floats(momentum.state),
        decay=np.float32(momentum.decay),
        factor=factor,
        down=_transform(height, inverse=False),
        along=_transform(width, inverse=False),
    )


def _target(out: Tensor, plan: TensorPlan) -> Source:
    """Return what the loops write, with the lists that lead back."""
    there = _source(out, plan, Momentum())
    height, width = (plan.chunk_rows, plan.chunk_cols) if plan.transformed else (1, 1)
    return there._replace(down=_transform(height, inverse=True), along=_transform(width, inverse=True))


@lru_cache(maxsize=64)
def _transform(length: int, *, inverse: bool) -> Transform:
    program = plan_inverse_dct(length) if inverse else plan_dct(length)
    return Transform(program.height, program.inputs, program.outputs, program.steps, program.factors)


def _raised_threshold(bins: NDArray[np.int64], keep: int, tau_bits: int) -> int:
    """Return the lowest bin's edge above the threshold that at most ``keep`` magnitudes reach."""
    reaching = np.cumsum(bins[::-1])[::-1]
    first = (tau_bits >> 16) + 1
    fitting = np.flatnonzero(reaching[first:] <= keep)
    return (first + int(fitting[0])) << 16


def _before(counts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return how many entries precede each chunk ``[senders, chunks + 1]``."""
    return np.stack([np.concatenate(([0], np.cumsum(one))) for one in counts])


def _before_of(payloads: Sequence[Payload]) -> NDArray[np.int64]:
    counts = [payload.counts.numpy() for payload in payloads if payload.counts is not None]
    return _before(counts) if counts else _NO_LONGS


def _bits_before(before: NDArray[np.int64], chunk: int, job: Job, coding: Coding) -> tuple[int, int]:
    """Return how many bits of indices and of values precede a chunk."""
    entries = int(before[0, chunk]) if before.size else chunk * job.keep
    return entries * coding.entry_bits + chunk * coding.chunk_bits, entries * job.value_bits


def _coding(layout: Layout) -> Coding:
    return Coding(int(layout.code), layout.low_bits, layout.entry_bits, layout.chunk_bits)


def _sections(payload: Payload) -> tuple[int, ...]:
    """Return where indices, scales and values begin, and how the indices are written: payloads differ in that, too."""
    layout, start = payload.layout, payload.start
    return start + layout.indices, start + layout.scales, start + layout.values, *_coding(layout)
