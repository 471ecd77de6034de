"""Small buckets for tests of the wire: sent by several nodes, opened by one, and sealed again after damage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flexcomm.codec import Decoder, Encoder, plan_buffer, to_words
from flexcomm.compress import TensorSpec
from flexcomm.errors import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flexcomm.compress import Compressor
    from flexcomm.kernels import Average, BufferPlan, Kernels

STEP, SEQUENCE = 11, 7


@dataclass(frozen=True)
class Gathered:
    """Buffers one behind the other, and how long each is."""

    plan: BufferPlan
    buffer: Tensor
    nbytes: list[int]

    @property
    def words(self) -> Tensor:
        return to_words(self.buffer)

    @property
    def senders(self) -> list[str]:
        return [f"node {node}" for node, _ in enumerate(self.nbytes)]


def specs_of(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"t{number}", tuple(x.shape), x.dtype) for number, x in enumerate(tensors))


def gather(
    compressor: Compressor,
    nodes: Sequence[Sequence[Tensor]],
    kernels: Kernels,
    states: Sequence[Sequence[Tensor]] | None = None,
    step: int = STEP,
) -> Gathered:
    """Return what an all-gather of the nodes' buffers leaves on every one of them."""
    plan = plan_buffer(specs_of(nodes[0]), compressor)
    buffers = []
    for node, tensors in enumerate(nodes):
        encoder = Encoder(plan, torch.empty(plan.nbytes, dtype=torch.uint8), kernels)
        held = None if states is None else states[node]
        if problem := encoder.encode_(tensors, held, held, step=step, sequence=SEQUENCE):
            raise NonFiniteError(problem)
        buffers.append(encoder.buffer[: encoder.nbytes])
    return Gathered(plan, torch.cat(buffers), [buffer.numel() for buffer in buffers])


def blank_states(plan: BufferPlan) -> list[Tensor]:
    return [torch.zeros(one.state_shape) for one in plan.plans]


def open_(
    gathered: Gathered, outs: Sequence[Tensor], kernels: Kernels, average: Average = "nodes", step: int = STEP
) -> None:
    decoder = Decoder(gathered.plan, gathered.buffer, gathered.senders, kernels, gathered.nbytes)
    if nonfinite := decoder.verify(step=step, sequence=SEQUENCE):
        raise NonFiniteError(f"{', '.join(nonfinite)} had NaN, infinity or too large a magnitude to send.")
    decoder.decode_(outs, step=step, average=average)


def opened(gathered: Gathered, kernels: Kernels, average: Average = "nodes", step: int = STEP) -> list[Tensor]:
    outs = [torch.full(spec.shape, torch.nan, dtype=spec.dtype) for spec in gathered.plan.specs]
    open_(gathered, outs, kernels, average, step)
    return outs
