"""Registers, constants and immediate numbers of SASS: how instructions read and write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from bench.gpu.emulator.warps import LANES, Block, Lanes, Row, UnknownInstructionError, Warp

Get = Callable[["SassWarp"], Row]
Body = Callable[["SassWarp", Lanes], None]
"""What an instruction does, by those of its lanes."""

RZ, _UNIFORM, URZ, _ROWS = 255, 256, 511, 512
PT, UNIFORM_PREDICATES, UPT = 7, 8, 15
LOCAL_NBYTES = 1 << 14


class SassWarp(Warp):
    """A warp with registers of SASS: a lane's, the warp's, which have one number for all lanes, and predicates."""

    def __init__(self, block: Block, number: int, banks: Sequence[Row]) -> None:
        super().__init__(block, number)
        self.words = np.zeros((_ROWS, LANES), np.uint32)
        self.predicates = np.zeros((UPT + 1, LANES), bool)
        self.predicates[[PT, UPT]] = True
        self.local = np.zeros((LOCAL_NBYTES // 4, LANES), np.uint32)
        self.banks = banks


def row_of(register: str) -> int:
    if register in ("RZ", "URZ"):
        return RZ if register == "RZ" else URZ
    return _UNIFORM + int(register[2:]) if register.startswith("U") else int(register[1:])


def is_predicate(operand: str) -> bool:
    return re.fullmatch(r"!?U?P(\d|T)", operand) is not None


def predicate_row(name: str) -> int:
    if name in ("PT", "UPT"):
        return PT if name == "PT" else UPT
    return UNIFORM_PREDICATES + int(name[2:]) if name.startswith("U") else int(name[1:])


def predicate_reader(operand: str) -> Get:
    row = predicate_row(operand.lstrip("!"))
    return (lambda warp: ~warp.predicates[row]) if operand.startswith("!") else lambda warp: warp.predicates[row]


BANK = re.compile(r"c\[(0x[0-9a-f]+)\]\[(?:(U?R\w+)\+?)?(-?0x[0-9a-f]+)?\]")
VIEWS = {"u": np.uint32, "i": np.int32, "f": np.float32, "q": np.uint64, "s": np.int64, "d": np.float64}
_PARTS = {"B0": (0, 8), "B1": (8, 8), "B2": (16, 8), "B3": (24, 8), "H0_H0": (0, 16), "H1_H1": (16, 16)}


def joined(low: Row, high: Row) -> Row:
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)


def _raw(text: str, *, wide: bool) -> Get:
    """Return what reads a register, or a pair of them, or a constant."""
    if found := BANK.fullmatch(text):
        bank, first = int(found[1], 16), int(found[3] or "0", 16) // 4
        if wide:
            return lambda warp: joined(warp.banks[bank][first : first + 1], warp.banks[bank][first + 1 : first + 2])
        return lambda warp: warp.banks[bank][first : first + 1]
    register, _, part = text.partition(".")
    row = row_of(register)
    if part in _PARTS:
        shift, bits = _PARTS[part]
        return lambda warp: warp.words[row] >> np.uint32(shift) & np.uint32((1 << bits) - 1)
    if wide and row not in (RZ, URZ):
        return lambda warp: joined(warp.words[row], warp.words[row + 1])
    return (lambda warp: warp.words[row].astype(np.uint64)) if wide else lambda warp: warp.words[row]


def reader(text: str, kind: str) -> Get:
    """Return what reads an operand: as integers ``u``, ``i``, of 64 bits ``q``, ``s``, or as floats ``f``, ``d``."""
    text, view = text.strip(), VIEWS[kind]
    sign, inverted = text.startswith("-"), text.startswith("~")
    inner = text.lstrip("-~")
    magnitude, inner = inner.startswith("|"), inner.strip("|")
    if not re.match(r"U?R(\d|Z)|c\[", inner):
        return _immediate(text, kind)
    read = _raw(inner, wide=kind in "qsd")

    def get(warp: SassWarp) -> Row:
        value = read(warp).view(view)
        if magnitude:
            value = np.abs(value)
        if sign:
            value = np.negative(value)
        return ~value if inverted else value

    return get if magnitude or sign or inverted else lambda warp: read(warp).view(view)


def _immediate(text: str, kind: str) -> Get:
    if kind in "fd":
        value = np.array([float(text.replace("QNAN", "nan"))], VIEWS[kind])
    else:
        bits = 64 if kind in "qs" else 32
        value = np.array([int(text, 0) % (1 << bits)], f"u{bits // 8}").view(VIEWS[kind])
    return lambda _: value


def write(warp: SassWarp, row: int, value: Row, lanes: Lanes) -> None:
    """Write a row of registers; of 64-bit values, a pair."""
    if row in (RZ, URZ):
        return
    if value.dtype.itemsize == np.dtype(np.uint64).itemsize:
        bits = np.ascontiguousarray(value).view(np.uint64)
        np.copyto(warp.words[row + 1], (bits >> np.uint64(32)).astype(np.uint32), where=lanes)
        value = bits.astype(np.uint32)
    np.copyto(warp.words[row], value.view(np.uint32), where=lanes)


def write_predicate(warp: SassWarp, row: int, value: Row, lanes: Lanes) -> None:
    if row not in (PT, UPT):
        np.copyto(warp.predicates[row], value, where=lanes)


def split(operands: Sequence[str], count: int) -> tuple[str, list[str], Sequence[str], Sequence[str]]:
    """Return a result, its predicates, so many sources, and the predicates behind them."""
    first = 1
    while is_predicate(operands[first]):
        first += 1
    return operands[0], list(operands[1:first]), operands[first : first + count], operands[first + count :]


def find(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    """Return the parts of an operand."""
    found = pattern.fullmatch(text)
    if found is None:
        raise UnknownInstructionError(text)
    return found
