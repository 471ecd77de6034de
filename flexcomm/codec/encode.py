"""Encoding: a header, and what a plan sends of each tensor, one payload behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from flexcomm.codec.wire import to_words
from flexcomm.errors import InvalidArgumentError, InvalidTensorError, NonFiniteError
from flexcomm.kernels import LARGEST_MAGNITUDE, BufferPlan, Kernels, Problem, StateUpdate, Status
from flexcomm.kernels.layout import HEADER_NBYTES, WORD_NBYTES, Header

_PLAIN = StateUpdate()
_NUMBERS = 1 << 64


class Encoder:
    """Fills one buffer again and again; it is checked and sliced once."""

    def __init__(self, plan: BufferPlan, buffer: Tensor, kernels: Kernels) -> None:
        self.buffer = buffer
        self._plan, self._words = plan, to_words(buffer)
        # Kernels write where the plan says, without looking: too short a buffer would be written past its end.
        if self._words.numel() < plan.nwords:
            raise InvalidTensorError(
                f"the buffer has {buffer.numel()} bytes, but the plan needs {plan.nbytes}: allocate plan.nbytes."
            )
        self._kernel = kernels.encoder(plan, self._words[: plan.nwords])

    def encode_(
        self,
        tensors: Sequence[Tensor],
        states: Sequence[Tensor] | None = None,
        states_out: Sequence[Tensor] | None = None,
        update: StateUpdate = _PLAIN,
        *,
        step: int,
        sequence: int,
    ) -> str:
        """Do as :func:`encode_bucket_` does, with tensors and states known to be the plan's.

        Returns what is wrong with them, if anything is: then the buffer says that this sender has nothing to send.
        """
        status = int(self._kernel.encode_(tensors, states, states_out, update, step=step, sequence=sequence))
        return self._explain(Status.of(status), tensors) if status else ""

    def mark_nonfinite_(self, *, step: int, sequence: int) -> None:
        """Fill the buffer with the mark of a sender that has nothing to send."""
        self._kernel.mark_nonfinite_(step=step, sequence=sequence)

    @property
    def nbytes(self) -> int:
        """How many bytes of the buffer are filled."""
        if not self._plan.variable_length:
            return self._plan.nbytes
        header = Header.unpack(self._words[: HEADER_NBYTES // WORD_NBYTES].cpu().numpy().tobytes())
        return HEADER_NBYTES + header.payload_nbytes

    def _explain(self, status: Status, tensors: Sequence[Tensor]) -> str:
        if status.problem is Problem.STATE:
            return (
                f"the state kept for {self._plan.specs[status.tensor].name} holds NaN or infinity: zero all states, or "
                f"load them from a checkpoint."
            )
        names = [
            spec.name
            for spec, x in zip(self._plan.specs, tensors, strict=True)
            if not bool((x.abs() < LARGEST_MAGNITUDE).all())
        ]
        return (
            f"NaN, infinity or a magnitude of 2**100 or more in {', '.join(names)}; nothing was changed. Skip this "
            f"step on every rank; if that happens often, lower the learning rate or the loss scale, or clip."
        )


def encode_bucket_(
    plan: BufferPlan,
    tensors: Sequence[Tensor],
    buffer: Tensor,
    *,
    step: int,
    sequence: int,
    kernels: Kernels,
    states: Sequence[Tensor] | None = None,
    update: StateUpdate = _PLAIN,
) -> int:
    """Fill ``buffer`` and move what it holds out of the states; return how many of its bytes are used.

    Whatever is wrong with the arguments raises before any state is touched: ``NonFiniteError``, naming the tensors, if
    one holds NaN. Only a state that holds NaN itself is found later.
    """
    check_tensors(plan, tensors, buffer.device)
    check_states(plan, states, buffer.device)
    check_numbers(step, sequence)
    encoder = Encoder(plan, buffer, kernels)
    problem = encoder.encode_(tensors, states, states, update, step=step, sequence=sequence)
    if problem:
        raise NonFiniteError(problem)
    return encoder.nbytes


def check_tensors(plan: BufferPlan, tensors: Sequence[Tensor], device: torch.device) -> None:
    _check_number_of("tensors", len(tensors), plan)
    for spec, x in zip(plan.specs, tensors, strict=True):
        if tuple(x.shape) != spec.shape or x.dtype != spec.dtype:
            raise InvalidTensorError(
                f"{spec.name} is {x.dtype} {list(x.shape)}, but the plan is for {spec.dtype} {list(spec.shape)}: pass "
                f"tensors in the plan's order, and plan anew for one that has changed."
            )
        _check_device(spec.name, x, device)


def check_states(plan: BufferPlan, states: Sequence[Tensor] | None, device: torch.device) -> None:
    if states is None:
        return
    _check_number_of("states", len(states), plan)
    for spec, one, state in zip(plan.specs, plan.plans, states, strict=True):
        if state.dtype != torch.float32 or tuple(state.shape) != one.state_shape or not state.is_contiguous():
            raise InvalidTensorError(
                f"the state of {spec.name} is {state.dtype} {list(state.shape)}, but must be contiguous torch.float32 "
                f"{list(one.state_shape)}: make it from the bucket's plan, and reset one that was made for another."
            )
        _check_device(f"the state of {spec.name}", state, device)


def _check_number_of(what: str, count: int, plan: BufferPlan) -> None:
    if count != len(plan.specs):
        raise InvalidTensorError(
            f"the plan is for {len(plan.specs)} tensors, but {count} {what} were given: pass one for each of its specs."
        )


def _check_device(what: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise InvalidTensorError(
            f"{what} is on {x.device}, but the buffer is on {device}: move one of them, a bucket is on one device."
        )


def check_numbers(step: int, sequence: int) -> None:
    if type(step) is type(sequence) is int and 0 <= step < _NUMBERS and 0 <= sequence < _NUMBERS:
        return
    numbers = {"step": step, "sequence": sequence}
    wrong = [f"{name} is {number!r}" for name, number in numbers.items() if not _is_countable(number)]
    if wrong:
        raise InvalidArgumentError(f"{' and '.join(wrong)}, but must be a whole number from 0 to 2**64 - 1.")


def _is_countable(number: object) -> bool:
    return not isinstance(number, bool) and isinstance(number, Integral) and 0 <= int(number) < _NUMBERS
