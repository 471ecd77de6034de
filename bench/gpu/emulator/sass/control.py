"""Instructions of SASS by which warps branch, leave, and wait for one another."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from bench.gpu.emulator.sass.code import Instruction, MachineCode
from bench.gpu.emulator.sass.operands import (
    PT,
    Body,
    SassWarp,
    find,
    is_predicate,
    predicate_reader,
    predicate_row,
    reader,
    write_predicate,
)
from bench.gpu.emulator.warps import LANES, Lanes, NotConvergedError, UnknownInstructionError


def _nothing(_: Instruction) -> Body:
    return lambda _warp, _lanes: None


def _make_exit(one: Instruction) -> Body:
    only = _condition(one.operands)
    return lambda warp, lanes: warp.leave(only(warp, lanes))


def _condition(operands: Sequence[str]) -> Callable[[SassWarp, Lanes], Lanes]:
    """Return what takes the lanes of which these predicates are true, too: ``@P0 EXIT P1`` asks for both."""
    conditions = [predicate_reader(text) for text in operands]

    def only(warp: SassWarp, lanes: Lanes) -> Lanes:
        for condition in conditions:
            lanes = lanes & condition(warp)
        return lanes

    return only


def _make_block_barrier(one: Instruction) -> Body:
    if one.operands[0] != "0x0":
        raise UnknownInstructionError(f"{one.opcode} of some warps")
    votes = predicate_reader(one.operands[1]) if ".RED." in one.opcode else None

    def body(warp: SassWarp, lanes: Lanes) -> None:
        if votes is not None:
            warp.block.vote = warp.block.vote or bool((votes(warp) & lanes).any())
        warp.wait("block", lanes)

    return body


def _make_vote_result(one: Instruction) -> Body:
    row = predicate_row(one.operands[1]) if len(one.operands) > 1 else PT
    return lambda warp, lanes: write_predicate(warp, row, np.full(1, warp.block.result), lanes)


def _make_join_begin(one: Instruction) -> Body:
    place = one.operands[0]
    return lambda warp, lanes: warp.joining.update({place: lanes.copy()})


def _make_join(one: Instruction) -> Body:
    if len(one.operands) > 1:
        raise UnknownInstructionError(f"{one.opcode} of some lanes")
    place = one.operands[0]
    return lambda warp, lanes: warp.wait(place, lanes)


def _make_break(one: Instruction) -> Body:
    place, only = one.operands[-1], _condition(one.operands[:-1])

    def body(warp: SassWarp, lanes: Lanes) -> None:
        warp.joining[place] = warp.joining[place] & ~only(warp, lanes)
        warp.release()

    return body


def _make_warp_barrier(one: Instruction) -> Body:
    if one.opcode not in ("WARPSYNC", "WARPSYNC.ALL"):
        return _make_diverged(one)
    return lambda warp, lanes: warp.wait("warp", lanes)


def _make_diverged(one: Instruction) -> Body:
    def body(_warp: SassWarp, _lanes: Lanes) -> None:
        raise NotConvergedError(f"{one.opcode} is what a warp does that has not converged.")

    return body


_TARGET = re.compile(r"`\(([^)]+)\)")


def make_branch(one: Instruction, code: MachineCode) -> Body:
    name = one.opcode
    if name == "BRA.DIV":
        return lambda warp, _: warp.require_converged()
    only = _condition([text for text in one.operands if is_predicate(text)])
    target = code.labels[find(_TARGET, one.operands[-1])[1]]

    def body(warp: SassWarp, lanes: Lanes) -> None:
        if name == "BRA.CONV":
            warp.require_converged()
        warp.jump(only(warp, lanes), target)

    return body


def make_indirect_branch(one: Instruction, code: MachineCode) -> Body:
    """To where a register says, from the next instruction or, of a return, from the beginning of the kernel."""
    numbers = code.numbers
    register, *rest = one.operands[0].split()
    get = reader(register, "i")
    add = 0 if one.opcode.startswith("RET") else one.offset + 16 + int(rest[0], 0)

    def body(warp: SassWarp, lanes: Lanes) -> None:
        targets = np.broadcast_to(get(warp), LANES) + add
        for target in np.unique(targets[lanes]):
            warp.jump(lanes & warp.active & (targets == target), numbers[int(target)])

    return body


CONTROL: dict[str, Callable[[Instruction], Body]] = {
    "EXIT": _make_exit,
    "BAR": _make_block_barrier,
    "B2R": _make_vote_result,
    "BSSY": _make_join_begin,
    "BSYNC": _make_join,
    "BREAK": _make_break,
    "WARPSYNC": _make_warp_barrier,
    "ENDCOLLECTIVE": _make_diverged,
    **dict.fromkeys(("NOP", "YIELD", "MEMBAR", "ERRBAR", "CGAERRBAR", "CCTL"), _nothing),
}
"""By the first part of the opcode, but for branches, which have to know where labels are."""
