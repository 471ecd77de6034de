"""Numbers that a user passes become Python's own, so that equal schedules compare, hash and print alike."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from flexcomm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["number_of", "real_number", "some_of", "whole_number"]

_SHOWN = 8


# Any, here and below: whether it is a number is the question.
def whole_number(value: Any, what: str) -> int:
    """Return ``value`` as an int; ``what`` names it in the error."""
    try:
        return int(operator.index(value))
    except TypeError as error:
        raise InvalidArgumentError(f"{what} is {value!r}, but must be a whole number.") from error


def real_number(value: Any, what: str) -> float:
    """Return ``value`` as a float; ``what`` names it in the error."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{what} is {value!r}, but must be a number.") from error


def number_of(things: str, value: Any, recipe: str) -> int:
    """Return ``value`` as an int from 1 on: of how many ``things`` the ``recipe`` is to be."""
    number = whole_number(value, f"the number of {things} of {recipe}")
    if number < 1:
        raise InvalidArgumentError(f"{recipe} was asked for {number} {things}, but needs at least one.")
    return number


def some_of(nodes: Sequence[int]) -> str:
    """Return the first few of many numbers, and how many more there are."""
    shown = ", ".join(str(node) for node in nodes[:_SHOWN])
    return shown + (f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else "")
