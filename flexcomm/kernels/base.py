"""What every kernel set does: the loops over one tensor's chunks, and nothing about buckets, headers or ranks."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flexcomm.kernels.plan import Layout, SampleKey, TensorPlan

__all__ = [
    "LARGEST_MAGNITUDE",
    "Average",
    "Kernels",
    "Momentum",
    "Payload",
    "PayloadError",
    "Reader",
    "ThresholdCounts",
    "Writer",
]

Average = Literal["nodes", "contributors"]
"""Divide a sum by the number of payloads, or by the number of those that sent the coefficient."""

LARGEST_MAGNITUDE = 2.0**100
"""Elements stay below this. A transform of up to 2**24 of them multiplies by at most 2**12, so no sum overflows."""


class PayloadError(IntEnum):
    """What is wrong with a payload."""

    NONE = 0
    INDEX = 1
    SCALE = 2
    VALUE = 3


class Momentum(NamedTuple):
    """What was not sent before, and how it joins what comes: ``decay * state + gain * coefficients``.

    ``state`` is float32 of ``plan.state_shape``; what is not sent now goes to ``next_state``, which may be the same
    memory. ``None``: nothing is remembered. Of what is sent, the share ``alpha`` is taken out.
    """

    state: Tensor | None = None
    next_state: Tensor | None = None
    decay: float = 1.0
    gain: float = 1.0
    alpha: float = 1.0


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


class Writer(Protocol):
    """The place of a payload that is written again and again."""

    def encode_(
        self, x: Tensor, sample_key: SampleKey, momentum: Momentum, threshold: ThresholdCounts | None = None
    ) -> bool:
        """Do what :meth:`Kernels.encode_` does."""
        ...


class Reader(Protocol):
    """The places of several senders' payloads of one tensor, which are read again and again."""

    def find_error(self) -> PayloadError:
        """Return what :meth:`Kernels.find_error` finds in any of them; of several errors, the first."""
        ...

    def decode_(self, sample_key: SampleKey, average: Average, out: Tensor) -> None:
        """Do what :meth:`Kernels.decode_` does."""
        ...


class Kernels(Protocol):
    """The loops, for one kind of device. Tensors of words are int32, contiguous; ``x`` may be any floating dtype.

    Every set computes the same bits: :func:`flexcomm.testing.check_kernels` compares one with the reference.
    """

    @property
    def name(self) -> str:
        """Return the name people force it by."""
        ...

    def is_finite(self, x: Tensor) -> bool:
        """Return whether every element is finite, its magnitude below ``LARGEST_MAGNITUDE``."""
        ...

    def find_threshold(self, x: Tensor, plan: TensorPlan, momentum: Momentum) -> ThresholdCounts:
        """Return what ``plan``, a variable one, will send of ``x``.

        If more than ``plan.k`` reach its threshold, the threshold rises to the bin at which ``plan.k`` are
        exceeded; of that bin so many are sent as there is room for, those of the first chunks and lowest indices.
        """
        ...

    def encode_(
        self,
        x: Tensor,
        words: Tensor,
        plan: TensorPlan,
        layout: Layout,
        sample_key: SampleKey,
        momentum: Momentum,
        threshold: ThresholdCounts | None = None,
    ) -> bool:
        """Fill ``words`` with the payload and move what it holds out of the state.

        Keeps ``decay * state + gain * coefficients == alpha * decoded + next_state``. False if something sent is not
        finite, which happens for a finite ``x`` only if the state was broken before.
        """
        ...

    def writer(self, words: Tensor, plan: TensorPlan, layout: Layout) -> Writer:
        """Return what fills ``words`` by :meth:`encode_`, with all prepared that does not depend on ``x``.

        A set that has nothing to prepare returns :class:`flexcomm.kernels.plain.PlainWriter`.
        """
        ...

    def read_counts(self, words: Tensor, plan: TensorPlan, start: int) -> Tensor | None:
        """Return the counts (int64) at the start of a variable payload; None if one exceeds a chunk."""
        ...

    def find_error(self, words: Tensor, payload: Payload, plan: TensorPlan) -> PayloadError:
        """Return what is wrong with a payload; of several errors, the first of the enumeration.

        Indices that do not increase, leave the chunk or are not as many as counted; scales that are negative or not
        finite; values that are not finite.
        """
        ...

    def decode_(
        self,
        words: Tensor,
        payloads: Sequence[Payload],
        plan: TensorPlan,
        sample_key: SampleKey,
        average: Average,
        out: Tensor,
    ) -> None:
        """Fill ``out`` with the average of faultless payloads, added in the order given and transformed back once."""
        ...

    def reader(self, words: Tensor, payloads: Sequence[Payload], plan: TensorPlan) -> Reader:
        """Return what reads these payloads, with all prepared that does not depend on what they hold."""
        ...

    def checksum(self, words: Tensor, first: int) -> int:
        """Return the sum, modulo 2**32, of every word scattered with its place; the first one's is ``first``."""
        ...

    def mix_(
        self, x: Tensor, self_weight: float, others: Sequence[Tensor], weights: Sequence[float], out: Tensor
    ) -> Tensor:
        """Fill ``out``, which may be ``x``, with ``self_weight * x + sum of weights[j] * others[j]``.

        Return the squared distance ``|out - x|^2`` from x as it was: a float64 scalar on its device, by the same pass.

        All are flat, contiguous, of one dtype and length; ``out`` may also be one of ``others``, but not overlap them
        otherwise. Terms are added in that order. Products and sums are rounded each, in float32 or, for float64, in
        float64, and the total once more to the dtype: every set gives the same ``out``, except that a NaN may be any
        NaN. What has weight 0 is left out, so that nothing it holds matters to ``out``; without any term ``out`` is 0.
        The distance is that of the rounded ``out``, added up in float64 in any order: sets, and numbers of threads,
        agree on it to rounding.
        """
        ...
