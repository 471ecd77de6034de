"""The GPU's verbs: which kernels are launched, and what they are told."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flexcomm.kernels.base import LARGEST_MAGNITUDE, Average, Problem
from flexcomm.kernels.counting import BIN_SHIFT, BINS, entries_before, fill_up, raise_threshold, threshold_bits
from flexcomm.kernels.gpu.jobs import (
    ELEMENTS,
    coefficients_job,
    elements_job,
    list_records,
    mix_job,
    plan_job,
    section_of,
)
from flexcomm.kernels.gpu.launcher import CupyLauncher, Launcher
from flexcomm.kernels.gpu.records import Job
from flexcomm.kernels.gpu.share import Share, plan_chunk_share, plan_item_share, plan_sum_share
from flexcomm.kernels.per_tensor import Payload, PerTensorKernels, TensorEncoding, TensorState, ThresholdCounts
from flexcomm.kernels.plan import NO_SAMPLE_KEY, SampleKey, TensorPlan

_EXPONENT = int(math.log2(LARGEST_MAGNITUDE))
_NONFINITE_BITS = {
    torch.float32: (127 + _EXPONENT) << 23,
    torch.bfloat16: (127 + _EXPONENT) << 7,
    torch.float16: 0x7C00,
    torch.float64: (1023 + _EXPONENT) << 52,
}
"""The least magnitude that is too large, as bits. All finite numbers of float16 are small enough."""
_NO_PROBLEM = 4
"""More than any problem of a payload: kernels leave the least they find."""
_LOW32 = (1 << 32) - 1


class GpuKernels(PerTensorKernels):
    """Kernels compiled by NVRTC. ``threads`` is the most of a block, 256 or fewer; the bits do not depend on it."""

    name = "gpu"

    def __init__(self, launcher: Launcher | None = None, threads: int = 256) -> None:
        self._launcher = CupyLauncher() if launcher is None else launcher
        self._threads = threads

    def is_finite(self, x: Tensor) -> bool:
        job = Job(element=ELEMENTS[x.dtype], numel=x.numel(), first=_NONFINITE_BITS[x.dtype])
        job.point(memory=x.detach().contiguous())
        return self._ask("find_unfit", x.numel(), job, x.device) == 0

    def find_threshold(self, x: Tensor, plan: TensorPlan, state: TensorState) -> ThresholdCounts:
        job, tau_bits = coefficients_job(x, plan, NO_SAMPLE_KEY, state), threshold_bits(plan.tau)
        counts, _ = self._count(job, plan, tau_bits, x.device)
        if int(counts.sum()) <= plan.k:
            return ThresholdCounts(counts, tau_bits)
        bins = torch.zeros(BINS, dtype=torch.int64, device=x.device)
        job.first = (tau_bits >> BIN_SHIFT) + 1
        job.point(counts=bins)
        self._launch_chunks("histogram_of_chunks", plan, job, x.device)
        raised = raise_threshold(bins, tau_bits, plan.k)
        low, high = self._count(job, plan, raised.low, x.device)
        return ThresholdCounts(fill_up(low, high, plan.k), raised.low)

    def encode_tensor_(self, x: Tensor, words: Tensor, encoding: TensorEncoding, state: TensorState) -> bool:
        plan, layout, sample_key, threshold = encoding
        words.zero_()
        answer, job = _answer(x.device), coefficients_job(x, plan, sample_key, state)
        job.point(words=words, answer=answer)
        if threshold is None:
            job.own = section_of(0, layout, None)
        else:
            before, job.tau_bits = entries_before(threshold.counts), threshold.tau_bits
            job.own = section_of(0, layout, before)
            job.point(counts=threshold.counts)
            self._launch_items("write_counts", plan.chunks, job, x.device)
        job.point(next_state=state.state_out)
        self._launch_chunks("encode_chunks", plan, job, x.device)
        return int(answer) == 0

    def read_counts(self, words: Tensor, plan: TensorPlan, start: int) -> Tensor | None:
        counts, job = torch.empty(plan.chunks, dtype=torch.int64, device=words.device), plan_job(plan)
        job.first = start
        job.point(words=words, counts=counts)
        return counts if self._ask("read_counts", plan.chunks, job, words.device) == 0 else None

    def find_problem(self, words: Tensor, payload: Payload, plan: TensorPlan) -> Problem:
        answer, job, before = _answer(words.device, _NO_PROBLEM), plan_job(plan), _before(payload)
        job.own = section_of(payload.start, payload.layout, before)
        job.point(words=words, answer=answer)
        self._launch_chunks("find_faults", plan, job, words.device)
        found = int(answer)
        # The kernel counts the problems of a payload from 1 on.
        return Problem.NONE if found == _NO_PROBLEM else Problem(Problem.INDEX + found - 1)

    def decode_tensor_(
        self,
        words: Tensor,
        payloads: Sequence[Payload],
        plan: TensorPlan,
        sample_key: SampleKey,
        average: Average,
        out: Tensor,
    ) -> None:
        dense, befores = _dense(out), [_before(payload) for payload in payloads]
        sections = [
            section_of(payload.start, payload.layout, before) for payload, before in zip(payloads, befores, strict=True)
        ]
        job = elements_job(dense, plan, sample_key)
        job.senders, job.by_contributors = len(payloads), int(average == "contributors")
        job.point(words=words, sections=list_records(sections, out.device))
        self._launch_chunks("decode_chunks", plan, job, out.device)
        if dense is not out:
            out.copy_(dense)

    def checksum(self, words: Tensor) -> int:
        job = Job(numel=words.numel())
        job.point(words=words)
        return self._ask("add_checksum", words.numel(), job, words.device) & _LOW32

    def mix_(
        self, x: Tensor, self_weight: float, others: Sequence[Tensor], weights: Sequence[float], out: Tensor
    ) -> Tensor:
        if x.numel() == 0:
            return torch.zeros((), dtype=torch.float64, device=x.device)
        terms = [term for term in zip((x, *others), (self_weight, *weights), strict=True) if term[1] != 0.0]
        job, share = mix_job(x, terms, out), plan_sum_share(x.numel(), self._threads)
        distances = torch.empty(share.grid, dtype=torch.float64, device=x.device)
        job.point(distances=distances)
        self._launch("mix", share, job, x.device)
        return distances.sum()

    def _count(self, job: Job, plan: TensorPlan, tau_bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return how many of each chunk reach the threshold, and how many reach the end of its bin."""
        counts = torch.zeros(2, plan.chunks, dtype=torch.int64, device=device)
        job.tau_bits = tau_bits
        job.point(counts=counts)
        self._launch_chunks("survey_chunks", plan, job, device)
        return counts[0], counts[1]

    def _ask(self, kernel: str, items: int, job: Job, device: torch.device) -> int:
        """Return what a kernel leaves in its answer, which is zero before; the host waits for it."""
        answer = _answer(device)
        job.point(answer=answer)
        self._launch_items(kernel, items, job, device)
        return int(answer)

    def _launch_items(self, kernel: str, items: int, job: Job, device: torch.device) -> None:
        if items:
            self._launch(kernel, plan_item_share(items, self._threads), job, device)

    def _launch_chunks(self, kernel: str, plan: TensorPlan, job: Job, device: torch.device) -> None:
        if plan.chunks:
            shared_nbytes = self._launcher.shared_nbytes(device)
            self._launch(kernel, plan_chunk_share(plan, self._threads, shared_nbytes), job, device)

    def _launch(self, kernel: str, share: Share, job: Job, device: torch.device) -> None:
        for field, value in share.fields.items():
            setattr(job, field, value)
        if share.workspace_words:
            job.point(workspace=torch.empty(share.workspace_words, dtype=torch.int32, device=device))
        self._launcher.launch(kernel, share.grid, share.threads, share.shared_nbytes, job, device)


def _before(payload: Payload) -> Tensor | None:
    return None if payload.counts is None else entries_before(payload.counts)


def _answer(device: torch.device, start: int = 0) -> Tensor:
    return torch.full((), start, dtype=torch.int64, device=device)


def _dense(target: Tensor) -> Tensor:
    """Return the target if kernels can fill it, else memory that they can."""
    return target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype, device=target.device)
