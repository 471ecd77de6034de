"""The DCT of 64 rows, eight lanes at a time, as one run of vector instructions.

The lists of :mod:`flexcomm.kernels.butterflies` are unrolled while numba compiles, operation by operation, so the bits
are those of a loop over the list. Between loading and storing, rows stay in registers or next to them, and a row's
place costs nothing: neither the order of a list's inputs and outputs nor, eight by eight, turning rows into columns
needs a pass of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flexcomm.kernels import butterflies

if TYPE_CHECKING:
    from collections.abc import Callable

    # Any: numba and llvmlite have no types to a type checker.
    Codelet = Callable[[Any, Any, Any, Any, Any, Any, Any], None]
    Vectors = list[Any]

__all__ = ["LANES", "LENGTH", "dct", "dct_of_turned", "dct_turned", "idct", "idct_of_turned", "idct_turned"]

LENGTH = 64
"""How many rows a codelet transforms."""
LANES = 8
"""How many elements of each row: a vector."""

_FLOAT, _PLACE = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_FLOATS = _FLOAT.as_pointer()

_PAIRS = ((0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15))
_FOURS = ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15))
_HALVES = ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))


def _turn(builder: Any, rows: Vectors) -> Vectors:
    """Return the columns of eight rows of eight."""

    def shuffle(x: Any, y: Any, places: tuple[int, ...]) -> Any:
        return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), LANES), places))

    pairs = [shuffle(rows[i], rows[i + 1], half) for i in (0, 2, 4, 6) for half in _PAIRS]
    fours = [shuffle(pairs[i], pairs[i + 2], half) for i in (0, 1, 4, 5) for half in _FOURS]
    return [shuffle(fours[i], fours[i + 4], half) for half in _HALVES for i in range(4)]


def _transform(builder: Any, program: butterflies.Program, inputs: Vectors) -> Vectors:
    """Return the outputs of a list."""

    def times(factor: float, x: Any) -> Any:
        return builder.fmul(ir.Constant(_VECTOR, [float(factor)] * LANES), x)

    rows: Vectors = [None] * program.height
    for row, x in zip(program.inputs, inputs, strict=True):
        rows[row] = x
    for (code, i, j), (c0, c1, c2, c3) in zip(program.steps.tolist(), program.factors.tolist(), strict=True):
        x, y = rows[i], rows[j]
        if code == butterflies.BUTTERFLY:
            rows[i], rows[j] = builder.fadd(x, y), builder.fsub(x, y)
        elif code == butterflies.MIX:
            rows[i] = builder.fadd(times(c0, x), times(c1, y))
            rows[j] = builder.fadd(times(c2, x), times(c3, y))
        elif code == butterflies.SCALE:
            rows[i] = times(c0, x)
        else:
            raise ValueError(f"codelets know no step {code}: lists of odd lengths have it, and need a loop.")
    return [rows[row] for row in program.outputs]


def _define(module: Any, name: str, program: butterflies.Program, *, of_turned: bool, turned: bool) -> Any:
    """Return a function of LLVM's that transforms eight lanes: from memory, to memory, times a factor."""
    kind = ir.FunctionType(ir.VoidType(), [_FLOATS, _PLACE, _FLOATS, _PLACE, _FLOAT])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    # Inlined into a loop over groups of lanes, it would be unrolled with it.
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    source, source_pitch, target, target_pitch, factor = function.args

    def place(memory: Any, pitch: Any, row: int, column: int) -> Any:
        offset = builder.add(builder.mul(pitch, ir.Constant(_PLACE, row)), ir.Constant(_PLACE, column))
        return builder.bitcast(builder.gep(memory, [offset]), _VECTOR.as_pointer())

    def places(memory: Any, pitch: Any, block: int, across: bool) -> Vectors:
        if across:
            return [place(memory, pitch, lane, block) for lane in range(LANES)]
        return [place(memory, pitch, block + row, 0) for row in range(LANES)]

    blocks = range(0, LENGTH, LANES)
    inputs: Vectors = []
    for block in blocks:
        loaded = [builder.load(at, align=4) for at in places(source, source_pitch, block, of_turned)]
        inputs += _turn(builder, loaded) if of_turned else loaded
    outputs = _transform(builder, program, inputs)
    every_lane = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    alone = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), factor, ir.Constant(ir.IntType(32), 0))
    factors = builder.shuffle_vector(alone, ir.Constant(_VECTOR, ir.Undefined), every_lane)
    for block in blocks:
        stored = [builder.fmul(x, factors) for x in outputs[block : block + LANES]]
        stored = _turn(builder, stored) if turned else stored
        for x, at in zip(stored, places(target, target_pitch, block, turned), strict=True):
            builder.store(x, at, align=4)
    builder.ret_void()
    return function


def _codelet(name: str, program: butterflies.Program, *, of_turned: bool = False, turned: bool = False) -> Codelet:
    """Return a codelet ``(source, begin, pitch, target, begin, pitch, factor)``.

    Row ``i`` begins ``i * pitch`` elements behind ``begin``. ``of_turned`` and ``turned`` say that memory holds the
    transposed matrix: there are eight rows then, of 64 elements each.
    """

    # numba takes the arguments' names from here.
    def build(
        _typing: Any,
        source: Any,
        source_begin: Any,  # noqa: ARG001
        source_pitch: Any,  # noqa: ARG001
        target: Any,
        target_begin: Any,  # noqa: ARG001
        target_pitch: Any,  # noqa: ARG001
        factor: Any,  # noqa: ARG001
    ) -> Any:
        def call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            known = builder.module.globals.get(name)
            function = known or _define(builder.module, name, program, of_turned=of_turned, turned=turned)
            here, there = (
                builder.gep(
                    context.make_array(signature.args[i])(context, builder, arguments[i]).data, [arguments[i + 1]]
                )
                for i in (0, 3)
            )
            builder.call(function, [here, arguments[2], there, arguments[5], arguments[6]])
            return context.get_dummy_value()

        place = types.int64
        return types.void(source, place, place, target, place, place, types.float32), call

    return cast("Codelet", intrinsic(build))


_FORWARD, _BACK = butterflies.plan_dct(LENGTH), butterflies.plan_inverse_dct(LENGTH)
dct = _codelet("dct", _FORWARD)
dct_turned = _codelet("dct_turned", _FORWARD, turned=True)
dct_of_turned = _codelet("dct_of_turned", _FORWARD, of_turned=True, turned=True)
idct = _codelet("idct", _BACK)
idct_turned = _codelet("idct_turned", _BACK, turned=True)
idct_of_turned = _codelet("idct_of_turned", _BACK, of_turned=True, turned=True)
