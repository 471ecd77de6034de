"""Instructions numba has no name for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from numba import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

    # Any: numba and llvmlite have no types to a type checker.
    Built = tuple[Any, Callable[[Any, Any, Any, Any], Any]]
    Instruction = Callable[[Any], Any]

__all__ = ["count_bits", "lowest_bit"]


def _count_bits(_typing: Any, window: Any) -> Built:  # noqa: ARG001  (numba takes the arguments' names from here)
    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), build


def _lowest_bit(_typing: Any, window: Any) -> Built:  # noqa: ARG001
    def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        is_zero_undefined = context.get_constant(types.boolean, False)
        return builder.cttz(arguments[0], is_zero_undefined)

    return types.uint64(types.uint64), build


count_bits = cast("Instruction", intrinsic(_count_bits))
"""How many bits of an unsigned 64-bit number are set."""

lowest_bit = cast("Instruction", intrinsic(_lowest_bit))
"""The place of the lowest bit that is set; 64 if none is."""
