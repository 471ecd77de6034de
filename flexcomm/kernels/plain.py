"""Writers and readers that prepare nothing: for kernel sets whose verbs cost the same either way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexcomm.kernels.base import Average, Kernels, Momentum, Payload, PayloadError, ThresholdCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flexcomm.kernels.plan import Layout, SampleKey, TensorPlan

__all__ = ["PlainReader", "PlainWriter"]


class PlainWriter:
    """A :class:`Writer` by the verb of a kernel set."""

    def __init__(self, kernels: Kernels, words: Tensor, plan: TensorPlan, layout: Layout) -> None:
        self._kernels, self._words, self._plan, self._layout = kernels, words, plan, layout

    def encode_(
        self, x: Tensor, sample_key: SampleKey, momentum: Momentum, threshold: ThresholdCounts | None = None
    ) -> bool:
        return self._kernels.encode_(x, self._words, self._plan, self._layout, sample_key, momentum, threshold)


class PlainReader:
    """A :class:`Reader` by the verbs of a kernel set."""

    def __init__(self, kernels: Kernels, words: Tensor, payloads: Sequence[Payload], plan: TensorPlan) -> None:
        self._kernels, self._words, self._payloads, self._plan = kernels, words, payloads, plan

    def find_error(self) -> PayloadError:
        errors = [self._kernels.find_error(self._words, payload, self._plan) for payload in self._payloads]
        return min((error for error in errors if error), default=PayloadError.NONE)

    def decode_(self, sample_key: SampleKey, average: Average, out: Tensor) -> None:
        self._kernels.decode_(self._words, self._payloads, self._plan, sample_key, average, out)
