"""Kernel sets that work tensor by tensor: loops, on the host, from their verbs to the calls on whole buckets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexcomm.kernels.base import (
    LARGEST_MAGNITUDE,
    STORE,
    Average,
    Epilogue,
    Problem,
    StateUpdate,
    Status,
    apply_epilogue_,
)
from flexcomm.kernels.layout import (
    CHECKSUM_WORD,
    HEADER_NBYTES,
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
from flexcomm.kernels.plan import NO_SAMPLE_KEY, SampleKey, TensorPlan, ThresholdCounts, ValueCode


class TensorState(NamedTuple):
    """The state of one tensor, where its successor goes, and how they are related; None: nothing is kept."""

    state: Tensor | None
    state_out: Tensor | None
    update: StateUpdate


class Payload(NamedTuple):
    """One sender's payload of one tensor, in a tensor of words: its start, its layout, its counts if they vary."""

    start: int
    layout: Layout
    counts: Tensor | None = None


class PerTensorKernels(ABC):
    """A kernel set by verbs that work on one tensor."""

    @abstractmethod
    def find_threshold(self, x: Tensor, plan: TensorPlan, state: TensorState) -> ThresholdCounts:
        """Return what ``plan``, a variable one, will send of ``x``, by ``choose_threshold``."""

    @abstractmethod
    def encode_tensor_(
        self,
        x: Tensor,
        words: Tensor,
        plan: TensorPlan,
        layout: Layout,
        sample_key: SampleKey,
        threshold: ThresholdCounts | None,
        state: TensorState,
    ) -> bool:
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
        divisor: int,
        out: Tensor,
    ) -> None:
        """Fill ``out`` with the average of sound payloads, added in the order given and transformed back once.

        The average over ``"nodes"`` is the sum divided by ``divisor``.
        """

    @abstractmethod
    def checksum(self, words: Tensor) -> int:
        """Return the sum that :func:`flexcomm.kernels.layout.checksum_of` returns."""

    def encoder(self, plan: BufferPlan, words: Tensor) -> TensorLoopEncoder:
        return TensorLoopEncoder(self, plan, words)

    def decoder(
        self,
        plan: BufferPlan,
        words: Tensor,
        regions: Sequence[Region],
        decoded_as: BufferPlan | None = None,
        summed: int = 1,
    ) -> TensorLoopDecoder:
        return TensorLoopDecoder(self, plan, words, regions, decoded_as or plan, summed)


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
        plan, kernels = self._plan, self._kernels
        # States that are updated in place change only if nothing is wrong with any tensor.
        written = [torch.empty_like(state) for state in states_out or ()]
        nonfinite = (number for number, x in enumerate(tensors) if not _is_finite(x))
        wrong = next((Status(Problem.NONFINITE, tensor=number) for number in nonfinite), None)
        position, entries, keys = HEADER_NWORDS, 0, plan.sample_keys(step)
        for number, one in enumerate(plan.plans if wrong is None else ()):
            state = TensorState(None, None, update)
            if states is not None:
                state = TensorState(states[number], written[number], update)
            x = tensors[number]
            threshold = kernels.find_threshold(x, one, state) if one.variable_count else None
            sent = one.entries if threshold is None else int(threshold.counts.sum())
            layout = plan_layout(one, sent) if one.variable_length else plan.layouts[number]
            words = self._words[position : position + layout.nwords]
            if not kernels.encode_tensor_(x, words, one, layout, keys[number], threshold, state):
                wrong = Status(Problem.STATE, tensor=number)
                break
            position, entries = position + layout.nwords, entries + sent
        if wrong is not None:
            self.mark_nonfinite_(step=step, sequence=sequence)
            return wrong.word
        for state_out, one_written in zip(states_out or (), written, strict=True):
            state_out.copy_(one_written)
        self._close_(position, Header(plan.digest, step, sequence, entries))
        return 0

    def rollback_(self, tensors: Sequence[Tensor], states: Sequence[Tensor], update: StateUpdate, *, step: int) -> None:
        plan, kernels, keys = self._plan, self._kernels, self._plan.sample_keys(step)
        header = Header.unpack(self._words[:HEADER_NWORDS].cpu().numpy().tobytes())
        own = Region("this rank", 0, HEADER_NWORDS + header.payload_nbytes // WORD_NBYTES)
        decoder = kernels.decoder(plan, self._words, [own])
        if plan.variable_count:
            decoder.payloads.clear()
            decoder.find_payloads(0, header.entries)
        inverse = StateUpdate(1.0 / update.decay, -update.gain / update.decay, 0.0)
        for number, (one, x, state) in enumerate(zip(plan.plans, tensors, states, strict=True)):
            # What was sent, as coefficients: payloads do not say whether these are to be transformed back.
            flat = replace(one, rows=1, cols=state.numel(), chunk_rows=1, chunk_cols=one.chunk_numel, transformed=False)
            sent = torch.empty(1, state.numel(), device=state.device)
            payload = decoder.payloads[0][number]
            kernels.decode_tensor_(self._words, [payload], flat, keys[number], "nodes", 1, sent)
            state.add_(sent.mul_(update.alpha).view_as(state))
            # Sends everything, somewhere, and takes nothing of it out: what is left is what was accumulated.
            dense = one.sending_everything(ValueCode.FP32)
            layout, state_of_tensor = plan_layout(dense, dense.entries), TensorState(state, state, inverse)
            words = torch.empty(layout.nwords, dtype=torch.int32, device=state.device)
            kernels.encode_tensor_(x, words, dense, layout, NO_SAMPLE_KEY, None, state_of_tensor)

    def mark_nonfinite_(self, *, step: int, sequence: int) -> None:
        end = HEADER_NWORDS if self._plan.variable_length else self._plan.nwords
        self._words[:end] = 0
        self._close_(end, Header(self._plan.digest, step, sequence, 0, NONFINITE))

    def _close_(self, position: int, header: Header) -> None:
        """Zero the padding, and write the header with the checksum."""
        end = aligned(position)
        self._words[position:end] = 0
        octets = header.pack((end - HEADER_NWORDS) * WORD_NBYTES)
        self._words[:HEADER_NWORDS] = torch.from_numpy(np.frombuffer(octets, np.int32).copy())
        checksum = self._kernels.checksum(self._words[:end])
        self._words[CHECKSUM_WORD] = checksum - (checksum >> 31 << 32)


def _is_finite(x: Tensor) -> bool:
    # One reduction, without temporaries; it hands on what is not a number.
    return x.numel() == 0 or float(torch.linalg.vector_norm(x.detach(), torch.inf)) < LARGEST_MAGNITUDE


class TensorLoopDecoder:
    """A :class:`flexcomm.kernels.base.BucketDecoder` that goes from sender to sender and from tensor to tensor."""

    def __init__(
        self,
        kernels: PerTensorKernels,
        plan: BufferPlan,
        words: Tensor,
        regions: Sequence[Region],
        decoded_as: BufferPlan,
        summed: int,
    ) -> None:
        self._kernels, self._plan, self._decoded_as, self._summed = kernels, plan, decoded_as, summed
        self._words, self._regions = words, regions
        places = list(zip(plan.positions, plan.layouts, strict=True))
        self.payloads = [
            [Payload(region.start + position, layout) for position, layout in places] for region in regions
        ]
        """By sender, then by tensor. Where they are variable, :meth:`verify` finds them."""

    def verify(self, *, step: int, sequence: int) -> int:
        expected, flagged = self._plan.header(step, sequence), Status()
        headers = []
        for sender, region in enumerate(self._regions):
            words = self._words[region.start : region.end]
            octets = words[:HEADER_NWORDS].cpu().numpy().tobytes()
            received = Header.unpack(octets)
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
            problem = self.find_payloads(sender, received.entries)
            if problem.word:
                return problem.word
        return 0

    def decode_(self, outputs: Sequence[Tensor], *, step: int, average: Average, epilogue: Epilogue = STORE) -> None:
        plan, keys, divisor = self._decoded_as, self._decoded_as.sample_keys(step), len(self._regions) * self._summed
        for number, (one, out) in enumerate(zip(plan.plans, outputs, strict=True)):
            payloads = [of_sender[number] for of_sender in self.payloads]
            stores = epilogue.kind == "store"
            filled = out if stores else torch.empty(out.shape, dtype=torch.float32, device=out.device)
            self._kernels.decode_tensor_(self._words, payloads, one, keys[number], average, divisor, filled)
            if not stores:
                apply_epilogue_(out, filled, epilogue)

    def find_payloads(self, sender: int, announced: int) -> Status:
        """Check and note the payloads of a sender."""
        region, payloads, position, entries = self._regions[sender], [], HEADER_NWORDS, 0
        for number, (one, layout) in enumerate(zip(self._plan.plans, self._plan.layouts, strict=True)):
            used, counts, sent = layout, None, one.entries
            if one.variable_count:
                least = plan_layout(one, 0) if one.variable_length else layout
                if position + least.nwords > region.nwords:
                    return Status(Problem.LENGTH, sender, number)
                counts = self._kernels.read_counts(self._words, one, region.start + position)
                if counts is None or (sent := int(counts.sum())) > one.k:
                    return Status(Problem.COUNTS, sender, number)
                used = plan_layout(one, sent) if one.variable_length else layout
                if position + used.nwords > region.nwords:
                    return Status(Problem.LENGTH, sender, number)
            payloads.append(Payload(region.start + position, used, counts))
            position, entries = position + used.nwords, entries + sent
        if aligned(position) != region.nwords:
            return Status(Problem.LENGTH, sender)
        if entries != announced:
            return Status(Problem.ENTRIES, sender)
        for number, (one, payload) in enumerate(zip(self._plan.plans, payloads, strict=True)):
            problem = self._kernels.find_problem(self._words, payload, one)
            if problem:
                return Status(problem, sender, number)
        self.payloads.append(payloads)
        return Status()
