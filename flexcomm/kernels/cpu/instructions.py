"""Instructions that numba has no name for: bits, pointers, prefetching, and calls of a loop by its address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flexcomm.kernels.cpu.compiler import LOOP, Bytes, Floats, FullWords, Halves, Int, Ints, Longs

# Any: numba and llvmlite have no types to a type checker.
Built = tuple[Any, Callable[[Any, Any, Any, Any], Any]]
Instruction = Callable[..., Any]

WINDOW = 64
"""How many numbers :func:`reaching` looks at."""
_BYTE, _INT, _LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_TO_L2 = 2
"""LLVM's locality of a prefetch. Into the nearest cache is clearly slower: the chunk at work fills it."""


def _count_bits(_typing: Any, window: Any) -> Built:  # noqa: ARG001  (numba takes the arguments' names from here)
    return types.uint64(types.uint64), lambda _context, builder, _signature, given: builder.ctpop(given[0])


def _lowest_bit(_typing: Any, window: Any) -> Built:  # noqa: ARG001
    is_zero_undefined = ir.Constant(ir.IntType(1), 0)
    return types.uint64(types.uint64), lambda _c, builder, _s, given: builder.cttz(given[0], is_zero_undefined)


def _pointer(kind: Any) -> Any:
    def build(_typing: Any, address: Any) -> Built:  # noqa: ARG001
        return kind(types.int64), lambda context, builder, _s, given: builder.inttoptr(
            given[0], context.get_value_type(kind)
        )

    return intrinsic(build)


def _pointers(*elements: Any) -> Any:
    return [_pointer(types.CPointer(element)) for element in elements]  # type: ignore[no-untyped-call]


def _call_loop(_typing: Any, loop: Any, row: Any, job: Any) -> Built:  # noqa: ARG001
    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(_LONG, [_LONG.as_pointer()] * 2)
        return builder.call(builder.inttoptr(given[0], kind.as_pointer()), given[1:])

    return LOOP.return_type(types.int64, *LOOP.args), build


def _reaching(_typing: Any, address: Any, bound: Any) -> Built:  # noqa: ARG001
    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        numbers = ir.VectorType(_INT, WINDOW)
        loaded = builder.load(builder.inttoptr(given[0], numbers.as_pointer()), align=4)
        magnitudes = builder.and_(loaded, ir.Constant(numbers, [0x7FFFFFFF] * WINDOW))
        single = builder.insert_element(ir.Constant(numbers, ir.Undefined), given[1], ir.Constant(_INT, 0))
        bounds = builder.shuffle_vector(single, single, ir.Constant(numbers, [0] * WINDOW))
        return builder.bitcast(builder.icmp_signed(">=", magnitudes, bounds), ir.IntType(WINDOW))

    return types.uint64(types.int64, types.int32), build


def _fused(_typing: Any, factor: Any, y: Any, x: Any) -> Built:  # noqa: ARG001
    single = types.float32
    return single(single, single, single), lambda _context, builder, _s, given: emit_fused(builder, *given)


def emit_fused(builder: Any, factor: Any, y: Any, x: Any) -> Any:
    """Return ``factor * y + x``, rounded once, of floats or of vectors of them."""
    kind = x.type
    name = f"llvm.fma.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.fma.f32"
    function = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [factor, y, x])


def _prefetch(_typing: Any, address: Any) -> Built:  # noqa: ARG001
    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        emit_prefetch(builder, given[0])
        return context.get_dummy_value()

    return types.void(types.int64), build


def emit_prefetch(builder: Any, address: Any) -> None:
    pointer, name = _BYTE.as_pointer(), "llvm.prefetch.p0"
    kind = ir.FunctionType(ir.VoidType(), [pointer, _INT, _INT, _INT])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    read, data = ir.Constant(_INT, 0), ir.Constant(_INT, 1)
    builder.call(function, [builder.inttoptr(address, pointer), read, ir.Constant(_INT, _TO_L2), data])


count_bits = cast("Instruction", intrinsic(_count_bits))
"""How many bits of an unsigned 64-bit number are set."""
lowest_bit = cast("Instruction", intrinsic(_lowest_bit))
"""The place of the lowest bit that is set; 64 if none is."""
floats_at: Callable[[Int], Floats]
ints_at: Callable[[Int], Ints]
longs_at: Callable[[Int], Longs]
bytes_at: Callable[[Int], Bytes]
halves_at: Callable[[Int], Halves]
words_at: Callable[[Int], FullWords]
floats_at, ints_at, longs_at = _pointers(types.float32, types.int32, types.int64)
bytes_at, halves_at, words_at = _pointers(types.int8, types.uint16, types.uint32)
"""The memory at an address: a pointer, which is indexed like an array, and knows no length."""
pointer_to: Instruction = _pointer(types.voidptr)
"""An address, as what ``numba.carray`` takes."""
call_loop = cast("Instruction", intrinsic(_call_loop))
"""Call the loop or codelet whose machine code is at an address; see :func:`.compiler.address_of`."""
reaching = cast("Instruction", intrinsic(_reaching))
"""Which of the 64 float32 at an address reach a bound, given as bits, in magnitude: the first is the lowest bit."""
fused = cast("Instruction", intrinsic(_fused))
"""``factor * y + x`` of float32, rounded once; slow where the machine has no such instruction."""
prefetch = cast("Instruction", intrinsic(_prefetch))
"""Have the line of cache at an address fetched."""
