"""Kernels of SASS, run on the host.

NVIDIA documents no more than the names of instructions. That their meanings here are right is shown by what they
compute: kernels that run in this way give the bits that the reference does.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from bench.gpu.emulator.sass.arithmetic import ARITHMETIC
from bench.gpu.emulator.sass.code import Instruction, MachineCode, parse_sass, read_constants
from bench.gpu.emulator.sass.control import CONTROL, make_branch, make_indirect_branch
from bench.gpu.emulator.sass.lanes import LANES_TOGETHER
from bench.gpu.emulator.sass.memory import MEMORY
from bench.gpu.emulator.sass.operands import LOCAL_NBYTES, Body, SassWarp, predicate_reader
from bench.gpu.emulator.warps import ALL, LANES, SHARED_WINDOW, Block, Row, Step, UnknownInstructionError, Work

_MAKERS: dict[str, Callable[[Instruction], Body]] = {**ARITHMETIC, **LANES_TOGETHER, **MEMORY, **CONTROL}
_OF_A_WARP = {"ULDC": "LDC", "LDCU": "LDC", "S2UR": "S2R", "UP2UR": "P2R", "VOTEU": "VOTE"}
"""Instructions for registers of a warp that are not called as those for registers of lanes, with a U before."""


def make_step(code: MachineCode, one: Instruction) -> Step:
    """Return what an instruction does."""
    body, name = _make_body(code, one), one.opcode.split(".")[0]
    everywhere = name.startswith("U") or name in ("LDCU", "S2UR")
    if not one.guard:
        return (lambda warp: body(warp, ALL)) if everywhere else lambda warp: body(warp, warp.active)
    guard = predicate_reader(one.guard)
    if everywhere:
        return lambda warp: body(warp, guard(warp))
    return lambda warp: body(warp, warp.active & guard(warp))


def _make_body(code: MachineCode, one: Instruction) -> Body:
    name = one.opcode.split(".")[0]
    if name in ("BRA", "CALL"):
        return make_branch(one, code)
    if name in ("BRX", "BRXU", "RET"):
        return make_indirect_branch(one, code)
    name = _OF_A_WARP.get(name, name.removeprefix("U"))
    if name not in _MAKERS:
        raise UnknownInstructionError(f"{one.opcode} {', '.join(one.operands)}")
    return _MAKERS[name](one)


# Where constants are that every kernel is given, by where its arguments begin: blockDim.x, gridDim.x, the stack, and
# the window of shared memory, where it is one.
_GIVEN = {
    0x160: (0x0, 0xC, 0x28, 0x18),  # sm_80
    0x210: (0x0, 0xC, 0x28, None),  # sm_90
    0x380: (0x360, 0x370, 0x37C, None),  # sm_100
}


class SassKernel:
    """A kernel's machine code, to be run on the host; ``opcodes`` are those of its instructions."""

    def __init__(self, text: str, name: str, cubin: bytes) -> None:
        self._code = parse_sass(text, name)
        self._banks = read_constants(cubin, name)
        self.opcodes = [one.opcode for one in self._code.instructions]
        # Most instructions of a kernel are never come to.
        self._steps: list[Step] = [self._postponed(number) for number in range(len(self.opcodes))]

    def _postponed(self, number: int) -> Step:
        def step(warp: SassWarp) -> None:
            self._steps[number] = make_step(self._code, self._code.instructions[number])
            self._steps[number](warp)

        return step

    def run(self, grid: int, threads: int, shared_nbytes: int, argument: bytes) -> Work:
        """Run a launch, block by block; return what its warps did."""
        work = Work([0] * len(self._steps))
        banks = self._fill_banks(grid, threads, argument)
        with np.errstate(all="ignore"):
            for number in range(grid):
                block = Block(self._steps, work, number, grid, threads, shared_nbytes)
                block.run([SassWarp(block, warp, banks) for warp in range(-(-threads // LANES))])
        return work

    def _fill_banks(self, grid: int, threads: int, argument: bytes) -> list[Row]:
        banks = {number: bytearray(content) for number, content in self._banks.items()}
        first = len(banks[0]) - len(argument)
        banks[0][first:] = argument
        at_threads, at_grid, at_stack, at_window = _GIVEN[first]
        for at, value in ((at_threads, threads), (at_grid, grid), (at_stack, LOCAL_NBYTES)):
            struct.pack_into("<I", banks[0], at, value)
        if at_window is not None:
            struct.pack_into("<Q", banks[0], at_window, SHARED_WINDOW)
        return [np.frombuffer(banks.get(number, b""), np.uint32) for number in range(max(banks) + 1)]
