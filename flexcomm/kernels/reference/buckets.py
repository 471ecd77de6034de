"""Loops, on the host, over the tensors of a bucket: from the reference's verbs to the calls of a kernel set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexcomm.kernels.base import (
    LARGEST_MAGNITUDE,
    STORE,
    Average,
    Epilogue,
    Problem,
    States,
    StateUpdate,
    Status,
    Tensors,
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
    checksum_of,
    plan_layout,
)
from flexcomm.kernels.plan import NO_SAMPLE_KEY, ValueCode

if TYPE_CHECKING:
    from flexcomm.kernels.reference.kernels import ReferenceKernels


class TensorState(NamedTuple):
    """The state of one tensor, where its successor goes, and how they are related; None: nothing is kept."""

    state: Tensor | None
    state_out: Tensor | None
    update: StateUpdate


class Payload(NamedTuple):
    """One sender's payload of one tensor: where it begins in a tensor of words, and its layout.

    Where the number of entries depends on the data, also how many each chunk has and, to encode it, the bits of the
    threshold that they reach.
    """

    start: int
    layout: Layout
    counts: Tensor | None = None
    tau_bits: int = 0


class TensorLoopEncoder:
    """A :class:`flexcomm.kernels.base.BucketEncoder` that goes from tensor to tensor."""

    def __init__(self, kernels: ReferenceKernels, plan: BufferPlan, words: Tensor) -> None:
        self._kernels, self._plan, self._words = kernels, plan, words

    def encode_(
        self, tensors: Tensors, states: States, states_out: States, update: StateUpdate, *, step: int, sequence: int
    ) -> int:
        plan, kernels = self._plan, self._kernels
        for number, x in enumerate(tensors):
            if not _is_finite(x):
                return self._refuse_(Status(Problem.NONFINITE, tensor=number), step, sequence)
        # States that are updated in place change only if nothing is wrong with any tensor.
        written = [torch.empty_like(state) for state in states_out or ()]
        position, entries, keys = HEADER_NWORDS, 0, plan.sample_keys(step)
        for number, (one, x) in enumerate(zip(plan.plans, tensors, strict=True)):
            state = TensorState(None, None, update)
            if states is not None:
                state = TensorState(states[number], written[number], update)
            payload, sent = Payload(0, plan.layouts[number]), one.entries
            if one.variable_count:
                counts, tau_bits = kernels.find_threshold(x, one, state)
                sent = int(counts.sum())
                layout = plan_layout(one, sent) if one.variable_length else payload.layout
                payload = Payload(0, layout, counts, tau_bits)
            words = self._words[position : position + payload.layout.nwords]
            if not kernels.encode_tensor_(x, words, payload, one, keys[number], state):
                return self._refuse_(Status(Problem.STATE, tensor=number), step, sequence)
            position, entries = position + words.numel(), entries + sent
        for state_out, one_written in zip(states_out or (), written, strict=True):
            state_out.copy_(one_written)
        self._close_(position, Header(plan.digest, step, sequence, entries))
        return 0

    def _refuse_(self, status: Status, step: int, sequence: int) -> int:
        self.mark_nonfinite_(step=step, sequence=sequence)
        return status.word

    def rollback_(self, tensors: Tensors, states: Tensors, update: StateUpdate, *, step: int) -> None:
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
            sent = torch.empty_like(state)
            payloads = [decoder.payloads[0][number]]
            kernels.decode_tensor_(self._words, payloads, one.of_coefficients(), keys[number], 1, sent)
            state.add_(sent.mul_(update.alpha))
            # Sends everything, somewhere, and takes nothing of it out: what is left is what was accumulated.
            dense = one.sending_everything(ValueCode.FP32)
            payload = Payload(0, plan_layout(dense, dense.entries))
            words = torch.empty(payload.layout.nwords, dtype=torch.int32, device=state.device)
            kernels.encode_tensor_(x, words, payload, dense, NO_SAMPLE_KEY, TensorState(state, state, inverse))

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
        checksum = checksum_of(self._words[:end].cpu().numpy())
        self._words[CHECKSUM_WORD] = checksum - (checksum >> 31 << 32)


def _is_finite(x: Tensor) -> bool:
    # One reduction, without temporaries; it hands on what is not a number.
    return x.numel() == 0 or float(torch.linalg.vector_norm(x.detach(), torch.inf)) < LARGEST_MAGNITUDE


class TensorLoopDecoder:
    """A :class:`flexcomm.kernels.base.BucketDecoder` that goes from sender to sender and from tensor to tensor."""

    def __init__(
        self,
        kernels: ReferenceKernels,
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
        expected, headers = self._plan.header(step, sequence), []
        for sender, region in enumerate(self._regions):
            words = self._words[region.start : region.end]
            octets = words[:HEADER_NWORDS].cpu().numpy().tobytes()
            headers.append(Header.unpack(octets))
            payload_nbytes = region.nwords * WORD_NBYTES - HEADER_NBYTES
            if octets != expected.matching(headers[sender]).pack(payload_nbytes, checksum_of(words.cpu().numpy())):
                return Status(Problem.HEADER, sender).word
        for sender, header in enumerate(headers):
            if header.flags == NONFINITE:
                return Status(Problem.NONFINITE, sender).word
        self.payloads = []
        found = (self.find_payloads(sender, header.entries).word for sender, header in enumerate(headers))
        return next(filter(None, found), 0)

    def decode_(self, outputs: Tensors, *, step: int, average: Average, epilogue: Epilogue = STORE) -> None:
        plan, keys = self._decoded_as, self._decoded_as.sample_keys(step)
        divisor = len(self._regions) * self._summed if average == "nodes" else 0
        for number, (one, out) in enumerate(zip(plan.plans, outputs, strict=True)):
            payloads = [of_sender[number] for of_sender in self.payloads]
            stores = epilogue.kind == "store"
            filled = out if stores else torch.empty(out.shape, dtype=torch.float32, device=out.device)
            self._kernels.decode_tensor_(self._words, payloads, one, keys[number], divisor, filled)
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
