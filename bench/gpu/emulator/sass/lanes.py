"""Instructions of SASS by which the lanes of a warp learn of one another, and of the launch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bench.gpu.emulator.sass.code import Instruction
from bench.gpu.emulator.sass.operands import (
    UNIFORM_PREDICATES,
    Body,
    SassWarp,
    is_predicate,
    predicate_reader,
    predicate_row,
    reader,
    row_of,
    write,
    write_predicate,
)
from bench.gpu.emulator.warps import ALL, LANES, SHARED_WINDOW, Lanes, Row, UnknownInstructionError


def _ballot(lanes: Lanes) -> Row:
    return np.packbits(lanes, bitorder="little").view(np.uint32)


def _make_vote(one: Instruction) -> Body:
    operands = list(one.operands)
    row = -1 if is_predicate(operands[0]) else row_of(operands.pop(0))
    predicate, get, asks_all = predicate_row(operands[0]), predicate_reader(operands[1]), ".ALL" in one.opcode

    def body(warp: SassWarp, lanes: Lanes) -> None:
        votes = get(warp) & warp.active
        everywhere = ALL if one.opcode.startswith("VOTEU") else lanes
        if row >= 0:
            write(warp, row, _ballot(votes), everywhere)
        found = not (warp.active & ~votes).any() if asks_all else votes.any()
        write_predicate(warp, predicate, np.full(1, found), everywhere)

    return body


def _make_reduction(one: Instruction) -> Body:
    row, get = row_of(one.operands[0]), reader(one.operands[1], "u")
    reduce = {"SUM": np.add, "MAX": np.maximum, "MIN": np.minimum, "OR": np.bitwise_or}[one.opcode.split(".")[1]]

    def body(warp: SassWarp, _: Lanes) -> None:
        write(warp, row, np.atleast_1d(reduce.reduce(get(warp)[warp.active])).astype(np.uint32), ALL)

    return body


def _make_shuffle(one: Instruction) -> Body:
    predicate, row = predicate_row(one.operands[0]), row_of(one.operands[1])
    a, b, how = reader(one.operands[2], "u"), reader(one.operands[3], "u"), one.opcode.split(".")[1]
    own = np.arange(LANES)
    if one.operands[4] != ("RZ" if how == "UP" else "0x1f"):
        raise UnknownInstructionError(f"{one.opcode} of a part of a warp")

    def body(warp: SassWarp, lanes: Lanes) -> None:
        warp.require_converged()
        by = b(warp).astype(np.int64)
        asked = {"UP": own - by, "DOWN": own + by, "BFLY": own ^ by, "IDX": by % LANES + 0 * own}[how]
        inside = (asked >= 0) & (asked < LANES)
        write(warp, row, a(warp)[np.where(inside, asked, own)], lanes)
        write_predicate(warp, predicate, inside, lanes)

    return body


def _make_to_uniform(one: Instruction) -> Body:
    row, get = row_of(one.operands[0]), reader(one.operands[1], "u")

    def body(warp: SassWarp, lanes: Lanes) -> None:
        if lanes.any():
            write(warp, row, np.broadcast_to(get(warp), LANES)[lanes][:1], ALL)

    return body


def _make_special(one: Instruction) -> Body:
    row, name = row_of(one.operands[0]), one.operands[1]
    if name == "SRZ":
        zero = np.zeros(1, np.uint32 if ".32" in one.opcode else np.uint64)
        return lambda warp, lanes: write(warp, row, zero, lanes)
    if name == "SR_TID.X":
        return lambda warp, lanes: write(warp, row, warp.threads, lanes)
    if name == "SR_LANEID":
        return lambda warp, lanes: write(warp, row, np.arange(LANES, dtype=np.uint32), lanes)
    if name == "SR_CTAID.X":
        return lambda warp, lanes: write(warp, row, np.full(1, warp.block.number, np.uint32), lanes)
    if name in ("SR_SWINHI", "SR_CgaCtaId"):
        value = np.full(1, SHARED_WINDOW >> 32 if name == "SR_SWINHI" else 0, np.uint32)
        return lambda warp, lanes: write(warp, row, value, lanes)
    raise UnknownInstructionError(f"{one.opcode} {name}")


def _make_predicates_to_register(one: Instruction) -> Body:
    first = UNIFORM_PREDICATES if one.opcode == "UP2UR" else 0
    row, mask = row_of(one.operands[0]), int(one.operands[3], 0)

    def body(warp: SassWarp, lanes: Lanes) -> None:
        bits = (warp.predicates[first + i].astype(np.uint32) << np.uint32(i) for i in range(7) if mask >> i & 1)
        write(warp, row, sum(bits, np.zeros(LANES, np.uint32)), lanes)

    return body


LANES_TOGETHER: dict[str, Callable[[Instruction], Body]] = {
    "VOTE": _make_vote,
    **dict.fromkeys(("REDUX", "CREDUX"), _make_reduction),
    "SHFL": _make_shuffle,
    "R2UR": _make_to_uniform,
    **dict.fromkeys(("S2R", "CS2R"), _make_special),
    "P2R": _make_predicates_to_register,
}
"""By the first part of the opcode."""
