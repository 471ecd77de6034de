"""Instructions that numba has no name for, and the DCT of 64 rows as straight-line vector code.

The lists of :mod:`flexcomm.kernels.butterflies` are unrolled while numba compiles, operation by operation, so the bits
are those of a loop over the list. Memory is given by address: kernels get tables of addresses, and code that works on
addresses is compiled once for all arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flexcomm.kernels import butterflies
from flexcomm.kernels.base import EpilogueKind

# Any: numba and llvmlite have no types to a type checker.
Built = tuple[Any, Callable[[Any, Any, Any, Any], Any]]
Instruction = Callable[..., Any]
Vectors = list[Any]

LENGTH = 64
"""How many rows a codelet transforms."""
LANES = 16 if llvm.get_host_cpu_features().get("avx512f") else 8
"""How many elements of each row: a vector."""
SQUARE_BINS = 8 * LANES
"""Into how many running maxima :func:`dct_rows` sorts the magnitudes of a chunk: half of a core's registers."""
WINDOW = 64
"""How many numbers :func:`reaching` looks at."""

_FLOAT, _BYTE, _INT, _LONG = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_VECTOR, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
LINE = 16
"""Elements of a line of cache."""
_TO_L2 = 2
"""LLVM's locality of a prefetch. Into the nearest cache is clearly slower: the chunk at work fills it."""


# --- instructions -----------------------------------------------------------------------------------------------------


def _count_bits(_typing: Any, window: Any) -> Built:  # noqa: ARG001  (numba takes the arguments' names from here)
    return types.uint64(types.uint64), lambda _context, builder, _signature, given: builder.ctpop(given[0])


def _lowest_bit(_typing: Any, window: Any) -> Built:  # noqa: ARG001
    is_zero_undefined = ir.Constant(ir.IntType(1), 0)
    return types.uint64(types.uint64), lambda _c, builder, _s, given: builder.cttz(given[0], is_zero_undefined)


def _pointer_to(_typing: Any, address: Any) -> Built:  # noqa: ARG001
    return types.voidptr(types.int64), lambda _c, builder, _s, given: builder.inttoptr(given[0], _BYTE.as_pointer())


def _call_loop(_typing: Any, loop: Any, row: Any, job: Any) -> Built:  # noqa: ARG001
    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        number = ir.IntType(64)
        kind = ir.FunctionType(number, [number.as_pointer()] * 2)
        pointers = [builder.inttoptr(address, number.as_pointer()) for address in given[1:]]
        return builder.call(builder.inttoptr(given[0], kind.as_pointer()), pointers)

    return types.int64(types.int64, types.int64, types.int64), build


def _reaching(_typing: Any, address: Any, bound: Any) -> Built:  # noqa: ARG001
    def build(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        numbers = ir.VectorType(_INT, WINDOW)
        loaded = builder.load(builder.inttoptr(given[0], numbers.as_pointer()), align=4)
        magnitudes = builder.and_(loaded, ir.Constant(numbers, [0x7FFFFFFF] * WINDOW))
        single = builder.insert_element(ir.Constant(numbers, ir.Undefined), given[1], ir.Constant(_INT, 0))
        bounds = builder.shuffle_vector(single, single, ir.Constant(numbers, [0] * WINDOW))
        return builder.bitcast(builder.icmp_signed(">=", magnitudes, bounds), ir.IntType(WINDOW))

    return types.uint64(types.int64, types.int32), build


def _prefetch(_typing: Any, address: Any) -> Built:  # noqa: ARG001
    def build(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        _emit_prefetch(builder, given[0])
        return context.get_dummy_value()

    return types.void(types.int64), build


def _emit_prefetch(builder: Any, address: Any) -> None:
    pointer, name = _BYTE.as_pointer(), "llvm.prefetch.p0"
    kind = ir.FunctionType(ir.VoidType(), [pointer, _INT, _INT, _INT])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    read, data = ir.Constant(_INT, 0), ir.Constant(_INT, 1)
    builder.call(function, [builder.inttoptr(address, pointer), read, ir.Constant(_INT, _TO_L2), data])


count_bits = cast("Instruction", intrinsic(_count_bits))
"""How many bits of an unsigned 64-bit number are set."""
lowest_bit = cast("Instruction", intrinsic(_lowest_bit))
"""The place of the lowest bit that is set; 64 if none is."""
pointer_to = cast("Instruction", intrinsic(_pointer_to))
"""An address, as what ``numba.carray`` takes."""
call_loop = cast("Instruction", intrinsic(_call_loop))
"""Call the loop whose machine code is at an address, with two addresses; see :func:`.compiler.address_of`."""
reaching = cast("Instruction", intrinsic(_reaching))
"""Which of the 64 float32 at an address reach a bound, given as bits, in magnitude: the first is the lowest bit."""
prefetch = cast("Instruction", intrinsic(_prefetch))
"""Have the line of cache at an address fetched."""


# --- codelets ---------------------------------------------------------------------------------------------------------


def _turn(builder: Any, rows: Vectors) -> Vectors:
    """Return the columns of as many rows as a vector has lanes."""
    size = 1
    while size < LANES:
        # Swap blocks of a growing size beside the diagonal.
        low = [place if not place & size else LANES + place - size for place in range(LANES)]
        high = [place + size if not place & size else LANES + place for place in range(LANES)]
        turned = list(rows)
        for i in range(LANES):
            if not i & size:
                for j, places in ((i, low), (i + size, high)):
                    mask = ir.Constant(_INTS, places)
                    turned[j] = builder.shuffle_vector(rows[i], rows[i + size], mask)
        rows, size = turned, 2 * size
    return rows


def _transform(
    builder: Any,
    program: butterflies.Program,
    load: Callable[[int], Any],
    finish: Callable[[int, Any], None],
    fetch: Callable[[int], None] | None = None,
) -> None:
    """Do the steps of a list: an input is loaded where it is used first, an output finished as soon as it is there.

    There are more rows than registers, and the compiler keeps to the order it is given: so the fewest are alive.
    ``fetch`` is called for each row, evenly spread: a core has room for few lines of cache that are on their way.
    """
    fetched = 0

    def times(factor: float, x: Any) -> Any:
        return builder.fmul(ir.Constant(_VECTOR, [float(factor)] * LANES), x)

    inputs = {int(row): number for number, row in enumerate(program.inputs)}
    outputs = {int(row): number for number, row in enumerate(program.outputs)}
    last = {row: number for number, (_, i, j) in enumerate(program.steps.tolist()) for row in (i, j)}
    rows: Vectors = [None] * program.height
    for number, (code, i, j) in enumerate(program.steps.tolist()):
        while fetch is not None and fetched * len(program.steps) <= number * LENGTH and fetched < LENGTH:
            fetch(fetched)
            fetched += 1
        c0, c1, c2, c3 = program.factors[number].tolist()
        for row in (i, j):
            rows[row] = load(inputs[row]) if rows[row] is None else rows[row]
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
        for row in {i, j}:
            if last[row] == number:
                finish(outputs[row], rows[row])


class _Emitter:
    """The arguments of a codelet, and loads and stores of vectors at their addresses."""

    def __init__(self, builder: Any, arguments: Any) -> None:
        self.builder = builder
        self.source, self.source_pitch, self.target, self.target_pitch = arguments[:4]
        self.state, self.tops, self.ahead, self.decay, self.factor, self.lr = arguments[4:]

    def at(self, memory: Any, pitch: Any, row: int, column: int = 0) -> Any:
        """Return the address of an element; a pitch is a number of elements."""
        builder = self.builder
        pitch = ir.Constant(_LONG, pitch) if isinstance(pitch, int) else pitch
        elements = builder.add(builder.mul(pitch, ir.Constant(_LONG, row)), ir.Constant(_LONG, column))
        return builder.add(memory, builder.shl(elements, ir.Constant(_LONG, 2)))

    def load(self, address: Any, kind: Any = _VECTOR) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)

    def store(self, x: Any, address: Any) -> None:
        self.builder.store(x, self.builder.inttoptr(address, x.type.as_pointer()), align=4)

    def spread(self, number: Any) -> Any:
        """Return a vector of one number."""
        empty = ir.Constant(_VECTOR, ir.Undefined)
        single = self.builder.insert_element(empty, number, ir.Constant(_INT, 0))
        return self.builder.shuffle_vector(single, empty, ir.Constant(_INTS, [0] * LANES))

    def load_row(self, row: int) -> Any:
        return self.load(self.at(self.source, self.source_pitch, row))

    def prefetch(self, row: int, pitch: Any) -> None:
        """Fetch a row of the next chunk; of shorter vectors, each call fetches a share of the rows, in whole lines."""
        if row < LENGTH * LANES // LINE:
            _emit_prefetch(self.builder, self.at(self.ahead, pitch, row))

    def store_columns(self, lane_at: Callable[[int], Any]) -> Callable[[int, Any], None]:
        """Return what takes outputs and, when a square of them is there, stores their columns from addresses on."""
        outputs: Vectors = [None] * LENGTH

        def finish(number: int, x: Any) -> None:
            outputs[number] = x
            block = number // LANES * LANES
            square = outputs[block : block + LANES]
            if all(one is not None for one in square):
                for lane, column in enumerate(_turn(self.builder, square)):
                    self.store(column, self.at(lane_at(lane), LENGTH, 0, block))

        return finish


def _dct_columns(emit: _Emitter) -> None:
    """``tops`` are running maxima of the inputs' magnitudes, one for each lane."""
    builder, magnitude = emit.builder, ir.Constant(_INTS, [0x7FFFFFFF] * LANES)
    tops = [emit.load(emit.tops, _INTS)]

    def load(row: int) -> Any:
        x = emit.load_row(row)
        tops[0] = _larger(builder, builder.and_(builder.bitcast(x, _INTS), magnitude), tops[0])
        return x

    finish = emit.store_columns(lambda lane: emit.at(emit.target, emit.target_pitch, lane))
    _transform(builder, _FORWARD, load, finish, lambda row: emit.prefetch(row, emit.source_pitch))
    emit.store(tops[0], emit.tops)


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.icmp_signed(">", x, y), x, y)


def _dct_rows(emit: _Emitter, *, of_state: bool) -> None:
    builder, decay, factor = emit.builder, emit.spread(emit.decay), emit.spread(emit.factor)
    magnitude = ir.Constant(_INTS, [0x7FFFFFFF] * LANES)
    tops: Vectors = [emit.load(emit.at(emit.tops, LANES, number), _INTS) for number in range(SQUARE_BINS // LANES)]

    def finish(row: int, output: Any) -> None:
        y = builder.fmul(output, factor)
        if of_state:
            y = builder.fadd(builder.fmul(emit.load(emit.at(emit.state, LENGTH, row)), decay), y)
        emit.store(y, emit.at(emit.target, LENGTH, row))
        # Rows that follow each other go to different maxima: coefficients decrease from row to row, and the largest
        # should spread over as many maxima as there are.
        size, number = builder.and_(builder.bitcast(y, _INTS), magnitude), row % len(tops)
        tops[number] = _larger(builder, size, tops[number])

    done: dict[int, Any] = {}
    fetch = (lambda row: emit.prefetch(row, LENGTH)) if of_state else None
    _transform(builder, _FORWARD, emit.load_row, done.__setitem__, fetch)
    for row in range(LENGTH):
        finish(row, done[row])
    for number, top in enumerate(tops):
        emit.store(top, emit.at(emit.tops, LANES, number))


def _idct_columns(emit: _Emitter) -> None:
    """Every lane's outputs go to a row of their own, whose address ``state`` holds."""
    builder = emit.builder
    places = [builder.load(builder.inttoptr(emit.at(emit.state, 2, lane), _LONG.as_pointer())) for lane in range(LANES)]
    _transform(builder, _BACK, emit.load_row, emit.store_columns(lambda lane: places[lane]))


def _idct_rows(emit: _Emitter, kind: EpilogueKind) -> None:
    """``decay`` is what is left of the elements that step."""
    builder, factor, keep, lr = emit.builder, *map(emit.spread, (emit.factor, emit.decay, emit.lr))
    zero, sign = ir.Constant(_VECTOR, [0.0] * LANES), ir.Constant(_INTS, [-(2**31)] * LANES)

    def finish(row: int, output: Any) -> None:
        y, place = builder.fmul(output, factor), emit.at(emit.target, emit.target_pitch, row)
        if kind == "sign_step":
            bits = builder.or_(builder.and_(builder.bitcast(y, _INTS), sign), builder.bitcast(lr, _INTS))
            y = builder.select(builder.fcmp_unordered("==", y, zero), zero, builder.bitcast(bits, _VECTOR))
        if kind != "store":
            y = builder.fsub(builder.fmul(emit.load(place), keep), y)
        emit.store(y, place)

    _transform(builder, _BACK, emit.load_row, finish, lambda row: emit.prefetch(row, emit.target_pitch))


def _flat(emit: _Emitter, program: butterflies.Program) -> None:
    """Transform the rows of a matrix of 64 columns: turned, as the columns of others are."""
    builder, factor, inputs = emit.builder, emit.spread(emit.factor), {}
    turned = emit.store_columns(lambda lane: emit.at(emit.target, LENGTH, lane))

    def load(number: int) -> Any:
        block = number // LANES * LANES
        if block not in inputs:
            rows = [emit.load(emit.at(emit.source, LENGTH, lane, block)) for lane in range(LANES)]
            inputs[block] = _turn(builder, rows)
        return inputs[block][number - block]

    _transform(builder, program, load, lambda number, x: turned(number, builder.fmul(x, factor)))


def _codelet(name: str, body: Callable[[_Emitter], None]) -> Instruction:
    """Return an instruction that calls a function of its own: inlined into a loop, it would be unrolled with it."""

    # numba takes the arguments' names from here.
    def build(
        _typing: Any,
        source: Any,  # noqa: ARG001
        source_pitch: Any,  # noqa: ARG001
        target: Any,  # noqa: ARG001
        target_pitch: Any,  # noqa: ARG001
        state: Any,  # noqa: ARG001
        tops: Any,  # noqa: ARG001
        ahead: Any,  # noqa: ARG001
        decay: Any,  # noqa: ARG001
        factor: Any,  # noqa: ARG001
        lr: Any,  # noqa: ARG001
    ) -> Built:
        def call(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
            builder.call(builder.module.globals.get(name) or define(builder.module), given)
            return context.get_dummy_value()

        def define(module: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [*[_LONG] * 7, *[_FLOAT] * 3])
            function = ir.Function(module, kind, name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            builder = ir.IRBuilder(function.append_basic_block())
            body(_Emitter(builder, function.args))
            builder.ret_void()
            return function

        places = (types.int64,) * 7
        return types.void(*places, *(types.float32,) * 3), call

    return cast("Instruction", intrinsic(build))


_FORWARD, _BACK = butterflies.plan_dct(LENGTH), butterflies.plan_inverse_dct(LENGTH)
dct_columns = _codelet("dct_columns", _dct_columns)
"""The DCT down 64 rows of memory, of some columns; the result is turned: each column's coefficients become a row."""
dct_rows = _codelet("dct_rows", partial(_dct_rows, of_state=False))
"""The DCT down the 64 rows of a tile, times ``factor``; ``tops`` are running maxima of magnitudes."""
dct_rows_of_state = _codelet("dct_rows_of_state", partial(_dct_rows, of_state=True))
"""The same, added to ``decay`` times the state."""
idct_columns = _codelet("idct_columns", _idct_columns)
"""The inverse DCT down the 64 rows of a tile; the result is turned."""
idct_rows = _codelet("idct_rows", partial(_idct_rows, kind="store"))
"""The inverse DCT down the 64 rows of a tile, times ``factor``, to rows of memory."""
idct_rows_sign_step = _codelet("idct_rows_sign_step", partial(_idct_rows, kind="sign_step"))
"""The same, but rows of memory, times ``decay``, take a step of ``lr`` against its sign."""
idct_rows_plain_step = _codelet("idct_rows_plain_step", partial(_idct_rows, kind="plain_step"))
"""The same, but it is subtracted from rows of memory, times ``decay``."""
dct_flat = _codelet("dct_flat", partial(_flat, program=_FORWARD))
"""The DCT along some rows of 64 elements, one behind the other, times ``factor``."""
idct_flat = _codelet("idct_flat", partial(_flat, program=_BACK))
"""The inverse of :func:`dct_flat`."""
