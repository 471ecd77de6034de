"""The CPU's kernel set: loops that numba compiles, run one after the other on blocks of chunks that stay in cache.

Tensors of other dtypes than float32, bfloat16 and float16, and those with gaps, are converted before and after.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property, lru_cache, partial
from typing import NamedTuple, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcomm.kernels.base import (
    LARGEST_MAGNITUDE,
    STORE,
    Average,
    Epilogue,
    EpilogueKind,
    Problem,
    StateUpdate,
    Status,
    apply_epilogue_,
    are_in_place,
)
from flexcomm.kernels.cpu import checks, indices, selection, transform
from flexcomm.kernels.cpu import tables as t
from flexcomm.kernels.cpu.compiler import address_of, compile_loops
from flexcomm.kernels.cpu.groups import Group, Loop, ScratchSizes, place, plan_groups
from flexcomm.kernels.cpu.mixing import mixer_of
from flexcomm.kernels.layout import (
    HEADER_NWORDS,
    NONFINITE,
    WORD_NBYTES,
    BufferPlan,
    Header,
    Layout,
    Region,
    aligned,
    plan_layout,
)
from flexcomm.kernels.plan import BINS as HISTOGRAM_BINS
from flexcomm.kernels.plan import SampleKey, choose_threshold, entries_before

Numbers = NDArray[np.int64]
T = TypeVar("T")

_KINDS = get_args(EpilogueKind)
_SMALLEST_SHARE = 1 << 16
"""Elements below which a second thread costs more than it saves."""
_MAGNITUDE = 0x7FFFFFFF
_KEPT_SHARE = 16
"""Indices that were drawn are kept if at most one element of so many is sent."""
_NO_LIMIT = _MAGNITUDE + 1
"""More than any magnitude, as bits: of tensors that have been checked."""


class CpuKernels:
    """Loops compiled by numba. ``threads`` is torch's number unless given; the bits do not depend on it."""

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def encoder(self, plan: BufferPlan, words: Tensor) -> CpuEncoder:
        return CpuEncoder(plan, words, self._threads)

    def decoder(
        self,
        plan: BufferPlan,
        words: Tensor,
        regions: Sequence[Region],
        decoded_as: BufferPlan | None = None,
        summed: int = 1,
    ) -> CpuDecoder:
        return CpuDecoder(plan, words, regions, decoded_as or plan, summed, self._threads)

    def mix_(
        self, x: Tensor, self_weight: float, others: Sequence[Tensor], weights: Sequence[float], out: Tensor
    ) -> Tensor:
        terms = [term for term in zip((x, *others), (self_weight, *weights), strict=True) if term[1] != 0.0]
        shares = split_work(x.numel(), x.numel(), self._threads, multiple=_LINE)
        return torch.tensor(sum(run_shares(shares, mixer_of(x, terms, out))), dtype=torch.float64)


_LINE = 32
"""Elements of the smallest dtype in a line of cache: threads that begin there share none."""


class Encoded(NamedTuple):
    """Blocks of a group whose states hold what was accumulated and, if ``is_sent``, no more what was sent of it."""

    group: Group
    blocks: Numbers
    is_sent: bool


class CpuEncoder:
    """A :class:`flexcomm.kernels.base.BucketEncoder`."""

    def __init__(self, plan: BufferPlan, words: Tensor, threads: int | None) -> None:
        self._plan, self._threads = plan, threads
        self._words = words.numpy().view(np.uint32)
        self._groups = plan_groups(plan, plan, is_inverse=False)
        # What is sent from here is mostly received here, too: all of it, so that processes may share the compiling.
        compile_loops([loop for group in self._groups for loop in group.all_loops()])
        self.loops = [_addresses(group.encode_loops()) for group in self._groups]
        """Of each group, the loops that encode a block of it, in order; benchmarks run prefixes of them."""
        self._job = _new_job(self._words)
        self._before: dict[int, Numbers] = {}
        """By tensor whose number of entries depends on the data: how many precede each chunk."""

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
        plan = self._plan
        in_place = are_in_place(states, states_out)
        # Before anything is written: what was forgotten cannot be restored. And what is finite as a float64 may not be
        # so as a float32.
        is_checked = (in_place and update.decay == 0.0) or torch.float64 in [x.dtype for x in tensors]
        if is_checked and (problem := _first_nonfinite(tensors)).word:
            self.mark_nonfinite_(step=step, sequence=sequence)
            return problem.word
        self._words.fill(0)
        held = self._set_inputs(tensors, states, states_out, update, step)
        self._job[t.LIMIT] = _NO_LIMIT if is_checked else transform.LIMIT
        entries, nwords = plan.entries, plan.nwords
        problems: Problems = []
        encoded: list[Encoded] = []
        try:
            if plan.variable_count:
                entries, nwords = self._encode_variable_(problems, encoded)
            for group, loops in zip(self._groups, self.loops, strict=True):
                if not group.variable_count:
                    self._encode_group_(group, loops, step, problems, encoded)
        except BaseException:  # an interrupt: what was done by then is known
            if in_place and update.decay:
                self._roll_back(encoded, update)
            raise
        if problems:
            if in_place and update.decay:
                self._roll_back(encoded, update)
            self.mark_nonfinite_(step=step, sequence=sequence)
            return _first_of(problems, tensors).word
        del held
        _write_header(self._words, Header(plan.digest, step, sequence, entries), nwords)
        return 0

    def rollback_(self, tensors: Sequence[Tensor], states: Sequence[Tensor], update: StateUpdate, *, step: int) -> None:
        held = self._set_inputs(tensors, states, states, update, step)
        self._roll_back([Encoded(group, group.blocks, is_sent=True) for group in self._groups], update)
        del held

    def mark_nonfinite_(self, *, step: int, sequence: int) -> None:
        nwords = HEADER_NWORDS if self._plan.variable_length else self._plan.nwords
        self._words[:nwords] = 0
        _write_header(self._words, Header(self._plan.digest, step, sequence, 0, NONFINITE), nwords)

    def _set_inputs(
        self,
        tensors: Sequence[Tensor],
        states: Sequence[Tensor] | None,
        states_out: Sequence[Tensor] | None,
        update: StateUpdate,
        step: int,
    ) -> Sequence[Tensor]:
        """Fill in the tables and the job; return the tensors that they point to."""
        keys = self._plan.sample_keys(step) if self._plan.has_keys else []
        inputs = [x if x.dtype in t.DTYPES and x.is_contiguous() else _as_floats(x) for x in tensors]
        self._job[t.DECAY : t.STAYS + 1] = _bits(update.decay, 1.0 - update.alpha)
        for group in self._groups:
            group.set_inputs(inputs, update.gain, keys)
            if states is not None and states_out is not None:
                group.set_addresses(t.STATE, states)
                group.set_addresses(t.STATE_OUT, states_out)
            else:
                group.table[:, t.STATE : t.STATE_OUT + 1] = 0
        return inputs

    def _encode_group_(
        self, group: Group, loops: Numbers, step: int, problems: Problems, encoded: list[Encoded]
    ) -> None:
        """Write the payloads of a group; add to what is wrong, and to what was done to states."""
        # Decoding need not draw them again; where many are sent, that is cheaper than memory.
        is_kept = group.is_shared and group.entries * _KEPT_SHARE <= group.numel
        drawn = np.empty(group.entries, np.int32) if is_kept else None
        for found, done in run(group, self._threads, partial(self._run, group, loops, drawn)):
            problems += found
            encoded += done
        if drawn is not None and not problems:
            self._plan.drawn[group.numbers[0]] = step, drawn

    def _run(
        self, group: Group, loops: Numbers, drawn: NDArray[np.int32] | None, begin: int, end: int
    ) -> tuple[Problems, list[Encoded]]:
        """Run loops on some blocks of a group; return what is wrong with them, and what was done to their states.

        Picks of a shared selection are left in ``drawn``.
        """
        job, blocks = _scratch.start(group.sizes, self._job), group.blocks[begin:end]
        if drawn is not None:
            job[[t.PICKS, t.IS_BLOCK]] = drawn.ctypes.data, 0
        if group.variable_count:
            self._use_counts(group, job)
        status = int(t.run_loops(group.table, blocks, job, loops))
        if status == 0:
            return [], [Encoded(group, blocks, is_sent=len(loops) > 1)]
        number, problem = status >> 8, Problem(status & 0xFF)
        tensor, first, last = blocks[number].tolist()
        failed = int(job[t.FAILED])
        done, rest = ([[tensor, first, failed]], [[tensor, failed, last]])
        encoded = [Encoded(group, blocks[:number], is_sent=len(loops) > 1)]
        # The chunk that failed is accumulated if the problem was found later: in what was to be sent of it.
        encoded.append(Encoded(group, np.array(done), is_sent=problem is Problem.STATE))
        encoded += [Encoded(group, np.array(rest), is_sent=False)] if problem is Problem.STATE else []
        return [(problem, group.numbers[tensor])], encoded

    def _use_counts(self, group: Group, job: Numbers) -> None:
        """Have a job use the counts of a tensor whose number of entries depends on the data, once they are known."""
        before = self._before.get(group.numbers[0])
        if before is not None:
            job[[t.BEFORE, t.BEFORE_PITCH]] = before.ctypes.data, before.size

    def _roll_back(self, encoded: list[Encoded], update: StateUpdate) -> None:
        """Put back what was sent, and take out what was accumulated: m = (m' + alpha * sent - gain * x) / decay."""
        for group, blocks, is_sent in encoded:
            group.set_gain(-update.gain / update.decay)
            job = _scratch.start(group.sizes, self._job)
            self._use_counts(group, job)
            job[[t.SENT, t.SENT_PITCH, t.LIMIT]] = job[t.COEFS], group.sizes.entries, _NO_LIMIT
            job[[t.DECAY, t.STAYS]] = _bits(1.0 / update.decay, update.alpha)
            sent = (*group.read_loops(), transform.add_sent) if is_sent else ()
            t.run_loops(group.table, blocks, job, _addresses((*sent, group.accumulate)))

    def _encode_variable_(self, problems: Problems, encoded: list[Encoded]) -> tuple[int, int]:
        """Write the payloads whose number of entries depends on the data, and find places for the others.

        Returns how many entries there are in all, and how long the buffer is.
        """
        rows = {number: row for group in self._groups for number, row in zip(group.numbers, group.table, strict=True)}
        variable = [group for group in self._groups if group.variable_count]
        # Where there are no states, coefficients need memory until they are sent.
        held = {
            group.numbers[0]: np.empty(group.numel, np.float32) for group in variable if not group.table[0, t.STATE]
        }
        for group in variable:
            if group.numbers[0] in held:
                group.table[0, t.STATE_OUT] = held[group.numbers[0]].ctypes.data
        self._before.clear()
        for group in variable:
            accumulate = partial(self._run, group, _addresses((group.accumulate,)), None)
            for found, done in run(group, self._threads, accumulate):
                problems += found
                encoded += done
            self._before[group.numbers[0]] = self._find_counts(group)
        position, entries = HEADER_NWORDS, 0
        for number, (plan, layout) in enumerate(zip(self._plan.plans, self._plan.layouts, strict=True)):
            sent = int(self._before[number][-1]) if plan.variable_count else plan.entries
            used = plan_layout(plan, sent) if plan.variable_length else layout
            place(rows[number], used, position)
            position, entries = position + used.nwords, entries + sent
        if not problems:
            encoded.clear()
            for group in variable:
                loops = _addresses((selection.pick_threshold, indices.put_counts, *group.put_loops()))
                found, done = self._run(group, loops, None, 0, len(group.blocks))
                problems += found
                encoded += done
        return entries, aligned(position)

    def _find_counts(self, group: Group) -> Numbers:
        """Decide how many entries of each chunk are sent, and from which threshold on; return how many precede each."""
        plan, job, blocks = group.plans[0], _scratch.start(group.sizes, self._job), group.tensor_blocks()

        def count(bound: int) -> Tensor:
            counts = np.zeros(plan.chunks, np.int64)
            if bound <= _MAGNITUDE:
                job[[t.BOUND, t.COUNTS]] = bound, counts.ctypes.data
                t.run_loops(group.table, blocks, job, _addresses((selection.count_reaching,)))
            return torch.from_numpy(counts)

        def count_bins() -> Tensor:
            bins = np.zeros(HISTOGRAM_BINS, np.int64)
            job[t.COUNTS] = bins.ctypes.data
            t.run_loops(group.table, blocks, job, _addresses((selection.fill_histogram,)))
            return torch.from_numpy(bins)

        counts, group.table[0, t.TAU_BITS] = choose_threshold(plan, count, count_bins)
        return entries_before(counts).numpy()


Problems = list[tuple[Problem, int]]
"""What is wrong, and with which tensor."""


@lru_cache(maxsize=256)
def _addresses(loops: tuple[Loop, ...]) -> Numbers:
    return np.array([address_of(loop) for loop in loops], np.int64)


def _bits(*floats: float) -> NDArray[np.uint32]:
    return np.array(floats, np.float32).view(np.uint32)


def _new_job(words: NDArray[np.uint32]) -> Numbers:
    job = np.zeros(t.JOB_NUMBERS, np.int64)
    job[[t.WORDS, t.NWORDS, t.SENDERS, t.IS_BLOCK]] = words.ctypes.data, words.size, 1, 1
    return job


def _first_of(problems: Problems, tensors: Sequence[Tensor]) -> Status:
    """Return the status of several problems: nonfinite tensors come first, whichever were found."""
    if any(problem is Problem.NONFINITE for problem, _ in problems):
        return _first_nonfinite(tensors)
    return Status(Problem.STATE, tensor=min(number for _, number in problems))


class CpuDecoder:
    """A :class:`flexcomm.kernels.base.BucketDecoder`."""

    def __init__(
        self,
        plan: BufferPlan,
        words: Tensor,
        regions: Sequence[Region],
        decoded_as: BufferPlan,
        summed: int,
        threads: int | None,
    ) -> None:
        self._plan, self._decoded_as, self._threads = plan, decoded_as, threads
        self._words = words.numpy().view(np.uint32)
        self._regions = np.array([region[1:] for region in regions], np.int64)
        starts = np.ascontiguousarray(self._regions[:, 0])
        self._received = [
            _Received(group, starts, _new_job(self._words), summed, places_vary=plan.variable_length)
            for group in plan_groups(plan, decoded_as, is_inverse=True)
        ]

    def verify(self, *, step: int, sequence: int) -> int:
        plan = self._plan
        expected = Header(plan.digest, step, sequence, max(plan.entries, 0))
        header = np.frombuffer(expected.pack(0), np.uint32)
        found = int(checks.check_headers(self._words, self._regions, header, int(plan.variable_count)))
        if found:
            return Status(Problem.NONFINITE if found % 2 else Problem.HEADER, found // 2 - 1).word
        for sender in range(len(self._regions)):
            problem = self._find_payloads(sender) if plan.variable_count else Status()
            if problem.word:
                return problem.word
            problems = [problem for received in self._received for problem in received.check(sender)]
            if problems:
                kind, number = min(problems, key=lambda found: found[::-1])
                return Status(kind, sender, number).word
        return 0

    def decode_(self, outputs: Sequence[Tensor], *, step: int, average: Average, epilogue: Epilogue = STORE) -> None:
        keys = self._decoded_as.sample_keys(step) if self._decoded_as.has_keys else []
        # Elements of other dtypes, and such with gaps, are filled elsewhere first.
        is_direct = False not in [out.dtype in t.DTYPES and out.is_contiguous() for out in outputs]
        filled = (
            outputs if is_direct else [torch.empty(out.shape, dtype=torch.float32, device="cpu") for out in outputs]
        )
        for received, loops in zip(self._received, self.loops, strict=True):
            received.set_inputs(filled, keys, average, epilogue if is_direct else STORE)
            of_step, drawn = self._plan.drawn.get(received.group.numbers[0], (None, None))
            is_known = of_step == step and self._decoded_as is self._plan
            run(received.group, self._threads, partial(received.decode_blocks_, loops, drawn if is_known else None))
        if not is_direct:
            for out, average_of_out in zip(outputs, filled, strict=True):
                apply_epilogue_(out, average_of_out, epilogue)

    @cached_property
    def loops(self) -> list[Numbers]:
        """Of each group, the loops that decode a block of it, in order; benchmarks run prefixes of them."""
        return [_addresses(received.group.decode_loops()) for received in self._received]

    def _find_payloads(self, sender: int) -> Status:
        """Find the payloads of a buffer whose contents vary, and check their counts."""
        start, nwords = self._regions[sender].tolist()
        position, entries = HEADER_NWORDS, 0
        places = {number: one for one in self._received for number in one.group.numbers}
        for number, (plan, full) in enumerate(zip(self._plan.plans, self._plan.layouts, strict=True)):
            sent, layout = plan.entries, full
            if plan.variable_count:
                least = plan_layout(plan, 0) if plan.variable_length else full
                if position + least.nwords > nwords:
                    return Status(Problem.LENGTH, sender, number)
                counts, width = np.empty(plan.chunks, np.int64), plan.chunk_numel.bit_length()
                largest = indices.read_counts(self._words[start + position :], width, counts)
                sent = int(counts.sum())
                if largest > plan.chunk_numel or sent > plan.k:
                    return Status(Problem.COUNTS, sender, number)
                np.cumsum(counts, out=places[number].before[sender, 1:])
                layout = plan_layout(plan, sent) if plan.variable_length else full
            if position + layout.nwords > nwords:
                return Status(Problem.LENGTH, sender, number if plan.variable_count else 0)
            places[number].place(sender, number, layout, position)
            position, entries = position + layout.nwords, entries + sent
        if aligned(position) != nwords:
            return Status(Problem.LENGTH, sender)
        announced = int(self._words[start + 8]) | int(self._words[start + 9]) << 32
        return Status() if entries == announced else Status(Problem.ENTRIES, sender)


class _Received:
    """What several senders sent of the tensors of a group.

    Indices are unpacked when they are checked. ``tables`` say of each sender where its payloads are; ``before`` how
    many entries precede each chunk, if that depends on the data.
    """

    def __init__(self, group: Group, starts: Numbers, job: Numbers, summed: int, *, places_vary: bool) -> None:
        self.group, self._starts, self._job, self._places_vary = group, starts, job, places_vary
        variable_count, senders = group.variable_count, len(starts)
        self._tables = np.repeat(group.table[None], senders, axis=0) if places_vary else group.table[None]
        self._picks = np.zeros((senders, group.entries if group.sends_indices or variable_count else 0), np.int32)
        self.before = np.zeros((senders if variable_count else 0, group.plans[0].chunks + 1), np.int64)
        self._tensor_blocks, self._check_loops = group.tensor_blocks(), _addresses(group.check_loops())
        job[[t.SENDERS, t.STARTS, t.DIVISOR]] = senders, starts.ctypes.data, senders * summed
        self._picks_at = self._picks.ctypes.data
        job[[t.PICKS, t.PICK_PITCH, t.IS_BLOCK]] = self._picks_at, self._picks.shape[1], 0
        if variable_count:
            job[[t.BEFORE, t.BEFORE_PITCH]] = self.before.ctypes.data, self.before.shape[1]
        job[t.ROW_PITCH] = group.table.size if places_vary else 0
        # A check is about one sender alone.
        self._check_jobs = np.repeat(job[None], senders, axis=0)
        for sender, own in enumerate(self._check_jobs):
            own[[t.STARTS, t.PICKS]] += 8 * sender, self._picks.strides[0] * sender
            own[t.BEFORE] += 8 * sender * job[t.BEFORE_PITCH]

    def place(self, sender: int, number: int, layout: Layout, position: int) -> None:
        """Fill in where a sender's payload of a tensor is."""
        place(self._tables[sender if self._places_vary else 0, self.group.numbers.index(number)], layout, position)

    def check(self, sender: int) -> Problems:
        """Return the first tensor of a sender with a wrong payload, and what is wrong; unpack its indices."""
        table = self._tables[sender if self._places_vary else 0]
        found = int(t.run_loops(table, self._tensor_blocks, self._check_jobs[sender], self._check_loops))
        return [(Problem(found & 0xFF), self.group.numbers[found >> 8])] if found else []

    def set_inputs(
        self, outputs: Sequence[Tensor], keys: Sequence[SampleKey], average: Average, epilogue: Epilogue
    ) -> None:
        """Fill in where outputs are, the keys of a step, and how averages are taken and used."""
        self.group.set_inputs(outputs, 1.0, keys)
        if self._places_vary:
            self._tables[0][:, t.CHANGING] = self.group.table[:, t.CHANGING]
        self._job[t.COUNTED] = average == "contributors" and (self.group.sends_indices or self.group.variable_count)
        self._job[t.EPILOGUE] = _KINDS.index(epilogue.kind)
        self._job[t.LR : t.KEEP + 1] = _bits(epilogue.lr, epilogue.keep)

    def decode_blocks_(self, loops: Numbers, drawn: NDArray[np.int32] | None, begin: int, end: int) -> None:
        """Run loops that turn some blocks into averages, and use them; without drawing what has been drawn."""
        group, senders = self.group, len(self._starts)
        sizes = group.sizes._replace(coefs=senders * group.sizes.entries)
        job = _scratch.start(sizes, self._job)
        if not group.is_shared:
            job[t.PICKS] = self._picks_at
        elif drawn is None:
            job[[t.PICK_PITCH, t.IS_BLOCK]] = 0, 1
        else:
            job[[t.PICKS, t.PICK_PITCH]], loops = (drawn.ctypes.data, 0), loops[1:]
        job[t.SENT], job[t.SENT_PITCH] = job[t.COEFS], sizes.entries
        t.run_loops(self._tables[0], group.blocks[begin:end], job, loops)


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


class _Scratch(threading.local):
    """Memory that the loops of one thread work in: as much as any of them has needed so far."""

    def __init__(self) -> None:
        self._held: tuple[ScratchSizes, list[Tensor], Numbers] = ScratchSizes(0, 0, 0, 0, 0), [], np.zeros(5, np.int64)
        self._job = np.empty(t.JOB_NUMBERS, np.int64)

    def start(self, sizes: ScratchSizes, job: Numbers) -> Numbers:
        """Return a job that uses this memory; the one before is over."""
        largest = ScratchSizes(*map(max, self._held[0], sizes))
        if largest != self._held[0]:
            # Torch's memory begins at a line of cache, numpy's need not. Not as inference tensors: it is used again.
            with torch.inference_mode(False):
                memory = [torch.empty(numel, dtype=torch.float32, device="cpu") for numel in largest]
            # At once: an interrupt must not leave addresses of memory that is gone.
            self._held = largest, memory, np.array([one.data_ptr() for one in memory], np.int64)
        self._job[:] = job
        self._job[t.COEFS : t.PICKS + 1] = self._held[2]
        return self._job


_scratch = _Scratch()


def split_work(count: int, work: int, threads: int | None, multiple: int = 1) -> list[tuple[int, int]]:
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
    if group.numel < 2 * _SMALLEST_SHARE:
        return [work(0, len(group.blocks))]
    shares = split_work(len(group.cuts), group.numel, threads)
    ends = [*group.cuts.tolist(), len(group.blocks)]
    return run_shares([(ends[first], ends[last]) for first, last in shares], work)


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
