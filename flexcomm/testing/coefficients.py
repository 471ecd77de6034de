"""The coefficient domain, seen through a kernel set's own verbs: a plan that transforms nothing shows what is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from flexcomm.codec.wire import plan_layout
from flexcomm.kernels import NO_SAMPLE_KEY, Momentum, Payload, Selection, ThresholdCounts, ValueCode

if TYPE_CHECKING:
    from torch import Tensor

    from flexcomm.kernels import Kernels, Layout, SampleKey, TensorPlan

__all__ = ["NO_MOMENTUM", "Sent", "coefficients_of", "elements_of", "encode", "everything_of", "sent_coefficients"]

NO_MOMENTUM = Momentum()
_GARBAGE = -0x21524111


class Sent(NamedTuple):
    """A payload, alone in its words, and what the kernels said about it."""

    words: Tensor
    payload: Payload
    threshold: ThresholdCounts | None
    is_finite: bool


def encode(
    kernels: Kernels,
    x: Tensor,
    plan: TensorPlan,
    sample_key: SampleKey = NO_SAMPLE_KEY,
    momentum: Momentum = NO_MOMENTUM,
    layout: Layout | None = None,
) -> Sent:
    """Return the payload of ``x``; its words held garbage before, so a word that was forgotten shows."""
    threshold = kernels.find_threshold(x, plan, momentum) if plan.is_variable else None
    entries = int(threshold.counts.sum()) if threshold is not None and plan.variable_length else plan.entries
    layout = layout or plan_layout(plan, entries)
    words = torch.full((layout.nwords,), _GARBAGE, dtype=torch.int32, device=x.device)
    is_finite = kernels.encode_(x, words, plan, layout, sample_key, momentum, threshold)
    return Sent(words, Payload(0, layout, threshold and threshold.counts), threshold, is_finite)


def sent_coefficients(kernels: Kernels, sent: Sent, plan: TensorPlan, sample_key: SampleKey = NO_SAMPLE_KEY) -> Tensor:
    """Return the coefficients ``[chunks, chunk_numel]`` a payload carries, zero where it carries none."""
    found = torch.empty(plan.state_shape, device=sent.words.device)
    kernels.decode_(sent.words, [sent.payload], _flat(plan), sample_key, "nodes", found)
    return found


def coefficients_of(kernels: Kernels, x: Tensor, plan: TensorPlan, momentum: Momentum = NO_MOMENTUM) -> Tensor:
    """Return ``decay * state + gain * coefficients`` of ``x``, from which the plan will select."""
    whole = everything_of(plan)
    return sent_coefficients(kernels, encode(kernels, x, whole, momentum=momentum._replace(next_state=None)), whole)


def elements_of(kernels: Kernels, coefficients: Tensor, plan: TensorPlan) -> Tensor:
    """Return the elements ``[rows, cols]`` that have these coefficients."""
    whole = everything_of(plan)
    sent = encode(kernels, coefficients, _flat(whole))
    elements = torch.empty(plan.rows, plan.cols, device=coefficients.device)
    kernels.decode_(sent.words, [sent.payload], whole, NO_SAMPLE_KEY, "nodes", elements)
    return elements


def everything_of(plan: TensorPlan) -> TensorPlan:
    """Return the plan that cuts and transforms alike, but sends everything as it is."""
    return replace(
        plan,
        selection=Selection.EVERYTHING,
        k=plan.chunk_numel,
        values=ValueCode.FP32,
        tau=0.0,
        seed=0,
        variable_length=False,
    )


def _flat(plan: TensorPlan) -> TensorPlan:
    """Return the plan of a tensor whose elements are what the plan's coefficients are."""
    chunks, length = plan.state_shape
    return replace(plan, rows=1, cols=chunks * length, chunk_rows=1, chunk_cols=length, transformed=False)
