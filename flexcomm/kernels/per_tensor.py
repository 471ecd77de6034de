"""Kernel sets that work tensor by tensor: loops, on the host, from their verbs to the calls on whole buckets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexcomm.kernels.base import Average, Problem, StateUpdate, Status
from flexcomm.kernels.layout import (
    CHECKSUM_WORD,
    HEADER_NBYTES,
    HEADER_NWORDS,
    NONFINITE,
    WORD_NBYTES,
    BufferPlan,
    Header,
    Layout,
    RawHeader,
    Region,
    aligned,
    plan_layout,
)
from flexcomm.kernels.plan import SampleKey, TensorPlan


class TensorState(NamedTuple):
    """The state of one tensor, where its successor goes, and how they are related; None: nothing is kept."""

    state: Tensor | None
    state_out: Tensor | None
    update: StateUpdate


class ThresholdCounts(NamedTuple):
    """What a variable selection will send: entries of each chunk (int64), of those that reach the threshold.

    Where more of a chunk reach it than are counted, the last of the threshold's own bin stay. The threshold is given
    as the bits of a float32, which order magnitudes as their values do; a bin is what has the same upper 16 bits.
    """

    counts: Tensor
    tau_bits: int


class Payload(NamedTuple):
    """One sender's payload of one tensor, in a tensor of words: its start, its layout, its counts if they vary."""

    start: int
    layout: Layout
    counts: Tensor | None = None


class TensorEncoding(NamedTuple):
    """What is sent of one tensor: its plan, the layout of its payload, the key of its step, its threshold if any."""

    plan: TensorPlan
    layout: Layout
    sample_key: SampleKey
    threshold: ThresholdCounts | None = None


class PerTensorKernels(ABC):
    """A kernel set by verbs that work on one tensor."""

    @abstractmethod
    def is_finite(self, x: Tensor) -> bool:
        """Return whether every element is finite, its magnitude below ``LARGEST_MAGNITUDE``."""

    @abstractmethod
    def find_threshold(self, x: Tensor, plan: TensorPlan, state: TensorState) -> ThresholdCounts:
        """Return what ``plan``, a variable one, will send of ``x``.

        If more than ``plan.k`` reach its threshold, the threshold rises to the bin at which ``plan.k`` are
        exceeded; of that bin so many are sent as there is room for, those of the first chunks and lowest indices.
        """

    @abstractmethod
    def encode_tensor_(self, x: Tensor, words: Tensor, encoding: TensorEncoding, state: TensorState) -> bool:
        """Fill ``words`` with the payload and move what it holds out of the state; False if that is not finite."""

    @abstractmethod
    def read_counts(self, words: Tensor, plan: TensorPlan, start: int) -> Tensor | None:
        """Return the counts (int64) at the start of a variable payload; None if one exceeds a chunk."""

    @abstractmethod
    def find_problem(self, words: Tensor, payload: Payload, plan: TensorPlan) -> Problem:
        """Return what is wrong with a payload; of several problems, the first of the enumeration."""

    @abstractmethod
    def decode_tensor_(
        self,
        words: Tensor,
        payloads: Sequence[Payload],
        plan: TensorPlan,
        sample_key: SampleKey,
        average: Average,
        out: Tensor,
    ) -> None:
        """Fill ``out`` with the average of sound payloads, added in the order given and transformed back once."""

    @abstractmethod
    def checksum(self, words: Tensor) -> int:
        """Return the sum that :func:`flexcomm.kernels.layout.checksum_of` returns."""

    def encoder(self, plan: BufferPlan, words: Tensor) -> TensorLoopEncoder:
        return TensorLoopEncoder(self, plan, words)

    def decoder(
        self, plan: BufferPlan, words: Tensor, regions: Sequence[Region], decoded_as: BufferPlan | None = None
    ) -> TensorLoopDecoder:
        return TensorLoopDecoder(self, plan, words, regions, decoded_as or plan)


class TensorLoopEncoder:
    """A :class:`flexcomm.kernels.base.BucketEncoder` that goes from tensor to tensor."""

    def __init__(self, kernels: PerTensorKernels, plan: BufferPlan, words: Tensor) -> None:
        self._kernels, self._plan, self._words = kernels, plan, words

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
        problem = self._encode_tensors_(tensors, states, states_out, update, step, sequence)
        if problem.word:
            self.mark_nonfinite_(step=step, sequence=sequence)
        return problem.word

    def mark_nonfinite_(self, *, step: int, sequence: int) -> None:
        end = HEADER_NWORDS if self._plan.variable_length else self._plan.nwords
        self._words[:end] = 0
        self._close_(end, Header(self._plan.digest, step, sequence, 0, NONFINITE))

    def _encode_tensors_(
        self,
        tensors: Sequence[Tensor],
        states: Sequence[Tensor] | None,
        states_out: Sequence[Tensor] | None,
        update: StateUpdate,
        step: int,
        sequence: int,
    ) -> Status:
        plan, kernels = self._plan, self._kernels
        for number, x in enumerate(tensors):
            if not kernels.is_finite(x):
                return Status(Problem.NONFINITE, tensor=number)
        position, entries, keys = HEADER_NWORDS, 0, plan.sample_keys(step)
        for number, (one, x) in enumerate(zip(plan.plans, tensors, strict=True)):
            state = TensorState(None, None, update)
            if states is not None and states_out is not None:
                state = TensorState(states[number], states_out[number], update)
            threshold = kernels.find_threshold(x, one, state) if one.is_variable else None
            sent = one.entries if threshold is None else int(threshold.counts.sum())
            layout = plan_layout(one, sent) if one.variable_length else plan.layouts[number]
            words = self._words[position : position + layout.nwords]
            if not kernels.encode_tensor_(x, words, TensorEncoding(one, layout, keys[number], threshold), state):
                return Status(Problem.STATE, tensor=number)
            position, entries = position + layout.nwords, entries + sent
        self._close_(position, Header(plan.digest, step, sequence, entries))
        return Status()

    def _close_(self, position: int, header: Header) -> None:
        """Zero the padding, and write the header with the checksum."""
        end = aligned(position)
        self._words[position:end] = 0
        _write_header_(self._words, header.pack((end - HEADER_NWORDS) * WORD_NBYTES))
        checksum = self._kernels.checksum(self._words[:end])
        self._words[CHECKSUM_WORD] = checksum - (checksum >> 31 << 32)


def _write_header_(words: Tensor, octets: bytes) -> None:
    words[:HEADER_NWORDS] = torch.from_numpy(np.frombuffer(octets, np.int32).copy())


class TensorLoopDecoder:
    """A :class:`flexcomm.kernels.base.BucketDecoder` that goes from sender to sender and from tensor to tensor."""

    def __init__(
        self,
        kernels: PerTensorKernels,
        plan: BufferPlan,
        words: Tensor,
        regions: Sequence[Region],
        decoded_as: BufferPlan,
    ) -> None:
        self._kernels, self._plan, self._decoded_as = kernels, plan, decoded_as
        self._words, self._regions = words, regions
        self.payloads: list[list[Payload]] = [
            [
                Payload(region.start + position, layout)
                for position, layout in zip(plan.positions, plan.layouts, strict=True)
            ]
            for region in regions
        ]
        """By sender, then by tensor. Where they are variable, :meth:`verify` finds them."""

    def verify(self, *, step: int, sequence: int) -> int:
        expected, flagged = self._plan.header(step, sequence), Status()
        headers = []
        for sender, region in enumerate(self._regions):
            words = self._words[region.start : region.end]
            octets = words[:HEADER_NWORDS].cpu().numpy().tobytes()
            received = RawHeader.unpack(octets)
            payload_nbytes = region.nwords * WORD_NBYTES - HEADER_NBYTES
            if octets != expected.matching(received).pack(payload_nbytes, self._kernels.checksum(words)):
                return Status(Problem.HEADER, sender).word
            if received.flags == NONFINITE and not flagged.word:
                flagged = Status(Problem.NONFINITE, sender)
            headers.append(received)
        if flagged.word:
            return flagged.word
        self.payloads = []
        for sender, received in enumerate(headers):
            problem = self._find_payloads(sender, received.entries)
            if problem.word:
                return problem.word
        return 0

    def decode_(self, outputs: Sequence[Tensor], *, step: int, average: Average) -> None:
        plan, keys = self._decoded_as, self._decoded_as.sample_keys(step)
        for number, (one, out) in enumerate(zip(plan.plans, outputs, strict=True)):
            payloads = [of_sender[number] for of_sender in self.payloads]
            self._kernels.decode_tensor_(self._words, payloads, one, keys[number], average, out)

    def _find_payloads(self, sender: int, announced: int) -> Status:
        """Check and note the payloads of a sender."""
        region, kernels, payloads = self._regions[sender], self._kernels, []
        position, entries = HEADER_NWORDS, 0
        for number, (one, layout) in enumerate(zip(self._plan.plans, self._plan.layouts, strict=True)):
            payload = Payload(region.start + position, layout)
            if one.is_variable:
                found = self._read_counts(region, position, one, layout)
                if isinstance(found, Problem):
                    return Status(found, sender, number)
                payload = found
            payloads.append(payload)
            position += payload.layout.nwords
            entries += one.entries if payload.counts is None else int(payload.counts.sum())
        if aligned(position) != region.nwords:
            return Status(Problem.LENGTH, sender)
        if entries != announced:
            return Status(Problem.ENTRIES, sender)
        for number, (one, payload) in enumerate(zip(self._plan.plans, payloads, strict=True)):
            problem = kernels.find_problem(self._words, payload, one)
            if problem:
                return Status(problem, sender, number)
        self.payloads.append(payloads)
        return Status()

    def _read_counts(self, region: Region, position: int, plan: TensorPlan, layout: Layout) -> Payload | Problem:
        """Return where a variable payload is, once its counts have been checked."""
        least = plan_layout(plan, 0) if plan.variable_length else layout
        if position + least.nwords > region.nwords:
            return Problem.LENGTH
        counts = self._kernels.read_counts(self._words, plan, region.start + position)
        if counts is None or int(counts.sum()) > plan.k:
            return Problem.COUNTS
        if plan.variable_length:
            layout = plan_layout(plan, int(counts.sum()))
        if position + layout.nwords > region.nwords:
            return Problem.LENGTH
        return Payload(region.start + position, layout, counts)
