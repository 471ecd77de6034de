"""The GPU's verbs: which kernels are launched, and what they are told."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from flexcomm.kernels.base import Problem
from flexcomm.kernels.gpu.launcher import (
    CupyLauncher,
    Job,
    LaunchConfig,
    Section,
    Term,
    load_transform,
    plan_chunk_launch,
    plan_item_launch,
)
from flexcomm.kernels.per_tensor import Payload, PerTensorKernels, TensorState
from flexcomm.kernels.plan import (
    BINS,
    NO_SAMPLE_KEY,
    SampleKey,
    Selection,
    TensorPlan,
    ThresholdCounts,
    ValueCode,
    check_implemented,
    choose_threshold,
    entries_before,
    threshold_bits,
)

_SELECTIONS = (Selection.EVERYTHING, Selection.TOP_K, Selection.THRESHOLD, Selection.RANDOM_K, Selection.STRIDING)
_CODES = (ValueCode.FP32, ValueCode.BF16, ValueCode.FP16, ValueCode.INT8, ValueCode.SIGN, ValueCode.SIGN2)
"""Those of the enumerations of ``codec.cu``, which has a branch for each."""
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""As ``codec.cu`` numbers them."""
_NO_PROBLEM = Problem.VALUE + 1
"""More than any problem of a payload: kernels leave the least they find."""
_LOW32 = (1 << 32) - 1
_PLAN_FIELDS = (
    *("rows", "cols", "chunk_rows", "chunk_cols", "grid_cols", "chunk_numel", "chunks"),
    *("transformed", "selection", "k", "values"),
)
"""Those that a job has of its plan, by the same name."""


class GpuKernels(PerTensorKernels):
    """Kernels compiled by NVRTC. ``threads`` is the most of a block, 256 or fewer; the bits do not depend on it."""

    name = "gpu"

    def __init__(self, launcher: CupyLauncher | None = None, threads: int = 256) -> None:
        self._launcher = CupyLauncher() if launcher is None else launcher
        self._threads = threads

    def find_threshold(self, x: Tensor, plan: TensorPlan, state: TensorState) -> ThresholdCounts:
        job = _coefficients_job(x, plan, NO_SAMPLE_KEY, state)

        def count(kernel: str, length: int, bound: int) -> Tensor:
            counts = torch.zeros(length, dtype=torch.int64, device=x.device)
            job.set(tau_bits=bound, counts=counts)
            self._launch_chunks(kernel, plan, job)
            return counts

        return choose_threshold(
            plan,
            count=partial(count, "count_chunks", plan.chunks),
            count_bins=partial(count, "histogram_of_chunks", BINS, threshold_bits(plan.tau)),
        )

    def encode_tensor_(
        self, x: Tensor, words: Tensor, payload: Payload, plan: TensorPlan, sample_key: SampleKey, state: TensorState
    ) -> bool:
        job, answer = _coefficients_job(x, plan, sample_key, state), _answer(x.device)
        job.set(words=words.zero_(), answer=answer, next_state=state.state_out)
        job.set(counts=payload.counts, tau_bits=payload.tau_bits, own=_section(job, payload))
        self._launch_chunks("encode_chunks", plan, job)
        return int(answer) == 0

    def read_counts(self, words: Tensor, plan: TensorPlan, start: int) -> Tensor | None:
        counts, answer = torch.empty(plan.chunks, dtype=torch.int64, device=words.device), _answer(words.device)
        job = _plan_job(plan)
        job.set(first=start, words=words, counts=counts, answer=answer)
        self._launch_items("read_counts", plan.chunks, job)
        return counts if int(answer) == 0 else None

    def find_problem(self, words: Tensor, payload: Payload, plan: TensorPlan) -> Problem:
        job, answer = _plan_job(plan), _answer(words.device, _NO_PROBLEM)
        job.set(words=words, answer=answer, own=_section(job, payload))
        self._launch_chunks("find_problems", plan, job)
        found = int(answer)
        return Problem.NONE if found == _NO_PROBLEM else Problem(found)

    def decode_tensor_(
        self, words: Tensor, payloads: list[Payload], plan: TensorPlan, key: SampleKey, divisor: int, out: Tensor
    ) -> None:
        # Kernels fill contiguous memory only.
        dense = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        job = _plan_job(plan, key)
        sections = _list_records([_section(job, payload) for payload in payloads], out.device)
        job.set(words=words, sections=sections, senders=len(payloads), divisor=divisor)
        job.set(element=_ELEMENTS[out.dtype], factor=plan.scale(1.0), memory=dense)
        _add_transforms(job, plan, inverse=True)
        self._launch_chunks("decode_chunks", plan, job)
        if dense is not out:
            out.copy_(dense)

    def checksum(self, words: Tensor) -> int:
        job, answer = Job(numel=words.numel()), _answer(words.device)
        job.set(words=words, answer=answer)
        self._launch_items("add_checksum", words.numel(), job)
        return int(answer) & _LOW32

    def mix_(
        self, x: Tensor, self_weight: float, others: Sequence[Tensor], weights: Sequence[float], out: Tensor
    ) -> Tensor:
        if x.numel() == 0:
            return torch.zeros((), dtype=torch.float64, device=x.device)
        terms = [
            Term(one.data_ptr(), weight)
            for one, weight in zip((x, *others), (self_weight, *weights), strict=True)
            if weight != 0.0
        ]
        # Each thread of a block has a float64 to add up.
        config = plan_item_launch(x.numel(), self._threads, shared_nbytes=8 * self._threads)
        distances = torch.empty(config.grid, dtype=torch.float64, device=x.device)
        job = Job(element=_ELEMENTS[x.dtype], numel=x.numel(), term_count=len(terms))
        job.set(memory=x, out=out, distances=distances, terms=_list_records(terms, x.device) if terms else None)
        self._launch("mix", config, job)
        return distances.sum()

    def _launch_items(self, kernel: str, items: int, job: Job) -> None:
        if items:
            self._launch(kernel, plan_item_launch(items, self._threads), job)

    def _launch_chunks(self, kernel: str, plan: TensorPlan, job: Job) -> None:
        if plan.chunks:
            shared_nbytes = self._launcher.shared_nbytes(job.device)
            self._launch(kernel, plan_chunk_launch(plan, self._threads, shared_nbytes), job)

    def _launch(self, kernel: str, config: LaunchConfig, job: Job) -> None:
        job.set(**config.fields)
        if config.workspace_words:
            job.set(workspace=torch.empty(config.workspace_words, dtype=torch.int32, device=job.device))
        self._launcher.launch(kernel, config, job)


def _plan_job(plan: TensorPlan, sample_key: SampleKey = NO_SAMPLE_KEY) -> Job:
    check_implemented("gpu", plan, _SELECTIONS, _CODES)
    return Job(
        **{name: getattr(plan, name) for name in _PLAN_FIELDS},
        value_bits=plan.values.format.bits,
        scales=plan.values.format.scales,
        count_bits=plan.chunk_numel.bit_length(),
        key=sample_key.key & _LOW32,
        start=sample_key.start,
    )


def _coefficients_job(x: Tensor, plan: TensorPlan, sample_key: SampleKey, state: TensorState) -> Job:
    """Return a job that can compute ``decay * state + gain * coefficients`` of ``x``."""
    job, (decay, gain, alpha) = _plan_job(plan, sample_key), state.update
    job.set(element=_ELEMENTS[x.dtype], decay=decay, factor=plan.scale(gain), stays=1.0 - alpha)
    job.set(memory=x.detach().contiguous(), state=state.state)
    _add_transforms(job, plan, inverse=False)
    return job


def _add_transforms(job: Job, plan: TensorPlan, *, inverse: bool) -> None:
    lengths = (plan.chunk_rows, plan.chunk_cols) if plan.transformed else (1, 1)
    job.down, job.along = (load_transform(one, job.device, inverse=inverse) for one in lengths)


def _section(job: Job, payload: Payload) -> Section:
    start, layout = payload.start, payload.layout
    begins = (start + layout.indices, start + layout.scales, start + layout.values)
    before = 0 if payload.counts is None else job.address_of(entries_before(payload.counts))
    return Section(*begins, *layout.coding, before)


def _list_records(records: Sequence[ctypes.Structure], device: torch.device) -> Tensor:
    """Return records one behind the other, in a device's memory."""
    host = torch.frombuffer(bytearray(b"".join(map(bytes, records))), dtype=torch.int64)
    # From pinned memory the copy is queued; from any other, the host would wait for all that is queued before it.
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def _answer(device: torch.device, start: int = 0) -> Tensor:
    return torch.full((), start, dtype=torch.int64, device=device)
