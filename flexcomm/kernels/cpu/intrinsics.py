"""Instructions numba has no name for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

    # Any: numba and llvmlite have no types to a type checker.
    Built = tuple[Any, Callable[[Any, Any, Any, Any], Any]]
    Instruction = Callable[..., Any]

__all__ = ["WINDOW", "count_bits", "lowest_bit", "pointer_to", "reaching"]

WINDOW = 32
"""How many numbers :func:`reaching` looks at."""


def _count_bits(_typing: Any, window: Any) -> Built:  # noqa: ARG001  (numba takes the arguments' names from here)
    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), build


def _lowest_bit(_typing: Any, window: Any) -> Built:  # noqa: ARG001
    def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        is_zero_undefined = context.get_constant(types.boolean, False)
        return builder.cttz(arguments[0], is_zero_undefined)

    return types.uint64(types.uint64), build


def _reaching(_typing: Any, numbers: Any, begin: Any, bound: Any) -> Built:  # noqa: ARG001
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        vector = ir.VectorType(number, WINDOW)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        window = builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), vector.as_pointer()), align=4)
        alone = builder.insert_element(ir.Constant(vector, ir.Undefined), arguments[2], ir.Constant(number, 0))
        bounds = builder.shuffle_vector(alone, alone, ir.Constant(vector, [0] * WINDOW))
        bits = builder.bitcast(builder.icmp_signed(">=", window, bounds), ir.IntType(WINDOW))
        return builder.zext(bits, ir.IntType(64))

    return types.uint64(numbers, types.int64, types.int32), build


def _pointer_to(_typing: Any, address: Any) -> Built:  # noqa: ARG001
    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), build


count_bits = cast("Instruction", intrinsic(_count_bits))
"""How many bits of an unsigned 64-bit number are set."""

lowest_bit = cast("Instruction", intrinsic(_lowest_bit))
"""The place of the lowest bit that is set; 64 if none is."""

pointer_to = cast("Instruction", intrinsic(_pointer_to))
"""An address, as what ``numba.carray`` takes."""

reaching = cast("Instruction", intrinsic(_reaching))
"""Which of 32 numbers from ``begin`` on, of an array of int32, reach a bound: the first is the lowest bit."""
