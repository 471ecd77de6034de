"""Encoding: a header, and what a plan sends of each tensor, one payload behind the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexcomm.codec.checks import check_momenta, check_numbers, check_tensors
from flexcomm.codec.plan import BufferPlan, aligned
from flexcomm.codec.wire import HEADER_NWORDS, NONFINITE, WORD_NBYTES, BufferHeader, Header, plan_layout, to_words
from flexcomm.compress import sample_key_for
from flexcomm.errors import InvalidTensorError, NonFiniteError
from flexcomm.kernels import Kernels, Momentum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flexcomm.kernels import Layout, TensorPlan, Writer

__all__ = ["Encoder", "encode_bucket_", "mark_nonfinite_"]

_NO_MOMENTUM = Momentum()


class Encoder:
    """Fills one buffer again and again; it is checked and sliced once."""

    def __init__(self, plan: BufferPlan, buffer: Tensor, kernels: Kernels) -> None:
        self.buffer = buffer
        self._plan, self._kernels = plan, kernels
        self._words = _words_to_fill(plan, buffer)
        self._header = BufferHeader(self._words[: plan.nwords])
        self._writers = [
            self._writer_at(begin, one, layout)
            for begin, one, layout in zip(plan.positions, plan.plans, plan.layouts, strict=True)
        ]

    def encode_(self, tensors: Sequence[Tensor], momenta: Sequence[Momentum], *, step: int, sequence: int) -> int:
        """Do as :func:`encode_bucket_` does, with tensors and momenta known to be the plan's."""
        plan, kernels = self._plan, self._kernels
        check_numbers(step, sequence)
        nonfinite = [spec.name for spec, x in zip(plan.specs, tensors, strict=True) if not kernels.is_finite(x)]
        if nonfinite:
            raise NonFiniteError(
                f"NaN, infinity or a magnitude of 2**100 or more in {', '.join(nonfinite)}; nothing was changed. Skip "
                f"this step on every rank; if that happens often, lower the learning rate or the loss scale, or clip."
            )
        position, count = HEADER_NWORDS, 0
        for number, (spec, one, x, momentum) in enumerate(zip(plan.specs, plan.plans, tensors, momenta, strict=True)):
            threshold = kernels.find_threshold(x, one, momentum) if one.is_variable else None
            entries = one.entries if threshold is None else int(threshold.counts.sum())
            layout = plan_layout(one, entries) if one.variable_length else plan.layouts[number]
            writer = self._writer_at(position, one, layout) if plan.variable_length else self._writers[number]
            if not writer.encode_(x, sample_key_for(one, step, spec.name), momentum, threshold):
                raise NonFiniteError(
                    f"the state kept for {spec.name} holds NaN or infinity, and states of this bucket have changed: "
                    f"zero them all, or load them from a checkpoint."
                )
            position, count = position + layout.nwords, count + entries
        return self._close_(position, Header(plan.digest, step, sequence, count))

    def mark_nonfinite_(self, *, step: int, sequence: int) -> int:
        """Fill the buffer with the mark of a sender that has nonfinite values; return how many bytes are used."""
        check_numbers(step, sequence)
        end = HEADER_NWORDS if self._plan.variable_length else self._plan.nwords
        self._words[:end] = 0
        return self._close_(end, Header(self._plan.digest, step, sequence, 0, NONFINITE))

    def _writer_at(self, position: int, plan: TensorPlan, layout: Layout) -> Writer:
        return self._kernels.writer(self._words[position : position + layout.nwords], plan, layout)

    def _close_(self, position: int, header: Header) -> int:
        """Zero the padding, write header and checksum, and return how many bytes that is."""
        end = aligned(position)
        if position < end:
            self._words[position:end] = 0
        buffer_header = self._header if end == self._plan.nwords else BufferHeader(self._words[:end])
        buffer_header.write_(header, self._kernels)
        return end * WORD_NBYTES


def encode_bucket_(
    plan: BufferPlan,
    tensors: Sequence[Tensor],
    buffer: Tensor,
    *,
    step: int,
    sequence: int,
    kernels: Kernels,
    momenta: Sequence[Momentum] | None = None,
) -> int:
    """Fill ``buffer`` and move what it holds out of the states; return how many of its bytes are used.

    Whatever is wrong with the arguments raises before any state is touched: ``NonFiniteError``, naming the tensors, if
    one holds NaN. Only a state that holds NaN itself is found later.
    """
    momenta = [_NO_MOMENTUM] * len(tensors) if momenta is None else momenta
    check_tensors(plan, tensors, buffer.device)
    check_momenta(plan, momenta, buffer.device)
    return Encoder(plan, buffer, kernels).encode_(tensors, momenta, step=step, sequence=sequence)


def mark_nonfinite_(plan: BufferPlan, buffer: Tensor, *, step: int, sequence: int, kernels: Kernels) -> int:
    """Fill ``buffer`` with the mark of a sender that has nonfinite values; return how many of its bytes are used."""
    return Encoder(plan, buffer, kernels).mark_nonfinite_(step=step, sequence=sequence)


def _words_to_fill(plan: BufferPlan, buffer: Tensor) -> Tensor:
    # Kernels write where the plan says, without looking: too short a buffer would be written past its end.
    words = to_words(buffer)
    if words.numel() * WORD_NBYTES < plan.nbytes:
        raise InvalidTensorError(
            f"the buffer has {buffer.numel()} bytes, but the plan needs {plan.nbytes}: allocate plan.nbytes."
        )
    return words
