"""Checks of what a bucket is to be filled from or into, before anything is."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING

import torch

from flexcomm.errors import InvalidArgumentError, InvalidTensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flexcomm.kernels import BufferPlan

__all__ = ["check_numbers", "check_outputs", "check_states", "check_tensors"]

_NUMBERS = 1 << 64


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


def check_outputs(plan: BufferPlan, tensors: Sequence[Tensor]) -> None:
    for spec, out in zip(plan.specs, tensors, strict=True):
        if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
            raise InvalidTensorError(f"the output {spec.name} is expanded, elements share memory: give it a clone.")
