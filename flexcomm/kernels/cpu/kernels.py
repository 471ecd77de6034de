"""The CPU's kernel set: loops that numba compiles, stage by stage over blocks of chunks that stay in cache.

Tensors of other dtypes than float32 are converted before and after.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from flexcomm.kernels.base import LARGEST_MAGNITUDE, Average, Problem, StateUpdate, Status
from flexcomm.kernels.counting import BINS as HISTOGRAM_BINS
from flexcomm.kernels.counting import entries_before, fill_up, raise_threshold, threshold_bits
from flexcomm.kernels.cpu import checks, indices, selection, tables, transform, values
from flexcomm.kernels.cpu.codelets import BINS, LENGTH, WINDOW
from flexcomm.kernels.cpu.groups import NO_PICKS, Group, plan_groups, set_layout, tile_numel
from flexcomm.kernels.cpu.mixing import mixer_of
from flexcomm.kernels.layout import HEADER_NWORDS, NONFINITE, WORD_NBYTES, Header, IndexCode, aligned, plan_layout
from flexcomm.kernels.plan import Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from flexcomm.kernels.layout import BufferPlan, Layout, Region

__all__ = ["CpuKernels"]

_SMALLEST_SHARE = 1 << 16
"""Elements below which a second thread costs more than it saves."""
_NO_COUNTS, _NO_COUNTS_OF_ANY = np.empty(0, np.int64), np.empty((0, 0), np.int64)
_NO_FLOATS = np.empty(0, np.float32)

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
        return torch.tensor(sum(run(shares, mixer_of(x, terms, out))), dtype=torch.float64)


_LINE = 32
"""Elements of the smallest dtype in a line of cache: threads that begin there share none."""


class CpuEncoder:
    """A :class:`flexcomm.kernels.base.BucketEncoder`."""

    def __init__(self, plan: BufferPlan, words: Tensor, threads: int | None) -> None:
        self._plan, self._threads = plan, threads
        self._words = words.numpy().view(np.uint32)
        self._groups = plan_groups(plan, plan)

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
        plan, keys = self._plan, self._plan.sample_keys(step)
        inputs = [_as_floats(x) for x in tensors]
        # Found before anything is written: a state that is updated in place could not be restored.
        is_checked = (states is not None and states is states_out) or _has_doubles(tensors)
        problem = _first_nonfinite(tensors) if is_checked else Status()
        self._words.fill(0)
        for group in self._groups:
            group.set_keys(keys)
            group.set_factor(update.gain)
            group.set_addresses(tables.X, inputs)
            group.set_addresses(tables.STATE, states)
            group.set_addresses(tables.STATE_OUT, states_out)
        if not problem.word:
            limit = _NO_LIMIT if is_checked else transform.LIMIT
            entries, end, problem = self._encode_groups_(tensors, update, limit)
        if problem.word:
            self.mark_nonfinite_(step=step, sequence=sequence)
        else:
            _write_header(self._words, Header(plan.digest, step, sequence, entries), aligned(end))
        return problem.word

    def mark_nonfinite_(self, *, step: int, sequence: int) -> None:
        nwords = HEADER_NWORDS if self._plan.variable_length else self._plan.nwords
        self._words[:nwords] = 0
        _write_header(self._words, Header(self._plan.digest, step, sequence, 0, NONFINITE), nwords)

    def _encode_groups_(self, tensors: Sequence[Tensor], update: StateUpdate, limit: int) -> tuple[int, int, Status]:
        """Write all payloads; return how many entries they hold, where they end, and what is wrong."""
        plan, problems = self._plan, []
        variable = {
            group.numbers[0]: _Variable(group, self._threads) for group in self._groups if group.plan.is_variable
        }
        for one in variable.values():
            problems += one.find_threshold(update, limit)
        position, entries = HEADER_NWORDS, 0
        for number, (one_plan, layout) in enumerate(zip(plan.plans, plan.layouts, strict=True)):
            sent = variable[number].entries if number in variable else one_plan.entries
            if plan.variable_length:
                layout = plan_layout(one_plan, sent) if one_plan.variable_length else layout
                self._place(number, layout, position)
            position, entries = position + layout.nwords, entries + sent
        for group in self._groups:
            if group.plan.is_variable:
                problems += variable[group.numbers[0]].encode_(update, self._words)
            else:
                blocks = partial(_encode_blocks, group, update, limit, self._words)
                for found in run(share(len(group.blocks), group.chunks * group.numel, self._threads), blocks):
                    problems += found
        if any(problem is Problem.NONFINITE for problem, _ in problems):
            return 0, 0, _first_nonfinite(tensors)
        least = min((number for _, number in problems), default=0)
        return entries, position, Status(Problem.STATE, tensor=least) if problems else Status()

    def _place(self, number: int, layout: Layout, position: int) -> None:
        """Fill in where the payload of a tensor is."""
        for group in self._groups:
            if number in group.numbers:
                group.code = layout.code
                set_layout(group.table[group.numbers.index(number)], layout, position)


Problems = list[tuple[Problem, int]]
"""What is wrong, and with which tensor."""


def _encode_blocks(
    group: Group, update: StateUpdate, limit: int, words: NDArray[np.uint32], begin: int, end: int
) -> Problems:
    """Encode some blocks of a group, each stage by stage."""
    problems, scratch = [], _scratch()
    k, numel, most = group.plan.k, group.numel, group.most_chunks
    rows = scratch.floats("rows", 1 if group.table[0, tables.STATE_OUT] else most * numel)
    tops, memory = scratch.ints("tops", most * max(group.bins, BINS)), scratch.ints("memory", 2 * numel + 4 * WINDOW)
    picks, taken = scratch.ints("picks", most * k), scratch.floats("taken", k)
    for first, last in group.blocks[begin:end]:
        nonfinite = accumulate(group, first, last, update, limit, rows, tops)
        if nonfinite:
            problems.append((Problem.NONFINITE, group.numbers[nonfinite - 1]))
            continue
        chosen = picks[: (last - first) * k]
        if group.selection is Selection.LARGEST:
            filled = int(group.fills_maxima)
            selection.pick_largest(group.table, first, last, rows, tops, group.bins, filled, memory, chosen)
        elif group.selection is Selection.EVERYTHING:
            chosen = NO_PICKS
        else:
            PICK_SHARED[group.selection](group.table, first, last, memory, chosen)
        problems += _put(group, first, last, rows, chosen, _NO_COUNTS, words, update, taken)
    return problems


PICK_SHARED = {Selection.SHUFFLED: selection.pick_shuffled, Selection.STRIDED: selection.pick_strided}


def accumulate(
    group: Group,
    first: int,
    last: int,
    update: StateUpdate,
    limit: int,
    rows: NDArray[np.float32],
    tops: NDArray[np.int32],
) -> int:
    """Fill the coefficients of a block; return 0, or 1 + the first nonfinite tensor of the group."""
    tiles, decay = _scratch().floats("tiles", tile_numel(group.plan)), np.float32(update.decay)
    given = group.transforms.lists or (tops,)
    return int(group.transforms.accumulate(group.table, first, last, limit, decay, rows, tiles, *given))


def _put(
    group: Group,
    first: int,
    last: int,
    rows: NDArray[np.float32],
    picks: NDArray[np.int32],
    before: NDArray[np.int64],
    words: NDArray[np.uint32],
    update: StateUpdate,
    taken: NDArray[np.float32],
) -> Problems:
    """Write the indices and values of what was picked of some chunks."""
    table, stays = group.table, np.float32(1.0 - update.alpha)
    origin = int(before[first]) if before.size else first * group.plan.k
    if group.code is not IndexCode.NONE:
        indices.put_indices(table, first, last, int(group.code), picks, before, origin, words)
    put = values.put_scaled if group.plan.values.format.scales else values.put_floats
    wrong = put(table, first, last, rows, int(group.plan.values), picks, before, origin, words, stays, taken)
    return [(Problem.STATE, group.numbers[wrong - 1])] if wrong else []


class _Variable:
    """One tensor whose number of entries depends on the data, while it is encoded."""

    def __init__(self, group: Group, threads: int | None) -> None:
        self._group, self._threads = group, threads
        self._before = np.zeros(group.chunks + 1, np.int64)
        self._rows = _NO_FLOATS
        if not group.table[0, tables.STATE_OUT]:
            self._rows = np.empty(group.chunks * group.numel, np.float32)
            group.table[0, tables.STATE_OUT] = self._rows.ctypes.data

    @property
    def entries(self) -> int:
        return int(self._before[-1])

    def find_threshold(self, update: StateUpdate, limit: int) -> Problems:
        """Fill the coefficients, and decide how many of each chunk are sent."""
        group, plan = self._group, self._group.plan
        shares = share(len(group.blocks), group.chunks * group.numel, self._threads)

        def fill(begin: int, end: int) -> int:
            tops = _scratch().ints("tops", group.most_chunks * BINS)
            found = (accumulate(group, *block, update, limit, _NO_FLOATS, tops) for block in group.blocks[begin:end])
            return max(found, default=0)

        def count(bound: int) -> Tensor:
            counts = np.zeros(group.chunks, np.int64)
            if bound <= _MAGNITUDE:
                selection.count_reaching(group.table, bound, counts)
            return torch.from_numpy(counts)

        if any(run(shares, fill)):
            return [(Problem.NONFINITE, group.numbers[0])]
        tau_bits = threshold_bits(plan.tau)
        counts = count(tau_bits)
        if int(counts.sum()) > plan.k:
            bins = np.zeros(HISTOGRAM_BINS, np.int64)
            selection.fill_histogram(group.table, bins)
            raised = raise_threshold(torch.from_numpy(bins), tau_bits, plan.k)
            counts, tau_bits = fill_up(count(raised.low), count(raised.high), plan.k), raised.low
        group.table[0, tables.TAU_BITS] = tau_bits
        self._before[:] = entries_before(counts).numpy()
        return []

    def encode_(self, update: StateUpdate, words: NDArray[np.uint32]) -> Problems:
        """Write the payload, at the place that the table says."""
        group, counts = self._group, np.diff(self._before)
        width = group.plan.chunk_numel.bit_length()
        counts_nwords = -(-group.chunks * width // 32)
        # The counts come first, right before the indices.
        begin = int(group.table[0, tables.INDICES]) - counts_nwords
        indices.write_counts(words[begin:], counts, width)
        # One longer than need be: without picks, everything would be sent.
        picks, memory = np.empty(self.entries + 1, np.int32), np.empty(2 * group.numel + 4 * WINDOW, np.int32)
        selection.pick_above(group.table, self._before, memory, picks)
        taken = np.empty(group.numel, np.float32)
        return _put(group, 0, group.chunks, _NO_FLOATS, picks, self._before, words, update, taken)


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
        # Where payloads are of variable length, they lie differently in every sender's buffer.
        one, many = plan_groups(plan, decoded_as), range(len(regions))
        self._groups = [plan_groups(plan, decoded_as) for _ in many] if plan.variable_length else [one for _ in many]
        self._received = [_Received(group, len(regions)) for group in one]

    def verify(self, *, step: int, sequence: int) -> int:
        plan, words = self._plan, self._words
        expected = plan.header(step, sequence)._replace(entries=max(plan.entries, 0))
        header = np.frombuffer(expected.pack(0), np.uint32)
        found = int(checks.check_headers(words, self._regions, header, int(plan.is_variable)))
        if found:
            return Status(Problem.NONFINITE if found % 2 else Problem.HEADER, found // 2 - 1).word
        for sender, (start, nwords) in enumerate(self._regions.tolist()):
            problem = self._find_payloads(sender, start, nwords) if plan.is_variable else Status()
            if not problem.word:
                problem = self._check_payloads(sender, start)
            if problem.word:
                return problem.word
        return 0

    def decode_(self, outputs: Sequence[Tensor], *, step: int, average: Average) -> None:
        keys = self._decoded_as.sample_keys(step)
        filled = [
            out if out.dtype is torch.float32 and out.is_contiguous() else torch.empty(out.shape) for out in outputs
        ]
        for number, received in enumerate(self._received):
            group = received.group
            group.set_keys(keys)
            group.set_factor(1.0)
            group.set_addresses(tables.X, filled)
            of_senders = [groups[number] for groups in self._groups]
            decode = partial(received.decode_blocks_, of_senders, self._words, self._regions, average)
            run(share(len(group.blocks), group.chunks * group.numel, self._threads), decode)
        for out, here in zip(outputs, filled, strict=True):
            if here is not out:
                out.copy_(here)

    def _find_payloads(self, sender: int, start: int, nwords: int) -> Status:
        """Find the payloads of a buffer whose contents vary, and check their counts."""
        position, entries = HEADER_NWORDS, 0
        groups = {
            number: (place, group) for place, group in enumerate(self._groups[sender]) for number in group.numbers
        }
        for number, (plan, layout) in enumerate(zip(self._plan.plans, self._plan.layouts, strict=True)):
            place, group = groups[number]
            sent = plan.entries
            if plan.is_variable:
                least = plan_layout(plan, 0) if plan.variable_length else layout
                if position + least.nwords > nwords:
                    return Status(Problem.LENGTH, sender, number)
                counts, width = np.empty(plan.chunks, np.int64), plan.chunk_numel.bit_length()
                largest = indices.read_counts(self._words[start + position :], width, counts)
                sent = int(counts.sum())
                if largest > plan.chunk_numel or sent > plan.k:
                    return Status(Problem.COUNTS, sender, number)
                self._received[place].set_counts(sender, counts)
                layout = plan_layout(plan, sent) if plan.variable_length else layout
            if position + layout.nwords > nwords:
                return Status(Problem.LENGTH, sender, number)
            if self._plan.variable_length:
                group.code = layout.code
                set_layout(group.table[group.numbers.index(number)], layout, position)
            position, entries = position + layout.nwords, entries + sent
        if aligned(position) != nwords:
            return Status(Problem.LENGTH, sender)
        announced = int(self._words[start + 8]) | int(self._words[start + 9]) << 32
        return Status() if entries == announced else Status(Problem.ENTRIES, sender)

    def _check_payloads(self, sender: int, start: int) -> Status:
        """Return the first problem of a sender's payloads; unpack their indices."""
        problems = []
        for received, group in zip(self._received, self._groups[sender], strict=True):
            problems += received.check(group, sender, self._words, start)
        if not problems:
            return Status()
        number, problem = min(problems)
        return Status(problem, sender, number)


class _Received:
    """What several senders sent of the tensors of a group: indices that were checked, and counts if they vary."""

    def __init__(self, group: Group, senders: int) -> None:
        self.group = group
        entries = group.plan.k if group.plan.is_variable else group.chunks * group.plan.k
        self._senders = senders
        self._picks = np.empty((senders, entries if group.code is not IndexCode.NONE else 0), np.int32)
        self._before = np.zeros((senders if group.plan.is_variable else 0, group.chunks + 1), np.int64)

    def set_counts(self, sender: int, counts: NDArray[np.int64]) -> None:
        np.cumsum(counts, out=self._before[sender, 1:])

    def _before_of(self, sender: int) -> NDArray[np.int64]:
        return self._before[sender] if self._before.shape[0] else _NO_COUNTS

    def check(self, group: Group, sender: int, words: NDArray[np.uint32], start: int) -> list[tuple[int, Problem]]:
        """Return the tensors with wrong payloads, and what is wrong."""
        form, before, problems = group.plan.values.format, self._before_of(sender), []
        if group.code is not IndexCode.NONE:
            picks, code = self._picks[sender], int(group.code)
            wrong = indices.read_indices(group.table, 0, group.chunks, code, words, start, before, picks)
            problems = [(group.numbers[wrong - 1], Problem.INDEX)] if wrong else []
        if form.scales or form.nonfinite_mask:
            found = int(
                values.check_values(group.table, words, start, before, form.scales, form.bits, form.nonfinite_mask)
            )
            problems += [(group.numbers[found >> 8], Problem(found & 0xFF))] if found else []
        return problems

    def decode_blocks_(
        self,
        groups: Sequence[Group],
        words: NDArray[np.uint32],
        regions: NDArray[np.int64],
        average: Average,
        begin: int,
        end: int,
    ) -> None:
        """Write the averages of some blocks; ``groups`` says of each sender where its payloads are."""
        group, scratch = self.group, _scratch()
        k, numel, most = group.plan.k, group.numel, group.most_chunks
        is_shared = group.code is IndexCode.NONE
        counted = int(average == "contributors" and not is_shared)
        everything = int(group.selection is Selection.EVERYTHING)
        room = most * (min(k, numel) if not group.plan.is_variable else numel)
        sent = scratch.floats("sent", self._senders * room).reshape(self._senders, room)
        drawn = scratch.ints("picks", room)
        tiles, marks = (
            scratch.floats("tiles", tile_numel(group.plan)),
            scratch.ints("marks", 2 * max(numel, _SQUARE) + 1),
        )
        memory = scratch.ints("memory", 2 * numel + 4 * WINDOW)
        for first, last in group.blocks[begin:end]:
            origins = np.full(self._senders, first * k, np.int64)
            if self._before.shape[0]:
                origins[:] = self._before[:, first]
            for sender, (own, start) in enumerate(zip(groups, regions[:, 0].tolist(), strict=True)):
                before, code = self._before_of(sender), int(group.plan.values)
                values.get_values(own.table, first, last, code, words, start, before, origins[sender], sent[sender])
            picks, pick_origins = self._picks, _zeros(self._senders)
            if is_shared and not everything:
                PICK_SHARED[group.selection](group.table, first, last, memory, drawn)
                picks, pick_origins = drawn[None], origins
            group.transforms.restore(
                group.table,
                first,
                last,
                everything,
                picks,
                pick_origins,
                sent,
                origins,
                self._before if self._before.shape[0] else _NO_COUNTS_OF_ANY,
                counted,
                tiles,
                marks,
                *group.transforms.inverse_lists,
            )


@lru_cache(maxsize=64)
def _zeros(count: int) -> NDArray[np.int64]:
    return np.zeros(count, np.int64)


def _as_floats(x: Tensor) -> Tensor:
    """Return a tensor as contiguous float32; itself, if it is."""
    return x.detach().to(torch.float32, memory_format=torch.contiguous_format).contiguous()


def _has_doubles(tensors: Sequence[Tensor]) -> bool:
    """Return whether a tensor may hold what is finite there, and too large as a float32."""
    return any(x.dtype is torch.float64 for x in tensors)


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
    """Memory of one thread, which grows as needed."""

    def __init__(self) -> None:
        self._arrays: dict[str, Tensor] = {}

    def floats(self, name: str, numel: int) -> NDArray[np.float32]:
        return self._get(name, numel, torch.float32).numpy()

    def ints(self, name: str, numel: int) -> NDArray[np.int32]:
        return self._get(name, numel, torch.int32).numpy()

    def _get(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        held = self._arrays.get(name)
        if held is None or held.numel() < numel:
            # Torch's memory begins at a line of cache, numpy's need not. Not an inference tensor: it is used again.
            with torch.inference_mode(False):
                held = self._arrays[name] = torch.empty(numel, dtype=dtype)
        return held[:numel]


_memory = _Scratch()


def _scratch() -> _Scratch:
    return _memory


def share(count: int, work: int, threads: int | None, multiple: int = 1) -> list[tuple[int, int]]:
    """Cut ``range(count)`` into one part per thread, each a multiple long and worth a thread's while.

    ``work`` is the number of elements behind it; ``threads`` is torch's number unless given.
    """
    if work < 2 * _SMALLEST_SHARE:
        return [(0, count)]
    parts = min(torch.get_num_threads() if threads is None else threads, work // _SMALLEST_SHARE)
    length = max(1, -(-count // (max(1, parts) * multiple))) * multiple
    return [(first, min(first + length, count)) for first in range(0, count, length)]


def run(shares: list[tuple[int, int]], work: Callable[[int, int], T]) -> list[T]:
    """Do the shares, the first one here; the answers in order."""
    if len(shares) == 1:
        return [work(*shares[0])]
    others = [_pool(os.getpid()).submit(work, first, last) for first, last in shares[1:]]
    return [*(work(*share) for share in shares[:1]), *(other.result() for other in others)]


@lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:  # noqa: ARG001  (a forked child has the object but not its threads)
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="flexcomm-kernels")
