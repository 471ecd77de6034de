"""The DCT of 64 rows as straight-line vector code, for a vector's width of columns.

The lists of :mod:`flexcomm.kernels.butterflies` are unrolled while numba compiles, operation by operation, so the bits
are those of a loop over the list. A codelet has the signature of a loop, is called by its address, and is compiled
once: it works on SOURCE and TARGET of the job.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import llvmlite.binding as llvm
from llvmlite import ir
from numba.extending import intrinsic

from flexcomm.kernels import butterflies
from flexcomm.kernels.base import EpilogueKind
from flexcomm.kernels.cpu import tables as t
from flexcomm.kernels.cpu.compiler import LOOP, Int, Longs, cached_kernel
from flexcomm.kernels.cpu.instructions import Built, Instruction, emit_prefetch

Vectors = list[Any]

LENGTH = 64
"""How many rows a codelet transforms."""
LANES = 16 if llvm.get_host_cpu_features().get("avx512f") else 8
"""How many elements of each row: a vector."""
LINE = 16
"""Elements of a line of cache."""
SQUARE_BINS = 8 * LANES
"""Into how many running maxima :func:`dct_rows` sorts the magnitudes of a chunk: half of a core's registers."""

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


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
    """What a codelet is told by the numbers of a tensor and a job; loads and stores of vectors at addresses."""

    def __init__(self, builder: Any, row: Any, job: Any) -> None:
        self.builder = builder
        numbers = (t.SOURCE, t.TARGET, t.PITCH, t.STATE_AT, t.MAXIMA, t.AHEAD)
        self.source, self.target, self.pitch, self.state, self.maxima, self.ahead = (
            self._number(job, number) for number in numbers
        )
        self.decay, self.keep, self.lr = (self._spread(job, number) for number in (t.DECAY, t.KEEP, t.LR))
        self.factor = self._spread(row, t.FACTOR)

    def _number(self, numbers: Any, place: int) -> Any:
        return self.builder.load(self.builder.gep(numbers, [ir.Constant(_LONG, place)]))

    def _spread(self, numbers: Any, place: int) -> Any:
        """Return a vector of one float32, whose bits are given."""
        number = self.builder.bitcast(self.builder.trunc(self._number(numbers, place), _INT), _FLOAT)
        empty = ir.Constant(_VECTOR, ir.Undefined)
        single = self.builder.insert_element(empty, number, ir.Constant(_INT, 0))
        return self.builder.shuffle_vector(single, empty, ir.Constant(_INTS, [0] * LANES))

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

    def load_row(self, row: int) -> Any:
        """Return a row of a tile."""
        return self.load(self.at(self.source, LENGTH, row))

    def prefetch(self, row: int, pitch: Any) -> None:
        """Fetch a row of the next chunk; of shorter vectors, each call fetches a share of the rows, in whole lines."""
        if row < LENGTH * LANES // LINE:
            emit_prefetch(self.builder, self.at(self.ahead, pitch, row))

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
    builder, magnitude = emit.builder, ir.Constant(_INTS, [0x7FFFFFFF] * LANES)
    maxima = [emit.load(emit.maxima, _INTS)]

    def load(row: int) -> Any:
        x = emit.load(emit.at(emit.source, emit.pitch, row))
        maxima[0] = _larger(builder, builder.and_(builder.bitcast(x, _INTS), magnitude), maxima[0])
        return x

    finish = emit.store_columns(lambda lane: emit.at(emit.target, LENGTH, lane))
    _transform(builder, _FORWARD, load, finish, lambda row: emit.prefetch(row, emit.pitch))
    emit.store(maxima[0], emit.maxima)


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.icmp_signed(">", x, y), x, y)


def _dct_rows(emit: _Emitter, *, has_state: bool) -> None:
    builder, magnitude = emit.builder, ir.Constant(_INTS, [0x7FFFFFFF] * LANES)
    maxima: Vectors = [emit.load(emit.at(emit.maxima, LANES, number), _INTS) for number in range(SQUARE_BINS // LANES)]

    def finish(row: int, output: Any) -> None:
        y = builder.fmul(output, emit.factor)
        if has_state:
            y = builder.fadd(builder.fmul(emit.load(emit.at(emit.state, LENGTH, row)), emit.decay), y)
        emit.store(y, emit.at(emit.target, LENGTH, row))
        # Rows that follow each other go to different maxima: coefficients decrease from row to row, and the largest
        # should spread over as many maxima as there are.
        size, number = builder.and_(builder.bitcast(y, _INTS), magnitude), row % len(maxima)
        maxima[number] = _larger(builder, size, maxima[number])

    done: dict[int, Any] = {}
    fetch = (lambda row: emit.prefetch(row, LENGTH)) if has_state else None
    _transform(builder, _FORWARD, emit.load_row, done.__setitem__, fetch)
    for row in range(LENGTH):
        finish(row, done[row])
    for number, top in enumerate(maxima):
        emit.store(top, emit.at(emit.maxima, LANES, number))


def _idct_columns(emit: _Emitter) -> None:
    builder = emit.builder
    rows = [builder.load(builder.inttoptr(emit.at(emit.target, 2, lane), _LONG.as_pointer())) for lane in range(LANES)]
    _transform(builder, _BACK, emit.load_row, emit.store_columns(lambda lane: rows[lane]))


def _idct_rows(emit: _Emitter, *, kind: EpilogueKind) -> None:
    builder = emit.builder
    zero, sign = ir.Constant(_VECTOR, [0.0] * LANES), ir.Constant(_INTS, [-(2**31)] * LANES)

    def finish(row: int, output: Any) -> None:
        y, place = builder.fmul(output, emit.factor), emit.at(emit.target, emit.pitch, row)
        if kind == "sign_step":
            bits = builder.or_(builder.and_(builder.bitcast(y, _INTS), sign), builder.bitcast(emit.lr, _INTS))
            y = builder.select(builder.fcmp_unordered("==", y, zero), zero, builder.bitcast(bits, _VECTOR))
        if kind != "store":
            y = builder.fsub(builder.fmul(emit.load(place), emit.keep), y)
        emit.store(y, place)

    _transform(builder, _BACK, emit.load_row, finish, lambda row: emit.prefetch(row, emit.pitch))


def _flat(emit: _Emitter, *, program: butterflies.Program) -> None:
    builder, inputs = emit.builder, {}
    turned = emit.store_columns(lambda lane: emit.at(emit.target, LENGTH, lane))

    def load(number: int) -> Any:
        block = number // LANES * LANES
        if block not in inputs:
            rows = [emit.load(emit.at(emit.source, LENGTH, lane, block)) for lane in range(LANES)]
            inputs[block] = _turn(builder, rows)
        return inputs[block][number - block]

    _transform(builder, program, load, lambda number, x: turned(number, builder.fmul(x, emit.factor)))


def _unrolled(body: Callable[[_Emitter], None]) -> Instruction:
    """Return an instruction that is a codelet's code."""

    def build(_typing: Any, row: Any, job: Any) -> Built:  # noqa: ARG001  (numba takes the arguments' names from here)
        def emit(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
            body(_Emitter(builder, *given))
            return context.get_constant(LOOP.return_type, 0)

        return LOOP, emit

    return cast("Instruction", intrinsic(build))


_FORWARD, _BACK = butterflies.plan_dct(LENGTH), butterflies.plan_inverse_dct(LENGTH)
_columns, _columns_back = _unrolled(_dct_columns), _unrolled(_idct_columns)
_rows, _rows_and_state = (_unrolled(partial(_dct_rows, has_state=has_state)) for has_state in (False, True))
_rows_stored = _unrolled(partial(_idct_rows, kind="store"))
_rows_sign_step = _unrolled(partial(_idct_rows, kind="sign_step"))
_rows_plain_step = _unrolled(partial(_idct_rows, kind="plain_step"))
_flat_rows, _flat_rows_back = (_unrolled(partial(_flat, program=program)) for program in (_FORWARD, _BACK))


@cached_kernel
def dct_columns(row: Longs, job: Longs) -> Int:
    """The DCT down 64 rows of memory, which are PITCH apart; the result is turned: a column's coefficients are a row.

    MAXIMA are running maxima of the inputs' magnitudes, one for each lane.
    """
    return _columns(row, job)


@cached_kernel
def dct_rows(row: Longs, job: Longs) -> Int:
    """The DCT down the 64 rows of a tile, times FACTOR; MAXIMA are running maxima of the results' magnitudes."""
    return _rows(row, job)


@cached_kernel
def dct_rows_and_state(row: Longs, job: Longs) -> Int:
    """The same, added to DECAY times the state."""
    return _rows_and_state(row, job)


@cached_kernel
def idct_columns(row: Longs, job: Longs) -> Int:
    """The inverse DCT down the 64 rows of a tile; each lane's result is a row, whose address TARGET lists."""
    return _columns_back(row, job)


@cached_kernel
def idct_rows(row: Longs, job: Longs) -> Int:
    """The inverse DCT down the 64 rows of a tile, times FACTOR, to rows of memory, which are PITCH apart."""
    return _rows_stored(row, job)


@cached_kernel
def idct_rows_sign_step(row: Longs, job: Longs) -> Int:
    """The same, but rows of memory, times KEEP, take a step of LR against its sign."""
    return _rows_sign_step(row, job)


@cached_kernel
def idct_rows_plain_step(row: Longs, job: Longs) -> Int:
    """The same, but it is subtracted from rows of memory, times KEEP."""
    return _rows_plain_step(row, job)


@cached_kernel
def dct_flat(row: Longs, job: Longs) -> Int:
    """The DCT along some rows of 64 elements, one behind the other, times FACTOR: turned, transformed, turned back."""
    return _flat_rows(row, job)


@cached_kernel
def idct_flat(row: Longs, job: Longs) -> Int:
    """The inverse of :func:`dct_flat`."""
    return _flat_rows_back(row, job)
