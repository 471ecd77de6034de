"""The CPU's kernel set: loops that numba compiles, stage by stage over blocks of chunks that stay in cache.

Tensors of other dtypes than float32 are converted before and after.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcomm.kernels.base import LARGEST_MAGNITUDE, Average, Problem, StateUpdate, Status
from flexcomm.kernels.cpu import checks, indices, selection, transform, values
from flexcomm.kernels.cpu import tables as t
from flexcomm.kernels.cpu.codelets import LENGTH
from flexcomm.kernels.cpu.groups import Group, plan_groups
from flexcomm.kernels.cpu.mixing import mixer_of
from flexcomm.kernels.layout import (
    HEADER_NWORDS,
    NONFINITE,
    WORD_NBYTES,
    BufferPlan,
    Header,
    IndexCode,
    Layout,
    Region,
    aligned,
    plan_layout,
)
from flexcomm.kernels.plan import BINS as HISTOGRAM_BINS
from flexcomm.kernels.plan import Selection, entries_before, fill_up, raise_threshold, threshold_bits

_SMALLEST_SHARE = 1 << 16
"""Elements below which a second thread costs more than it saves."""

_MAGNITUDE = 0x7FFFFFFF
_NO_LIMIT = _MAGNITUDE + 1
"""More than any magnitude, as bits: of tensors that have been checked."""
_SQUARE = LENGTH * LENGTH

T = TypeVar("T")


class CpuKernels:
    """Loops compiled by numba. ``threads`` is torch's number unless given; the bits do not depend on it."""

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def encoder(self, plan: BufferPlan, words: Tensor) -> CpuEncoder:
        return CpuEncoder(plan, words, self._threads)

    def decoder(
        self, plan: BufferPlan, words: Tensor, regions: Sequence[Region], decoded_as: BufferPlan | None = None
    ) -> CpuDecoder:
        return CpuDecoder(plan, words, regions, decoded_as or plan, self._threads)

    def mix_(
        self, x: Tensor, self_weight: float, others: Sequence[Tensor], weights: Sequence[float], out: Tensor
    ) -> Tensor:
        terms = [term for term in zip((x, *others), (self_weight, *weights), strict=True) if term[1] != 0.0]
        shares = share(x.numel(), x.numel(), self._threads, multiple=_LINE)
        return torch.tensor(sum(run_shares(shares, mixer_of(x, terms, out))), dtype=torch.float64)


_LINE = 32
"""Elements of the smallest dtype in a line of cache: threads that begin there share none."""


class CpuEncoder:
    """A :class:`flexcomm.kernels.base.BucketEncoder`."""

    def __init__(self, plan: BufferPlan, words: Tensor, threads: int | None) -> None:
        self._plan, self._threads = plan, threads
        self._words = words.numpy().view(np.uint32)
        self._groups = plan_groups(plan, plan)
        self._has_doubles = any(spec.dtype is torch.float64 for spec in plan.specs)
        for group in self._groups:
            group.job[t.WORDS], group.job[t.NWORDS] = self._words.ctypes.data, self._words.size

    def encode_(
        self,
        tensors: Sequence[Tensor],
        states: Sequence[Tensor] | None,
        states_out: Sequence[Tensor] | None,
        update: StateUpdate,
        *,
        step: int,
        sequence: int,
    ) -> int:
        plan, keys = self._plan, self._plan.sample_keys(step) if self._plan.has_keys else []
        inputs = [x if x.dtype is torch.float32 and x.is_contiguous() else _as_floats(x) for x in tensors]
        # Found before anything is written: a state that is updated in place could not be restored. And what is finite
        # as a float64 may not be so as a float32.
        is_checked = self._has_doubles or _share_memory(states, states_out)
        if is_checked and (problem := _first_nonfinite(tensors)).word:
            self.mark_nonfinite_(step=step, sequence=sequence)
            return problem.word
        self._words.fill(0)
        bits = np.array([update.decay, 1.0 - update.alpha], np.float32).view(np.uint32)
        for group in self._groups:
            group.set_inputs(inputs, update.gain, keys)
            group.job[t.DECAY], group.job[t.STAYS] = bits
            group.job[t.LIMIT] = _NO_LIMIT if is_checked else transform.LIMIT
            if states is not None and states_out is not None:
                group.set_addresses(t.STATE, states)
                group.set_addresses(t.STATE_OUT, states_out)
            else:
                group.table[:, t.STATE : t.STATE_OUT + 1] = 0
        entries, nwords, problems = plan.entries, plan.nwords, Problems()
        if plan.is_variable:
            entries, nwords, problems = self._encode_variable_()
        for group in self._groups:
            if not group.plan.is_variable:
                for found in run(group, self._threads, partial(_encode_blocks, group)):
                    problems += found
        if problems:
            self.mark_nonfinite_(step=step, sequence=sequence)
            return _first_of(problems, tensors).word
        _write_header(self._words, Header(plan.digest, step, sequence, entries), nwords)
        return 0

    def mark_nonfinite_(self, *, step: int, sequence: int) -> None:
        nwords = HEADER_NWORDS if self._plan.variable_length else self._plan.nwords
        self._words[:nwords] = 0
        _write_header(self._words, Header(self._plan.digest, step, sequence, 0, NONFINITE), nwords)

    def _encode_variable_(self) -> tuple[int, int, Problems]:
        """Write the payloads whose number of entries depends on the data, and find places for the others.

        Returns how many entries there are in all, how long the buffer is, and what is wrong.
        """
        groups = {number: group for group in self._groups for number in group.numbers}
        variable = {number: _Variable(group) for number, group in groups.items() if group.plan.is_variable}
        problems = [problem for one in variable.values() for problem in one.find_threshold(self._threads)]
        position, entries = HEADER_NWORDS, 0
        for number, (plan, layout) in enumerate(zip(self._plan.plans, self._plan.layouts, strict=True)):
            sent = variable[number].entries if number in variable else plan.entries
            found = plan_layout(plan, sent) if plan.variable_length else layout
            groups[number].place(number, found, position)
            position, entries = position + found.nwords, entries + sent
        if not problems:
            problems = [problem for one in variable.values() for problem in one.encode_(self._words)]
        return entries, aligned(position), problems


Problems = list[tuple[Problem, int]]
"""What is wrong, and with which tensor."""


def _encode_blocks(group: Group, begin: int, end: int) -> Problems:
    """Encode some blocks of a group, each stage by stage."""
    problems: Problems = []
    table, k, most = group.table, group.plan.k, group.block_chunks
    numel = 0 if table[0, t.STATE_OUT] else most * group.plan.chunk_numel
    scratch = _scratch.get(numel, group.tile_numel, most * group.tops, group.memory_numel, most * k, 1)
    job = scratch.start(group.job)
    for first, last in group.blocks[begin:end]:
        job[t.FIRST], job[t.LAST], scratch.origins[0] = first, last, first * k
        nonfinite = group.accumulate(table, job)
        if nonfinite:
            problems.append((Problem.NONFINITE, group.numbers[nonfinite - 1]))
            continue
        if group.selection is not Selection.EVERYTHING:
            selection.PICKERS[group.selection](table, job)
        problems += _put(group, job)
    return problems


def _put(group: Group, job: NDArray[np.int64]) -> Problems:
    """Write the indices and values of what was picked."""
    if group.code is not IndexCode.NONE:
        indices.put_indices(group.table, job)
    wrong = (values.put_scaled if group.plan.values.format.scales else values.put_floats)(group.table, job)
    return [(Problem.STATE, group.numbers[wrong - 1])] if wrong else []


def _first_of(problems: Problems, tensors: Sequence[Tensor]) -> Status:
    """Return the status of several problems: nonfinite tensors come first, whichever were found."""
    if any(problem is Problem.NONFINITE for problem, _ in problems):
        return _first_nonfinite(tensors)
    return Status(Problem.STATE, tensor=min(number for _, number in problems))


class _Variable:
    """One tensor whose number of entries depends on the data, while it is encoded."""

    def __init__(self, group: Group) -> None:
        self._group, self._before = group, np.zeros(group.chunks + 1, np.int64)
        self._coefs = np.empty(0 if group.table[0, t.STATE_OUT] else group.numel, np.float32)
        if self._coefs.size:
            group.table[0, t.STATE_OUT] = self._coefs.ctypes.data

    @property
    def entries(self) -> int:
        return int(self._before[-1])

    def find_threshold(self, threads: int | None) -> Problems:
        """Fill in the coefficients, and decide how many of each chunk are sent."""
        group, plan = self._group, self._group.plan

        def accumulate(begin: int, end: int) -> bool:
            job = _scratch.get(0, group.tile_numel, group.block_chunks * group.tops, 0, 0, 1).start(group.job)
            wrong = False
            for job[t.FIRST], job[t.LAST] in group.blocks[begin:end]:
                wrong |= bool(group.accumulate(group.table, job))
            return wrong

        def count(bound: int) -> Tensor:
            counts = np.zeros(group.chunks, np.int64)
            if bound <= _MAGNITUDE:
                selection.count_reaching(group.table, group.job, bound, counts)
            return torch.from_numpy(counts)

        if any(run(group, threads, accumulate)):
            return [(Problem.NONFINITE, group.numbers[0])]
        tau_bits = threshold_bits(plan.tau)
        counts = count(tau_bits)
        if int(counts.sum()) > plan.k:
            bins = np.zeros(HISTOGRAM_BINS, np.int64)
            selection.fill_histogram(group.table, group.job, bins)
            raised = raise_threshold(torch.from_numpy(bins), tau_bits, plan.k)
            counts, tau_bits = fill_up(count(raised.low), count(raised.high), plan.k), raised.low
        group.table[0, t.TAU_BITS] = tau_bits
        self._before[:] = entries_before(counts).numpy()
        return []

    def encode_(self, words: NDArray[np.uint32]) -> Problems:
        """Write the payload, at the place that the table says."""
        group, width = self._group, self._group.plan.chunk_numel.bit_length()
        # The counts come first, right before the indices.
        begin = int(group.table[0, t.INDICES]) - -(-group.chunks * width // 32)
        indices.write_counts(words[begin:], np.diff(self._before), width)
        scratch = _scratch.get(0, group.tile_numel, 0, group.memory_numel, self.entries, 1)
        job, scratch.origins[0] = scratch.start(group.job), 0
        job[t.FIRST], job[t.LAST] = 0, group.chunks
        job[t.BEFORE], job[t.BEFORE_PITCH] = self._before.ctypes.data, self._before.size
        selection.pick_above(group.table, job)
        return _put(group, job)


class CpuDecoder:
    """A :class:`flexcomm.kernels.base.BucketDecoder`."""

    def __init__(
        self,
        plan: BufferPlan,
        words: Tensor,
        regions: Sequence[Region],
        decoded_as: BufferPlan,
        threads: int | None,
    ) -> None:
        self._plan, self._decoded_as, self._threads = plan, decoded_as, threads
        self._words = words.numpy().view(np.uint32)
        self._regions = np.array([region[1:] for region in regions], np.int64)
        self._groups = plan_groups(plan, decoded_as)
        self._received = [_Received(group, self._regions[:, 0].tolist(), self._words) for group in self._groups]

    def verify(self, *, step: int, sequence: int) -> int:
        plan = self._plan
        expected = Header(plan.digest, step, sequence, max(plan.entries, 0))
        header = np.frombuffer(expected.pack(0), np.uint32)
        found = int(checks.check_headers(self._words, self._regions, header, int(plan.is_variable)))
        if found:
            return Status(Problem.NONFINITE if found % 2 else Problem.HEADER, found // 2 - 1).word
        for sender in range(len(self._regions)):
            problem = self._find_payloads(sender) if plan.is_variable else Status()
            if problem.word:
                return problem.word
            problems = [problem for received in self._received for problem in received.check(sender)]
            if problems:
                number, kind = min(problems)
                return Status(kind, sender, number).word
        return 0

    def decode_(self, outputs: Sequence[Tensor], *, step: int, average: Average) -> None:
        keys = self._decoded_as.sample_keys(step) if self._decoded_as.has_keys else []
        filled = [
            out
            if out.dtype is torch.float32 and out.is_contiguous()
            else torch.empty(out.shape, dtype=torch.float32, device="cpu")
            for out in outputs
        ]
        for group, received in zip(self._groups, self._received, strict=True):
            group.set_inputs(filled, 1.0, keys)
            run(group, self._threads, partial(received.decode_blocks_, average == "contributors"))
        for out, here in zip(outputs, filled, strict=True):
            if here is not out:
                out.copy_(here)

    def _find_payloads(self, sender: int) -> Status:
        """Find the payloads of a buffer whose contents vary, and check their counts."""
        start, nwords = self._regions[sender].tolist()
        position, entries = HEADER_NWORDS, 0
        places = {number: one for one in self._received for number in one.group.numbers}
        for number, (plan, full) in enumerate(zip(self._plan.plans, self._plan.layouts, strict=True)):
            sent, layout = plan.entries, full
            if plan.is_variable:
                least = plan_layout(plan, 0) if plan.variable_length else full
                if position + least.nwords > nwords:
                    return Status(Problem.LENGTH, sender, number)
                counts, width = np.empty(plan.chunks, np.int64), plan.chunk_numel.bit_length()
                largest = indices.read_counts(self._words[start + position :], width, counts)
                sent = int(counts.sum())
                if largest > plan.chunk_numel or sent > plan.k:
                    return Status(Problem.COUNTS, sender, number)
                places[number].set_counts(sender, counts)
                layout = plan_layout(plan, sent) if plan.variable_length else full
            if position + layout.nwords > nwords:
                return Status(Problem.LENGTH, sender, number if plan.is_variable else 0)
            if self._plan.variable_length:
                places[number].place(sender, number, layout, position)
            position, entries = position + layout.nwords, entries + sent
        if aligned(position) != nwords:
            return Status(Problem.LENGTH, sender)
        announced = int(self._words[start + 8]) | int(self._words[start + 9]) << 32
        return Status() if entries == announced else Status(Problem.ENTRIES, sender)


class _Received:
    """What several senders sent of the tensors of a group.

    Indices are unpacked when they are checked. Where payloads are of variable length, ``tables`` says of each sender
    where they are, and ``codes`` how its indices are written.
    """

    def __init__(self, group: Group, starts: list[int], words: NDArray[np.uint32]) -> None:
        self.group, self._starts, self._zeros = group, starts, _zeros(len(starts))
        self._tables, self._codes = [group.table] * len(starts), [group.code] * len(starts)
        self._is_shared = group.code is IndexCode.NONE and not group.plan.is_variable
        entries = group.plan.k if group.plan.is_variable else group.chunks * group.plan.k
        self._picks = np.zeros((len(starts), 0 if self._is_shared else entries), np.int32)
        self._before = np.zeros((len(starts) if group.plan.is_variable else 0, group.chunks + 1), np.int64)
        job = group.inverse_job
        job[t.WORDS], job[t.NWORDS], job[t.SENDERS] = words.ctypes.data, words.size, len(starts)
        job[t.PICKS], job[t.PICK_PITCH], job[t.PICK_ORIGINS] = (
            self._picks.ctypes.data, self._picks.shape[1], self._zeros.ctypes.data,
        )  # fmt: skip
        if group.plan.is_variable:
            job[t.BEFORE], job[t.BEFORE_PITCH] = self._before.ctypes.data, self._before.shape[1]

    def set_counts(self, sender: int, counts: NDArray[np.int64]) -> None:
        np.cumsum(counts, out=self._before[sender, 1:])

    def place(self, sender: int, number: int, layout: Layout, position: int) -> None:
        """Fill in where a sender's payload of a tensor is."""
        self.group.place(number, layout, position)
        self._tables[sender], self._codes[sender] = self.group.table.copy(), layout.code

    def check(self, sender: int) -> list[tuple[int, Problem]]:
        """Return the tensors of a sender with wrong payloads, and what is wrong; unpack its indices."""
        group, form, table, problems = self.group, self.group.plan.values.format, self._tables[sender], []
        job = self._job_of(sender, group.inverse_job)
        job[t.LAST], job[t.CODE] = group.chunks, int(self._codes[sender])
        if self._codes[sender] is not IndexCode.NONE:
            wrong = indices.read_indices(table, job)
            problems = [(group.numbers[wrong - 1], Problem.INDEX)] if wrong else []
        if form.scales or form.nonfinite_mask:
            found = int(values.check_values(table, job, form.scales, form.bits, form.nonfinite_mask))
            problems += [(group.numbers[found >> 8], Problem(found & 0xFF))] if found else []
        return problems

    def _job_of(self, sender: int, job: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a job about one sender alone."""
        own = job.copy()
        own[t.BUFFER], own[t.PICKS] = self._starts[sender], job[t.PICKS] + 4 * sender * job[t.PICK_PITCH]
        if job[t.BEFORE]:
            own[t.BEFORE] = job[t.BEFORE] + 8 * sender * job[t.BEFORE_PITCH]
        return own

    def decode_blocks_(self, counted: bool, begin: int, end: int) -> None:
        """Write the averages of some blocks."""
        group, senders = self.group, len(self._starts)
        room = group.block_chunks * min(group.plan.k, group.plan.chunk_numel)
        is_drawn = self._is_shared and group.selection is not Selection.EVERYTHING
        scratch = _scratch.get(senders * room, group.tile_numel, 0, group.memory_numel, room, senders)
        job, origins, picks = scratch.start(group.inverse_job), scratch.origins, group.inverse_job[_PICKS]
        job[t.SENT], job[t.SENT_PITCH], job[t.COUNTED] = job[t.COEFS], room, int(counted and not self._is_shared)
        if is_drawn:
            job[t.PICK_PITCH] = 0
        else:
            job[_PICKS] = picks
        for first, last in group.blocks[begin:end]:
            job[t.FIRST], job[t.LAST] = first, last
            origins[:] = self._before[:, first] if group.plan.is_variable else first * group.plan.k
            for sender, table in enumerate(self._tables):
                own = self._job_of(sender, job) if senders > 1 else job
                own[t.BUFFER], own[t.SENT] = self._starts[sender], job[t.SENT] + 4 * sender * room
                own[t.ORIGINS] = job[t.ORIGINS] + 8 * sender
                values.get_values(table, own)
            if is_drawn:
                selection.PICKERS[group.selection](group.table, job)
            group.restore(group.table, job)


@lru_cache(maxsize=64)
def _zeros(count: int) -> NDArray[np.int64]:
    return np.zeros(count, np.int64)


def _share_memory(states: Sequence[Tensor] | None, states_out: Sequence[Tensor] | None) -> bool:
    """Return whether states are updated in place."""
    return bool(states and states_out) and states[0].data_ptr() == states_out[0].data_ptr()  # type: ignore[index]


def _as_floats(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32).contiguous()


def _first_nonfinite(tensors: Sequence[Tensor]) -> Status:
    for number, x in enumerate(tensors):
        if not bool((x.detach().abs() < LARGEST_MAGNITUDE).all()):
            return Status(Problem.NONFINITE, tensor=number)
    return Status()


def _write_header(words: NDArray[np.uint32], header: Header, nwords: int) -> None:
    octets = header.pack((nwords - HEADER_NWORDS) * WORD_NBYTES)
    checks.write_header(words[:nwords], np.frombuffer(octets, np.uint32))


# --- threads ----------------------------------------------------------------------------------------------------------


class Scratch:
    """Memory that loops work in, and a job that says where it is; ``origins`` are the first entries of a block."""

    def __init__(self, coefs: int, tiles: int, tops: int, memory: int, picks: int, senders: int) -> None:
        floats, ints = (coefs, tiles), (tops, memory, picks)
        # Torch's memory begins at a line of cache, numpy's need not. Not as inference tensors: it is used again.
        with torch.inference_mode(False):
            self._held = [torch.empty(numel, dtype=torch.float32, device="cpu") for numel in floats]
            self._held += [torch.empty(numel, dtype=torch.int32, device="cpu") for numel in ints]
            self.origins = torch.zeros(senders, dtype=torch.int64, device="cpu").numpy()
        self._addresses = np.array([one.data_ptr() for one in self._held] + [self.origins.ctypes.data] * 2, np.int64)
        self._job = np.empty(len(t.JOB), np.int64)

    def start(self, job: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a job that uses this memory; the one before is over."""
        self._job[:] = job
        self._job[_SCRATCH] = self._addresses
        return self._job


_SCRATCH = np.array([t.COEFS, t.TILES, t.TOPS, t.MEMORY, t.PICKS, t.ORIGINS, t.PICK_ORIGINS])
_PICKS = np.array([t.PICKS, t.PICK_PITCH, t.PICK_ORIGINS])


class _ScratchOfThread(threading.local):
    """Scratch memory of one thread, by size: that of a few groups is held."""

    def __init__(self) -> None:
        self.get = lru_cache(maxsize=_MOST_SCRATCH)(Scratch)


_MOST_SCRATCH = 4
_scratch = _ScratchOfThread()


def share(count: int, work: int, threads: int | None, multiple: int = 1) -> list[tuple[int, int]]:
    """Cut ``range(count)`` into one part per thread, each a multiple long and worth a thread's while.

    ``work`` is the number of elements behind it; ``threads`` is torch's number unless given.
    """
    if work < 2 * _SMALLEST_SHARE:
        return [(0, count)]
    parts = min(torch.get_num_threads() if threads is None else threads, work // _SMALLEST_SHARE)
    length = max(1, -(-count // (max(1, parts) * multiple))) * multiple
    return [(first, min(first + length, count)) for first in range(0, count, length)]


def run(group: Group, threads: int | None, work: Callable[[int, int], T]) -> list[T]:
    """Work on the blocks of a group, by several threads if it is worth it; the answers in order."""
    if len(group.blocks) < 2:
        return [work(0, len(group.blocks))]
    return run_shares(share(len(group.blocks), group.numel, threads), work)


def run_shares(shares: list[tuple[int, int]], work: Callable[[int, int], T]) -> list[T]:
    """Do the shares, the first one here; the answers in order."""
    if len(shares) == 1:
        return [work(*shares[0])]
    others = [_pool(os.getpid()).submit(work, first, last) for first, last in shares[1:]]
    try:
        own = work(*shares[0])
    finally:
        # They write to memory of the caller, which must not be freed before, whatever happens here.
        wait(others)
    return [own, *(other.result() for other in others)]


@lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:  # noqa: ARG001  (a forked child has the object but not its threads)
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="flexcomm-kernels")
