"""Squares of 64 by 64, and rows of 64, as vector code: the DCT, and what is done before and after it.

The lists of :mod:`flexcomm.kernels.butterflies` are unrolled while numba compiles, operation by operation, for as many
columns as a vector has lanes, so the bits are those of a loop over the list. A codelet is code inside of a loop: it is
given the numbers of a tensor and a job, and works on what the last ones of the job say, SOURCE and what follows. A tile
is a square of floats in cache, one row behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast, get_args

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from flexcomm.kernels import butterflies
from flexcomm.kernels.base import EpilogueKind
from flexcomm.kernels.cpu import tables as t
from flexcomm.kernels.cpu.compiler import LOOP
from flexcomm.kernels.cpu.instructions import Built, Instruction, emit_fused, emit_prefetch

Vectors = list[Any]

LENGTH = 64
"""The side of a square."""
SQUARE = LENGTH * LENGTH
LANES = 16 if llvm.get_host_cpu_features().get("avx512f") else 8
"""How many elements fit a vector."""
SQUARE_BINS = 8 * LANES
"""Into how many running maxima :func:`accumulate_tile` sorts the magnitudes of a chunk: half of a core's registers."""
_LINE = 16
"""Elements of a line of cache."""

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_FORWARD, _BACK = butterflies.plan_dct(LENGTH), butterflies.plan_inverse_dct(LENGTH)


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
    ``fetch`` is called for each number below 64, evenly spread: a core has room for few lines of cache on their way.
    """
    fetched = 0

    def factor(number: float) -> Any:
        return ir.Constant(_VECTOR, [number] * LANES)

    inputs = {int(row): number for number, row in enumerate(program.inputs)}
    outputs = {int(row): number for number, row in enumerate(program.outputs)}
    last = {row: number for number, (_, i, j) in enumerate(program.steps.tolist()) for row in (i, j)}
    rows: Vectors = [None] * program.height
    for number, (code, i, j) in enumerate(program.steps.tolist()):
        while fetch is not None and fetched * len(program.steps) <= number * LENGTH and fetched < LENGTH:
            fetch(fetched)
            fetched += 1
        c0, c1 = map(factor, program.factors[number].tolist())
        for row in (i, j):
            rows[row] = load(inputs[row]) if rows[row] is None else rows[row]
        x, y = rows[i], rows[j]
        if code == butterflies.BUTTERFLY:
            rows[i], rows[j] = builder.fadd(x, y), builder.fsub(x, y)
        elif code == butterflies.ROTATE:
            x = emit_fused(builder, c0, y, x)
            rows[j] = emit_fused(builder, c1, x, y)
            rows[i] = emit_fused(builder, c0, rows[j], x)
        elif code == butterflies.SCALE:
            rows[i] = builder.fmul(c0, x)
        else:
            rows[i] = emit_fused(builder, c0, y, x)
        for row in {i, j}:
            if last[row] == number:
                finish(outputs[row], rows[row])


class _Emitter:
    """What a codelet is told by the numbers of a tensor and a job; loads and stores of vectors at addresses."""

    def __init__(self, builder: Any, row: Any, job: Any) -> None:
        self.builder = builder
        self.source, self.target, self.turned, self.pitch = (
            self._number(job, number) for number in (t.SOURCE, t.TARGET, t.TURNED, t.PITCH)
        )
        self.state, self.ahead, self.state_ahead, self.maxima, self.rows, self.groups = (
            self._number(job, number)
            for number in (t.STATE_AT, t.AHEAD, t.STATE_AHEAD, t.MAXIMA, t.TURNED_ROWS, t.GROUPS)
        )
        self.epilogue = self._number(job, t.EPILOGUE)
        self.decay, self.keep, self.lr = (self._spread(job, number) for number in (t.DECAY, t.KEEP, t.LR))
        self.factor = self._spread(row, t.FACTOR)
        self.k = builder.bitcast(self._spread(row, t.K), _INTS)

    def _number(self, numbers: Any, place: int) -> Any:
        return self.builder.load(self.builder.gep(numbers, [ir.Constant(_LONG, place)]))

    def _spread(self, numbers: Any, place: int) -> Any:
        """Return a vector of one float32, whose bits are given."""
        number = self.builder.bitcast(self.builder.trunc(self._number(numbers, place), _INT), _FLOAT)
        empty = ir.Constant(_VECTOR, ir.Undefined)
        single = self.builder.insert_element(empty, number, ir.Constant(_INT, 0))
        return self.builder.shuffle_vector(single, empty, ir.Constant(_INTS, [0] * LANES))

    def at(self, memory: Any, pitch: Any, row: Any, column: Any = 0) -> Any:
        """Return the address of an element; a pitch is a number of elements."""
        builder = self.builder
        pitch, row, column = (ir.Constant(_LONG, one) if isinstance(one, int) else one for one in (pitch, row, column))
        return builder.add(memory, builder.shl(builder.add(builder.mul(pitch, row), column), ir.Constant(_LONG, 2)))

    def load(self, address: Any, kind: Any = _VECTOR) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)

    def store(self, x: Any, address: Any) -> None:
        self.builder.store(x, self.builder.inttoptr(address, x.type.as_pointer()), align=4)

    def magnitude(self, x: Any) -> Any:
        return self.builder.and_(self.builder.bitcast(x, _INTS), ir.Constant(_INTS, [0x7FFFFFFF] * LANES))

    def larger(self, x: Any, y: Any) -> Any:
        return self.builder.select(self.builder.icmp_signed(">", x, y), x, y)

    @contextmanager
    def each(self, count: Any) -> Iterator[Any]:
        """Repeat what is emitted inside; yields the number of the repetition."""
        count = ir.Constant(_LONG, count) if isinstance(count, int) else count
        with cgutils.for_range(self.builder, count) as loop:
            yield loop.index

    @contextmanager
    def each_group(self, count: Any = LENGTH // LANES) -> Iterator[tuple[Any, Any]]:
        """Repeat for every group of as many columns as a vector has lanes; yields its number and its first column."""
        with self.each(count) as group:
            yield group, self.builder.mul(group, ir.Constant(_LONG, LANES))

    def variable(self, value: Any) -> Any:
        """Return a place whose value may change from repetition to repetition: a register in the end."""
        return cgutils.alloca_once_value(self.builder, value)  # type: ignore[no-untyped-call]

    def fetching(self, memory: Any, pitch: Any, group: Any) -> Callable[[int], None]:
        """Return what fetches lines of a square, as one of the groups of columns; of all groups together, all of it.

        Row by row: the lines of a row are near each other in memory, and mostly in one page.
        """
        begin, lines = self.at(memory, pitch, self.builder.mul(group, ir.Constant(_LONG, LANES))), LENGTH // _LINE

        def fetch(number: int) -> None:
            row, line = divmod(number * LANES * lines // LENGTH, lines)
            if number * LANES * lines % LENGTH == 0:
                emit_prefetch(self.builder, self.at(begin, pitch, row, line * _LINE))

        return fetch

    def turning(self, lane_at: Callable[[int], Any]) -> Callable[[int, Any], None]:
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

    def reading(self, memory: Any, column: Any) -> Callable[[int], Any]:
        """Return what loads a row of a tile, from a column on."""
        return lambda row: self.load(self.at(memory, LENGTH, row, column))

    def transform_turned(self, program: butterflies.Program, ahead: Any, pitch: Any, factor: Any = None) -> None:
        """Transform the columns of TURNED, to TARGET."""
        with self.each_group() as (group, column):

            def finish(row: int, x: Any) -> None:
                y = self.builder.fmul(x, factor) if factor else x
                self.store(y, self.at(self.target, LENGTH, row, column))

            fetch = self.fetching(ahead, pitch, group)
            _transform(self.builder, program, self.reading(self.turned, column), finish, fetch)


def _load_square(emit: _Emitter) -> Any:
    builder, vectors = emit.builder, LENGTH // LANES
    tops = [emit.variable(ir.Constant(_INTS, [0] * LANES)) for _ in range(vectors)]
    with emit.each(LENGTH) as row:
        for number, top in enumerate(tops):
            x = emit.load(emit.at(emit.source, emit.pitch, row, number * LANES))
            emit.store(x, emit.at(emit.target, LENGTH, row, number * LANES))
            builder.store(emit.larger(emit.magnitude(x), builder.load(top)), top)
    largest = builder.load(tops[0])
    for top in tops[1:]:
        largest = emit.larger(largest, builder.load(top))
    kind, name = ir.FunctionType(_INT, [_INTS]), f"llvm.vector.reduce.smax.v{LANES}i32"
    reduced = builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [largest])  # type: ignore[no-untyped-call]
    return builder.zext(reduced, _LONG)


def _dct_square(emit: _Emitter) -> None:
    with emit.each_group() as (group, column):
        turned = emit.at(emit.turned, LENGTH, column)
        finish, fetch = emit.turning(partial(emit.at, turned, LENGTH)), emit.fetching(emit.ahead, emit.pitch, group)
        _transform(emit.builder, _FORWARD, emit.reading(emit.target, column), finish, fetch)
    emit.transform_turned(_FORWARD, emit.state_ahead, LENGTH)


def _accumulate_square(emit: _Emitter, *, has_state: bool) -> None:
    builder, count = emit.builder, SQUARE_BINS // LANES
    tops = [emit.variable(ir.Constant(_INTS, [0] * LANES)) for _ in range(count)]
    with emit.each(SQUARE // SQUARE_BINS) as block:
        for number, top in enumerate(tops):
            place = (SQUARE_BINS, block, number * LANES)
            y = builder.fmul(emit.load(emit.at(emit.target, *place)), emit.factor)
            if has_state:
                y = builder.fadd(builder.fmul(emit.load(emit.at(emit.state, *place)), emit.decay), y)
            emit.store(y, emit.at(emit.source, *place))
            builder.store(emit.larger(emit.magnitude(y), builder.load(top)), top)
    for number, top in enumerate(tops):
        emit.store(builder.load(top), emit.at(emit.maxima, LANES, number))


def _idct_square(emit: _Emitter) -> None:
    builder = emit.builder
    with emit.each_group(emit.groups) as (_, column):
        places = [emit.at(emit.rows, 2, builder.add(column, ir.Constant(_LONG, lane))) for lane in range(LANES)]
        rows = [builder.load(builder.inttoptr(place, _LONG.as_pointer())) for place in places]
        _transform(builder, _BACK, emit.reading(emit.source, column), emit.turning(rows.__getitem__))
    emit.transform_turned(_BACK, emit.ahead, emit.pitch, emit.factor)


def _step_square(emit: _Emitter) -> None:
    builder, kinds = emit.builder, get_args(EpilogueKind)
    zero, sign = ir.Constant(_VECTOR, [0.0] * LANES), ir.Constant(_INTS, [-(2**31)] * LANES)

    def stepped(kind: EpilogueKind, y: Any, place: Any) -> Any:
        if kind == "store":
            return y
        if kind == "sign_step":
            bits = builder.or_(builder.and_(builder.bitcast(y, _INTS), sign), builder.bitcast(emit.lr, _INTS))
            y = builder.select(builder.fcmp_unordered("==", y, zero), zero, builder.bitcast(bits, _VECTOR))
        return builder.fsub(builder.fmul(emit.load(place), emit.keep), y)

    for number, kind in enumerate(kinds):
        with (
            builder.if_then(builder.icmp_signed("==", emit.epilogue, ir.Constant(_LONG, number))),
            emit.each(LENGTH) as row,
        ):
            for column in range(0, LENGTH, LANES):
                place = emit.at(emit.source, emit.pitch, row, column)
                emit.store(stepped(kind, emit.load(emit.at(emit.target, LENGTH, row, column)), place), place)


def _flat(emit: _Emitter, *, program: butterflies.Program) -> None:
    builder, inputs = emit.builder, {}
    turned = emit.turning(lambda lane: emit.at(emit.target, LENGTH, lane))

    def load(number: int) -> Any:
        block = number // LANES * LANES
        if block not in inputs:
            rows = [emit.load(emit.at(emit.source, LENGTH, lane, block)) for lane in range(LANES)]
            inputs[block] = _turn(builder, rows)
        return inputs[block][number - block]

    _transform(builder, program, load, lambda number, x: turned(number, builder.fmul(x, emit.factor)))


def _find_bounds(emit: _Emitter) -> None:
    builder, signed = emit.builder, emit.builder.icmp_signed
    for block in range(0, LENGTH, LANES):
        rows = [emit.load(emit.at(emit.source, LENGTH, lane, block)) for lane in range(LANES)]
        for number, row in enumerate(_turn(builder, rows)):
            emit.store(emit.magnitude(row), emit.at(emit.target, LANES, block + number))
    top = emit.load(emit.target, _INTS)
    for number in range(1, LENGTH):
        top = emit.larger(emit.load(emit.at(emit.target, LANES, number), _INTS), top)
    zero, one = (ir.Constant(_INTS, [number] * LANES) for number in (0, 1))
    low, high = emit.variable(zero), emit.variable(builder.add(top, one))
    reaching_low, guesses = emit.variable(ir.Constant(_INTS, [LENGTH] * LANES)), emit.variable(ir.Constant(_INT, 0))
    again, after = builder.append_basic_block(), builder.append_basic_block()
    builder.branch(again)
    builder.position_at_end(again)
    least, most, number = builder.load(low), builder.load(high), builder.load(guesses)
    # The middle of the values finds the bound soonest; now and then that of their bits, in case it is near zero.
    sum_of_both = builder.fadd(builder.bitcast(least, _VECTOR), builder.bitcast(most, _VECTOR))
    middle = builder.bitcast(builder.fmul(sum_of_both, ir.Constant(_VECTOR, [0.5] * LANES)), _INTS)
    of_bits = signed("==", builder.and_(number, ir.Constant(_INT, 3)), ir.Constant(_INT, 3))
    guess = builder.select(of_bits, builder.lshr(builder.add(least, most), one), middle)
    builder.store(builder.add(number, ir.Constant(_INT, 1)), guesses)
    ceiling = builder.sub(most, one)
    guess = emit.larger(builder.select(signed("<", guess, ceiling), guess, ceiling), least)
    reaching = [zero] * 4
    for place in range(LENGTH):
        reaches = signed(">=", emit.load(emit.at(emit.target, LANES, place), _INTS), guess)
        reaching[place % 4] = builder.sub(reaching[place % 4], builder.sext(reaches, _INTS))
    count = builder.add(builder.add(*reaching[:2]), builder.add(*reaching[2:]))
    is_left = builder.and_(signed("!=", builder.load(reaching_low), emit.k), signed("<", least, ceiling))
    enough = builder.and_(signed(">=", count, emit.k), is_left)
    fewer = builder.and_(signed("<", count, emit.k), is_left)
    for held, chosen, value in ((low, enough, guess), (reaching_low, enough, count), (high, fewer, guess)):
        builder.store(builder.select(chosen, value, builder.load(held)), held)
    lanes = ir.IntType(LANES)
    builder.cbranch(builder.icmp_unsigned("!=", builder.bitcast(is_left, lanes), ir.Constant(lanes, 0)), again, after)
    builder.position_at_end(after)
    emit.store(builder.load(low), emit.maxima)


def _align_stack(builder: Any) -> None:
    """Have the stack begin where a vector may: spilled vectors that straddle lines of cache cost half as much again."""
    own = cgutils.alloca_once(builder, _VECTOR)  # type: ignore[no-untyped-call]
    own.align = 4 * LANES
    builder.asm(ir.FunctionType(ir.VoidType(), [own.type]), "", "r", [own], side_effect=True)


def _codelet(body: Callable[[_Emitter], Any]) -> Instruction:
    """Return an instruction that is a codelet's code; its value is what the body returns, or 0."""

    def build(_typing: Any, row: Any, job: Any) -> Built:  # noqa: ARG001  (numba takes the arguments' names from here)
        def emit(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
            _align_stack(builder)
            return body(_Emitter(builder, *given)) or context.get_constant(LOOP.return_type, 0)

        return LOOP, emit

    return cast("Instruction", intrinsic(build))


load_square = _codelet(_load_square)
"""Copy a square of floats at SOURCE, whose rows are PITCH apart, to TARGET; its value is the largest magnitude."""
dct_square = _codelet(_dct_square)
"""The DCT of TARGET, down the columns and then along the rows, which leaves it turned; TURNED is scratch."""
scale_square = _codelet(partial(_accumulate_square, has_state=False))
"""Fill the coefficients at SOURCE, FACTOR times those of TARGET, and MAXIMA of their magnitudes."""
accumulate_square = _codelet(partial(_accumulate_square, has_state=True))
"""The same, with DECAY times the state added."""
idct_square = _codelet(_idct_square)
"""The inverse DCT: of GROUPS of columns of SOURCE, to the rows of TURNED that TURNED_ROWS lists, then to TARGET."""
step_square = _codelet(_step_square)
"""Do the epilogue of a square at SOURCE, whose rows are PITCH apart, by its averages at TARGET."""
dct_flat = _codelet(partial(_flat, program=_FORWARD))
"""The DCT along some rows of 64 elements, one behind the other, times FACTOR: turned, transformed, turned back."""
idct_flat = _codelet(partial(_flat, program=_BACK))
"""The inverse of ``dct_flat``."""
find_bounds = _codelet(_find_bounds)
"""Of as many rows of 64 floats as a vector has lanes, one behind the other: the largest bounds that at least K of their
magnitudes reach, or bounds that exactly so many reach, as bits, to MAXIMA; TARGET is scratch."""
