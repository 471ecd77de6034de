"""Instructions of SASS that compute: with integers, bits, predicates and floats."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.gpu.emulator.numbers import (
    bf16_codes,
    count_bits,
    divides_slowly,
    flushed,
    fp16_codes,
    fp16_values,
    fused,
    highest_bit,
    reversed_bits,
    round_f64,
    shift_left,
    shift_right,
    to_integer,
)
from bench.gpu.emulator.sass.code import Instruction
from bench.gpu.emulator.sass.operands import (
    PT,
    VIEWS,
    Body,
    Get,
    SassWarp,
    is_predicate,
    joined,
    predicate_reader,
    predicate_row,
    reader,
    row_of,
    split,
    write,
    write_predicate,
)
from bench.gpu.emulator.warps import LANES, Lanes, Row, UnknownInstructionError

_WORD = 0xFFFFFFFF


def _computes(kinds: str, function: Callable[..., Row]) -> Callable[[Instruction], Body]:
    """Return what makes an instruction that computes its first operand from the others, of these kinds."""

    def make(one: Instruction) -> Body:
        row, sources = row_of(one.operands[0]), one.operands[1:]
        gets = [reader(text, kind) for text, kind in zip(sources, kinds, strict=False)]
        return lambda warp, lanes: write(warp, row, function(*[get(warp) for get in gets]), lanes)

    return make


def _make_sum(one: Instruction) -> Body:
    """Three numbers, with carries: of what is taken away, the complement and one are added."""
    result, carried, sources, carries = split(one.operands, 3)
    row, has_carry = row_of(result), ".X" in one.opcode
    gets = [_addend(text, negated_is_inverted=has_carry) for text in sources]
    carry_in = [predicate_reader(text) for text in carries] if has_carry else []
    carry_out = [predicate_row(text) for text in carried]

    def body(warp: SassWarp, lanes: Lanes) -> None:
        total = sum((get(warp) for get in (*gets, *carry_in)), np.zeros(1, np.uint64))
        write(warp, row, total.astype(np.uint32), lanes)
        for most, predicate in enumerate(carry_out):
            write_predicate(warp, predicate, total >> np.uint64(32) > most, lanes)

    return body


def _addend(text: str, *, negated_is_inverted: bool) -> Get:
    if text.startswith("-") and re.match(r"-(U?R|c\[)", text):
        get, one = reader(text[1:], "u"), np.uint64(0 if negated_is_inverted else 1)
        return lambda warp: (~get(warp)).astype(np.uint64) + one
    get = reader(text, "u")
    return lambda warp: get(warp).astype(np.uint64)


def _make_product(one: Instruction) -> Body:
    result, carried, sources, carries = split(one.operands, 3)
    row, modifiers = row_of(result), one.opcode.split(".")[1:]
    is_wide, is_high = "WIDE" in modifiers, "HI" in modifiers
    factor = "s" if is_wide and "U32" not in modifiers else "q"
    a, b = (reader(text, "i" if factor == "s" else "u") for text in sources[:2])
    c = reader(sources[2], "q") if is_wide or is_high else _addend(sources[2], negated_is_inverted="X" in modifiers)
    carry_in = [predicate_reader(text) for text in carries]

    def body(warp: SassWarp, lanes: Lanes) -> None:
        product = (a(warp).astype(VIEWS[factor]) * b(warp).astype(VIEWS[factor])).view(np.uint64)
        addend = c(warp)
        total = sum((get(warp) for get in carry_in), product + addend)
        if is_wide:
            write(warp, row, total, lanes)
            for text in carried:
                write_predicate(warp, predicate_row(text), total < addend, lanes)
        else:
            write(warp, row, (total >> np.uint64(32 if is_high else 0)).astype(np.uint32), lanes)

    return body


def _make_address(one: Instruction) -> Body:
    """A number shifted and another one added, or the upper half of that."""
    is_high, modifiers = ".HI" in one.opcode, one.opcode.split(".")
    extends = "SX32" in modifiers
    result, carried, sources, carries = split(one.operands, 4 if is_high and not extends else 3)
    row, shift = row_of(result), np.uint64(int(sources[-1], 0))
    low, b = reader(sources[0], "i" if extends else "u"), _addend(sources[1], negated_is_inverted=False)
    high = reader(sources[2], "u") if is_high and not extends else None
    carry_in = [predicate_reader(text) for text in carries]

    def body(warp: SassWarp, lanes: Lanes) -> None:
        a = low(warp)
        if extends:
            moved = (a.astype(np.int64) << shift.astype(np.int64)).view(np.uint64) >> np.uint64(32)
        elif high is not None:
            moved = joined(a, high(warp)) << shift >> np.uint64(32)
        else:
            moved = a.astype(np.uint64) << shift
        total = sum((get(warp) for get in carry_in), (moved & np.uint64(_WORD)) + b(warp))
        write(warp, row, total.astype(np.uint32), lanes)
        for text in carried:
            write_predicate(warp, predicate_row(text), total >> np.uint64(32) > 0, lanes)

    return body


def _make_shift(one: Instruction) -> Body:
    row, modifiers = row_of(one.operands[0]), one.opcode.split(".")[1:]
    low, by, high = (reader(text, "u") for text in one.operands[1:])
    is_left, is_high, wraps = modifiers[0] == "L", "HI" in modifiers, "W" in modifiers
    kind = next(one for one in modifiers if one in ("U32", "S32", "U64", "S64"))
    width = int(kind[1:])
    signed: type[np.integer[Any]] = np.int64 if kind[0] == "S" else np.uint64

    def body(warp: SassWarp, lanes: Lanes) -> None:
        distance, a, c = by(warp), low(warp), high(warp)
        if wraps:
            distance = distance & np.uint32(width - 1)
        if is_left:
            whole = joined(a, c) if is_high else a
            moved = shift_left(whole, distance, width if is_high else 32) >> np.uint64(32 if is_high else 0)
        elif width == LANES:
            moved = shift_right(c.view(np.int32) if kind[0] == "S" else c, distance, 32)
        else:
            moved = shift_right(joined(a, c).view(signed), distance, 64) >> signed(32 if is_high else 0)
        write(warp, row, moved.astype(np.uint32), lanes)

    return body


_OF_TWO: tuple[Callable[[Row, Row], Row], ...] = (
    lambda a, _: a ^ a,
    lambda a, b: ~(a | b),
    lambda a, b: ~a & b,
    lambda a, _: ~a,
    lambda a, b: a & ~b,
    lambda _, b: ~b,
    lambda a, b: a ^ b,
    lambda a, b: ~(a & b),
    lambda a, b: a & b,
    lambda a, b: ~(a ^ b),
    lambda _, b: b,
    lambda a, b: ~a | b,
    lambda a, _: a,
    lambda a, b: a | ~b,
    lambda a, b: a | b,
    lambda a, _: a | ~a,
)


def _bitwise(table: int) -> Callable[[Row, Row, Row], Row]:
    """Return the function of three bits whose results are in a table, by ``4 a + 2 b + c``."""
    without, with_c = (sum((table >> (2 * i + c) & 1) << i for i in range(4)) for c in (0, 1))
    if without == with_c:
        return lambda a, b, _: _OF_TWO[without](a, b)
    return lambda a, b, c: _OF_TWO[with_c](a, b) & c | _OF_TWO[without](a, b) & ~c


def _make_logic(one: Instruction) -> Body:
    operands = list(one.operands)
    predicate = predicate_row(operands.pop(0)) if is_predicate(operands[0]) else PT
    row, gets = row_of(operands[0]), [reader(text, "u") for text in operands[1:4]]
    function, also = _bitwise(int(operands[4], 0)), predicate_reader(operands[5])

    def body(warp: SassWarp, lanes: Lanes) -> None:
        value = function(*[get(warp) for get in gets])
        write(warp, row, value, lanes)
        write_predicate(warp, predicate, (value != 0) | also(warp), lanes)

    return body


def _make_predicate_logic(one: Instruction) -> Body:
    rows = [predicate_row(text) for text in one.operands[:2]]
    gets = [predicate_reader(text) for text in one.operands[2:5]]
    functions = [_bitwise(int(text, 0)) for text in one.operands[5:]]

    def body(warp: SassWarp, lanes: Lanes) -> None:
        values = [get(warp) for get in gets]
        found = [function(*values) for function in functions]
        for row, value in zip(rows, found, strict=True):
            write_predicate(warp, row, value, lanes)

    return body


def _ordered(compare: Callable[[Row, Row], Row]) -> Callable[[Row, Row], Row]:
    return lambda a, b: compare(a, b) & (a == a) & (b == b)


def _not(compare: Callable[[Row, Row], Row]) -> Callable[[Row, Row], Row]:
    return lambda a, b: ~compare(a, b)


_COMPARES: dict[str, Callable[[Row, Row], Row]] = {
    "EQ": np.equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "NAN": lambda a, b: (a != a) | (b != b),
    "NE": _ordered(np.not_equal),
    "NEU": np.not_equal,
    "EQU": _not(_ordered(np.not_equal)),
    "LTU": _not(np.greater_equal),
    "LEU": _not(np.greater),
    "GTU": _not(np.less_equal),
    "GEU": _not(np.less),
}
_JOINS: dict[str, Callable[[Row, Row], Row]] = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}


def _make_comparison(one: Instruction) -> Body:
    name, how, *modifiers = one.opcode.split(".")
    kind = "f" if name == "FSETP" else "d" if name == "DSETP" else "u" if "U32" in modifiers else "i"
    compare, join = _COMPARES[how], next(_JOINS[text] for text in modifiers if text in _JOINS)
    rows = [predicate_row(text) for text in one.operands[:2]]
    a, b = (reader(text, kind) for text in one.operands[2:4])
    also = predicate_reader(one.operands[4])
    lower = predicate_reader(one.operands[5]) if "EX" in modifiers else None
    flushes = "FTZ" in modifiers

    def body(warp: SassWarp, lanes: Lanes) -> None:
        x, y = a(warp), b(warp)
        if flushes:
            x, y = flushed(x), flushed(y)
        found = compare(x, y)
        if lower is not None:
            # Of numbers of 64 bits, the upper halves; the lower ones decide where these are equal.
            found = np.where(x == y, lower(warp), found)
        others = also(warp)
        write_predicate(warp, rows[0], join(found, others), lanes)
        write_predicate(warp, rows[1], join(~found, others), lanes)

    return body


def _make_choice(one: Instruction) -> Body:
    row, (a, b) = (
        row_of(one.operands[0]),
        (reader(text, "f" if one.opcode == "FSEL" else "u") for text in one.operands[1:3]),
    )
    chooses = predicate_reader(one.operands[3])
    return lambda warp, lanes: write(warp, row, np.where(chooses(warp), a(warp), b(warp)), lanes)


def _make_extreme(one: Instruction) -> Body:
    """The least or largest of two or three numbers, or of a sum and another."""
    name, *modifiers = one.opcode.split(".")
    sources = [text for text in one.operands[1:-1] if not is_predicate(text)]
    is_float = name.startswith("F")
    kind = "f" if is_float else "u" if "U32" in modifiers else "i"
    row, gets, is_least = (
        row_of(one.operands[0]),
        [reader(text, kind) for text in sources],
        predicate_reader(one.operands[-1]),
    )
    prefers_numbers = is_float and "NAN" not in modifiers
    least, most = (np.fmin, np.fmax) if prefers_numbers else (np.minimum, np.maximum)

    def body(warp: SassWarp, lanes: Lanes) -> None:
        first, *others = [get(warp) for get in gets]
        if "ADD" in name:
            first = first + others.pop(0)
        for other in others:
            first = np.where(is_least(warp), least(first, other), most(first, other))
        write(warp, row, first, lanes)

    return body


def _make_bytes(one: Instruction) -> Body:
    row, (a, selector, b) = row_of(one.operands[0]), (reader(text, "u") for text in one.operands[1:])

    def body(warp: SassWarp, lanes: Lanes) -> None:
        octets, chosen, result = joined(a(warp), b(warp)), selector(warp), np.zeros(LANES, np.uint32)
        for i in range(4):
            code = chosen >> np.uint32(4 * i) & np.uint32(15)
            octet = octets >> (8 * (code & 7)).astype(np.uint64) & np.uint64(0xFF)
            octet = np.where(code >= 8, (octet >> np.uint64(7)) * np.uint64(0xFF), octet)
            result |= (octet << np.uint64(8 * i)).astype(np.uint32)
        write(warp, row, result, lanes)

    return body


def _make_half_constant(one: Instruction) -> Body:
    """``HFMA2 R, -RZ, RZ, high, low``: what the compiler makes of moving a constant."""
    if one.operands[1:3] != ("-RZ", "RZ"):
        raise UnknownInstructionError(one.opcode)
    high, low = (int(np.array(float(text), np.float16).view(np.uint16)) for text in one.operands[3:])
    row, value = row_of(one.operands[0]), np.full(1, high << 16 | low, np.uint32)
    return lambda warp, lanes: write(warp, row, value, lanes)


# --- conversions -----------------------------------------------------------------------------------------------------


def _make_float_of_integer(one: Instruction) -> Body:
    modifiers = one.opcode.split(".")[1:]
    kind = (
        "q"
        if "U64" in modifiers
        else "s"
        if "S64" in modifiers
        else "u"
        if {"U8", "U16", "U32"} & {*modifiers}
        else "i"
    )
    row, get, is_double = row_of(one.operands[0]), reader(one.operands[1], kind), "F64" in modifiers
    narrow = next((int(text[1:]) for text in modifiers if text in ("U8", "U16")), 32)
    rounding = next((text for text in modifiers if text in ("RP", "RM", "RZ")), "")

    def body(warp: SassWarp, lanes: Lanes) -> None:
        value = get(warp)
        if narrow < LANES:
            value = value & np.uint32((1 << narrow) - 1)
        if kind in "qs":
            # A float64 has fewer bits: the last one stands for those below it, so that they are rounded once.
            below = value.dtype.type(0xFFF)
            odd = value & ~below | ((value & below) != 0).astype(value.dtype) << value.dtype.type(12)
            value = np.where(abs(value) >> value.dtype.type(53) != 0, odd, value)
        wide = value.astype(np.float64)
        write(warp, row, wide if is_double else round_f64(wide, rounding), lanes)

    return body


def _make_integer_of_float(one: Instruction) -> Body:
    modifiers = one.opcode.split(".")[1:]
    kinds = {"U32": np.uint32, "U64": np.uint64, "S64": np.int64}
    kind: Any = next((kinds[text] for text in modifiers if text in kinds), np.int32)
    row, get, truncates = row_of(one.operands[0]), reader(one.operands[1], "f"), "TRUNC" in modifiers
    return lambda warp, lanes: write(warp, row, to_integer(get(warp), kind, truncates=truncates), lanes)


def _half_codes(opcode: str) -> Callable[[Row], Row]:
    return bf16_codes if "BF16" in opcode else fp16_codes


def _make_two_halves(one: Instruction) -> Body:
    """``F2FP``: the first number becomes the upper half."""
    codes = _half_codes(one.opcode)
    return _computes("ff", lambda high, low: codes(high) << np.uint32(16) | codes(low))(one)


def _make_value_of_half(one: Instruction) -> Body:
    """``HADD2.F32 R, -RZ, half``: what the compiler makes of a conversion."""
    if not one.opcode.endswith(".F32") or one.operands[1] != "-RZ":
        raise UnknownInstructionError(one.opcode)
    return _computes("uu", lambda _, half: fp16_values(half))(one)


def _make_float_of_float(one: Instruction) -> Body:
    if one.opcode.endswith("16.F32"):
        return _computes("f", _half_codes(one.opcode))(one)
    widens = one.opcode == "F2F.F64.F32"
    row, get = row_of(one.operands[0]), reader(one.operands[1], "f" if widens else "d")
    return lambda warp, lanes: write(warp, row, get(warp).astype(np.float64 if widens else np.float32), lanes)


def _make_fused(one: Instruction) -> Body:
    row, (a, b, c) = row_of(one.operands[0]), (reader(text, "f") for text in one.operands[1:])
    rounding = next((text for text in one.opcode.split(".") if text in ("RM", "RP", "RZ")), "")
    return lambda warp, lanes: write(warp, row, fused(a(warp), b(warp), c(warp), rounding), lanes)


def _make_float_sum(one: Instruction) -> Body:
    row, (a, b) = row_of(one.operands[0]), (reader(text, "f") for text in one.operands[1:])
    if "FTZ" in one.opcode:
        return lambda warp, lanes: write(warp, row, flushed(flushed(a(warp)) + flushed(b(warp))), lanes)
    return lambda warp, lanes: write(warp, row, a(warp) + b(warp), lanes)


def _make_long_division_test(one: Instruction) -> Body:
    row, (a, b) = predicate_row(one.operands[0]), (reader(text, "f") for text in one.operands[1:])
    return lambda warp, lanes: write_predicate(warp, row, divides_slowly(a(warp), b(warp)), lanes)


def _make_approximation(one: Instruction) -> Body:
    """``MUFU``: here the nearest float; what makes quotients of it is right for any close one."""
    functions: dict[str, Callable[[Row], Row]] = {
        "RCP": lambda x: np.float32(1) / x,
        "RSQ": lambda x: np.float32(1) / np.sqrt(x),
    }
    return _computes("f", functions[one.opcode.split(".")[1]])(one)


def _make_highest_bit(one: Instruction) -> Body:
    if not one.opcode.endswith(".SH"):
        return _computes("u", highest_bit)(one)
    return _computes("u", lambda x: np.where(x == 0, np.uint32(_WORD), np.uint32(31) - highest_bit(x)))(one)


ARITHMETIC: dict[str, Callable[[Instruction], Body]] = {
    "FADD": _make_float_sum,
    "FMUL": _computes("ff", lambda a, b: a * b),
    "FFMA": _make_fused,
    "DADD": _computes("dd", lambda a, b: a + b),
    "DMUL": _computes("dd", lambda a, b: a * b),
    "FRND": _computes("f", np.rint),
    "FCHK": _make_long_division_test,
    "MUFU": _make_approximation,
    "HFMA2": _make_half_constant,
    "MOV": _computes("u", lambda x: x),
    "VIADD": _computes("uu", lambda a, b: a + b),
    "POPC": _computes("u", count_bits),
    "BREV": _computes("u", reversed_bits),
    "FLO": _make_highest_bit,
    "IADD3": _make_sum,
    "IMAD": _make_product,
    "LEA": _make_address,
    "SHF": _make_shift,
    "LOP3": _make_logic,
    "PLOP3": _make_predicate_logic,
    "PRMT": _make_bytes,
    **dict.fromkeys(("SEL", "FSEL"), _make_choice),
    **dict.fromkeys(("ISETP", "FSETP", "DSETP"), _make_comparison),
    **dict.fromkeys(("IMNMX", "VIMNMX", "VIMNMX3", "VIADDMNMX", "FMNMX", "FMNMX3"), _make_extreme),
    **dict.fromkeys(("I2F", "I2FP"), _make_float_of_integer),
    "F2I": _make_integer_of_float,
    "F2F": _make_float_of_float,
    "F2FP": _make_two_halves,
    "HADD2": _make_value_of_half,
}
"""By the first part of the opcode."""
