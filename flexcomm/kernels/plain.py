"""Writers and readers that prepare nothing: for kernel sets whose verbs cost the same either way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexcomm.kernels.base import Average, Fault, Kernels, Momentum, Payload, Survey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flexcomm.kernels.plan import Draw, Layout, TensorPlan

__all__ = ["PlainReader", "PlainWriter"]


class PlainWriter:
    """A :class:`Writer` by the verb of a kernel set."""

    def __init__(self, kernels: Kernels, words: Tensor, plan: TensorPlan, layout: Layout) -> None:
        self._kernels, self._words, self._plan, self._layout = kernels, words, plan, layout

    def encode_(self, x: Tensor, draw: Draw, momentum: Momentum, survey: Survey | None = None) -> bool:
        return self._kernels.encode_(x, self._words, self._plan, self._layout, draw, momentum, survey)


class PlainReader:
    """A :class:`Reader` by the verbs of a kernel set."""

    def __init__(self, kernels: Kernels, words: Tensor, payloads: Sequence[Payload], plan: TensorPlan) -> None:
        self._kernels, self._words, self._payloads, self._plan = kernels, words, payloads, plan

    def find_fault(self) -> Fault:
        faults = [self._kernels.find_fault(self._words, payload, self._plan) for payload in self._payloads]
        return min((fault for fault in faults if fault), default=Fault.NONE)

    def decode_(self, draw: Draw, average: Average, out: Tensor) -> None:
        self._kernels.decode_(self._words, self._payloads, self._plan, draw, average, out)
