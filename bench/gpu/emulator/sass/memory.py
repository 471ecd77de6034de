"""Instructions of SASS that read and write memory, and banks of constants."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from bench.gpu.emulator.sass.code import Instruction
from bench.gpu.emulator.sass.operands import (
    BANK,
    RZ,
    URZ,
    Body,
    Get,
    SassWarp,
    find,
    is_predicate,
    reader,
    row_of,
    write,
)
from bench.gpu.emulator.warps import ATOMICS, LANES, SHARED_WINDOW, Access, Lanes, Row, UnknownInstructionError

_ADDRESS = re.compile(r"(?:desc\[\w+\])?\[(.*)\]")
_NBYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def _address(text: str, *, window: int) -> Get:
    inside = find(_ADDRESS, text)[1]
    terms, constant = list[tuple[Get, int]](), window
    for term in inside.split("+"):
        register, _, how = term.partition(".")
        if re.fullmatch(r"U?R(\d+|Z)", register):
            # A uniform register beside a pair is one, too.
            is_wide = how == "64" or (register.startswith("UR") and ".64" in inside)
            terms.append((reader(register, "q" if is_wide else "u"), int(how[1:]) if how.startswith("X") else 1))
        else:
            constant += int(term, 0)

    def get(warp: SassWarp) -> Row:
        total: Row = np.full(LANES, constant, np.int64)
        for one, times in terms:
            total = total + one(warp).astype(np.int64) * times
        return total if window == 0 else window + (total - window) % (1 << 32)

    return get


def _window(opcode: str) -> int:
    return SHARED_WINDOW if opcode in ("LDS", "STS", "ATOMS") else 0


def _width(modifiers: Sequence[str]) -> int:
    return next((_NBYTES[text] for text in modifiers if text in _NBYTES), 4)


def _rows(warp: SassWarp, row: int, nbytes: int) -> Sequence[Row]:
    count = max(1, nbytes // 4)
    return [warp.words[row + i * (row not in (RZ, URZ))] for i in range(count)]


def _make_load(one: Instruction) -> Body:
    name, *modifiers = one.opcode.split(".")
    row, get, nbytes = row_of(one.operands[0]), _address(one.operands[1], window=_window(name)), _width(modifiers)
    if {"S8", "S16"} & {*modifiers}:
        raise UnknownInstructionError(one.opcode)

    def body(warp: SassWarp, lanes: Lanes) -> None:
        rows = [np.zeros(LANES, np.uint32)] * 4 if row == RZ else _rows(warp, row, nbytes)
        Access(warp, get(warp), nbytes, lanes).load(rows[: max(1, nbytes // 4)])

    return body


def _make_store(one: Instruction) -> Body:
    name, *modifiers = one.opcode.split(".")
    get, row, nbytes = _address(one.operands[0], window=_window(name)), row_of(one.operands[1]), _width(modifiers)
    return lambda warp, lanes: Access(warp, get(warp), nbytes, lanes).store(_rows(warp, row, nbytes))


def _make_local(one: Instruction) -> Body:
    name, *modifiers = one.opcode.split(".")
    is_load, count = name == "LDL", max(1, _width(modifiers) // 4)
    register, place = one.operands if is_load else one.operands[::-1]
    row, get = row_of(register), _address(place, window=0)

    def body(warp: SassWarp, lanes: Lanes) -> None:
        (word,) = np.unique(get(warp)) // 4
        for i, mine in enumerate(_rows(warp, row, 4 * count)):
            source, target = (warp.local[word + i], mine) if is_load else (mine, warp.local[word + i])
            np.copyto(target, source, where=lanes)
            warp.block.work.wavefronts += 1

    return body


def _make_atomic(one: Instruction) -> Body:
    name, *modifiers = one.opcode.split(".")
    operands = [text for text in one.operands if not is_predicate(text)]
    returns = not name.startswith("RED")
    row = row_of(operands.pop(0)) if returns else RZ
    nbytes = _width(modifiers)
    get, value = _address(operands[0], window=_window(name)), reader(operands[1], "q" if nbytes == 8 else "u")
    change = next(ATOMICS[text] for text in modifiers if text in ATOMICS)

    def body(warp: SassWarp, lanes: Lanes) -> None:
        found = Access(warp, get(warp), nbytes, lanes).combine(change, value(warp))
        result = np.zeros(LANES, found.dtype)
        result[lanes] = found
        write(warp, row, result, lanes)

    return body


def _make_constant_load(one: Instruction) -> Body:
    row, count = row_of(one.operands[0]), max(1, _width(one.opcode.split(".")) // 4)
    found = find(BANK, one.operands[1])
    bank, constant = int(found[1], 16), int(found[3] or "0", 16)
    index = reader(found[2], "i") if found[2] else None

    def body(warp: SassWarp, lanes: Lanes) -> None:
        first = np.full(1, constant) if index is None else constant + index(warp).astype(np.int64)
        for i in range(count):
            write(warp, row + i, warp.banks[bank][np.where(lanes, first // 4 + i, 0)], lanes)

    return body


MEMORY: dict[str, Callable[[Instruction], Body]] = {
    **dict.fromkeys(("LDG", "LD", "LDS"), _make_load),
    **dict.fromkeys(("STG", "ST", "STS"), _make_store),
    **dict.fromkeys(("LDL", "STL"), _make_local),
    **dict.fromkeys(("ATOM", "ATOMG", "ATOMS", "RED", "REDG"), _make_atomic),
    "LDC": _make_constant_load,
}
"""By the first part of the opcode."""
