"""Jobs that say all a plan, a tensor and payloads do; a block's share of them is filled in at the launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexcomm.kernels.gpu.programs import load_program
from flexcomm.kernels.gpu.records import Job, Section, Term
from flexcomm.kernels.layout import Layout
from flexcomm.kernels.per_tensor import TensorState
from flexcomm.kernels.plan import NO_SAMPLE_KEY, SampleKey, Selection, TensorPlan, ValueCode, check_implemented

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""As ``codec.cu`` numbers them."""
_SELECTIONS = (Selection.EVERYTHING, Selection.LARGEST, Selection.ABOVE, Selection.SHUFFLED, Selection.STRIDED)
_CODES = (ValueCode.FP32, ValueCode.BF16, ValueCode.FP16, ValueCode.INT8, ValueCode.SIGN, ValueCode.SIGN2)
"""Those of the enumerations of ``codec.cu``, which has a branch for each."""
_LOW32 = (1 << 32) - 1


def plan_job(plan: TensorPlan, sample_key: SampleKey = NO_SAMPLE_KEY) -> Job:
    check_implemented("gpu", plan, _SELECTIONS, _CODES)
    return Job(
        rows=plan.rows,
        cols=plan.cols,
        chunk_rows=plan.chunk_rows,
        chunk_cols=plan.chunk_cols,
        grid_cols=plan.grid_cols,
        chunk_numel=plan.chunk_numel,
        chunks=plan.chunks,
        transformed=int(plan.transformed),
        selection=int(plan.selection),
        k=plan.k,
        values=int(plan.values),
        value_bits=plan.values.format.bits,
        scales=plan.values.format.scales,
        count_bits=plan.chunk_numel.bit_length(),
        key=sample_key.key & _LOW32,
        start=sample_key.start,
    )


def coefficients_job(x: Tensor, plan: TensorPlan, sample_key: SampleKey, state: TensorState) -> Job:
    """Return a job that can compute ``decay * state + gain * coefficients`` of ``x``."""
    job = plan_job(plan, sample_key)
    job.element, job.decay, job.factor = ELEMENTS[x.dtype], state.update.decay, plan.scale(state.update.gain)
    job.stays = 1.0 - state.update.alpha
    job.point(memory=x.detach().contiguous(), state=state.state)
    _add_transforms(job, plan, x.device, inverse=False)
    return job


def elements_job(out: Tensor, plan: TensorPlan, sample_key: SampleKey) -> Job:
    """Return a job that can fill ``out``, which is contiguous, with the elements that have some coefficients."""
    job = plan_job(plan, sample_key)
    job.element, job.factor = ELEMENTS[out.dtype], plan.scale(1.0)
    job.point(memory=out)
    _add_transforms(job, plan, out.device, inverse=True)
    return job


def _add_transforms(job: Job, plan: TensorPlan, device: torch.device, *, inverse: bool) -> None:
    lengths = (plan.chunk_rows, plan.chunk_cols) if plan.transformed else (1, 1)
    job.down, job.along = (load_program(length, device, inverse=inverse) for length in lengths)


def section_of(start: int, layout: Layout, before: Tensor | None) -> Section:
    return Section(
        indices=start + layout.indices,
        scales=start + layout.scales,
        values=start + layout.values,
        code=int(layout.code),
        low_bits=layout.low_bits,
        entry_bits=layout.entry_bits,
        chunk_bits=layout.chunk_bits,
        before=0 if before is None else before.data_ptr(),
    )


def mix_job(x: Tensor, terms: Sequence[tuple[Tensor, float]], out: Tensor) -> Job:
    """Return a job that can fill ``out`` with the weighted sum of terms."""
    job = Job(element=ELEMENTS[x.dtype], numel=x.numel(), term_count=len(terms))
    job.point(memory=x, out=out)
    if terms:
        records = [Term(memory=term.data_ptr(), weight=weight) for term, weight in terms]
        job.point(terms=list_records(records, x.device))
    return job


def list_records(records: Sequence[Section] | Sequence[Term], device: torch.device) -> Tensor:
    """Return records one behind the other, in a device's memory."""
    host = torch.frombuffer(bytearray(b"".join(map(bytes, records))), dtype=torch.int64)
    # From pinned memory the copy is queued; from any other, the host would wait for all that is queued before it.
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
