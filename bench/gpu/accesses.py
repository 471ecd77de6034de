"""What an instruction of SASS or PTX asks of the GPU: the pipe that takes it, and the bytes that it moves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from bench.gpu.devices import WARP
from bench.gpu.machine_code import BasicBlock, Instruction

SECTOR_NBYTES = 32
"""What device memory is read and written by."""
_WAVEFRONT_NBYTES = 128

_FP32 = (
    "FADD",
    "FMUL",
    "FFMA",
    "IMAD",
    "FADD2",
    "FMUL2",
    "FFMA2",
    "FADD32I",
    "FMUL32I",
    "FFMA32I",
    "HFMA2",
    "HADD2",
    "HMUL2",
)
_GLOBAL_LOADS, _GLOBAL_STORES = ("LDG", "LD", "LDGSTS"), ("STG", "ST", "RED", "REDG")
_ATOMICS = ("ATOM", "ATOMG")
_OTHER_LSU = ("LDS", "STS", "ATOMS", "SHFL", "LDSM", "LDL", "STL", "CCTL", "MATCH")
_XU = ("POPC", "FLO", "BREV", "MUFU", "I2F", "F2I", "I2FP", "F2F", "REDUX", "CREDUX")
_CONTROL = (
    "BRA",
    "EXIT",
    "BSSY",
    "BSYNC",
    "BAR",
    "WARPSYNC",
    "CALL",
    "RET",
    "NOP",
    "BRX",
    "JMP",
    "YIELD",
    "BREAK",
    "BMOV",
    "ELECT",
    "NANOSLEEP",
)
_CONSTANTS = ("LDC", "S2R", "S2UR", "CS2R", "ULDC", "LDCU", "R2UR")
_MEMORY = (*_GLOBAL_LOADS, *_GLOBAL_STORES, *_ATOMICS, "LDS", "STS", "ATOMS", "LDSM")
_NO_DESTINATION = (*_GLOBAL_STORES, *_CONTROL, "STS", "STL", "CCTL")


class Access(NamedTuple):
    """Bytes that a warp loads from and stores to device memory by an instruction, and wavefronts of the LSU pipe."""

    loaded_nbytes: int = 0
    stored_nbytes: int = 0
    wavefronts: int = 0


def find_pipe(instruction: Instruction) -> str:
    """Return the pipe that takes an instruction of SASS, as the tables of Nsight Compute name them."""
    name = instruction.opcode.split(".")[0]
    if name.islower():
        # PTX does not say.
        return "other"
    if name in _FP32:
        return "FP32"
    if name in (*_GLOBAL_LOADS, *_GLOBAL_STORES, *_ATOMICS, *_OTHER_LSU):
        return "LSU"
    if name in _XU:
        return "XU"
    return "other" if name in (*_CONTROL, *_CONSTANTS) or name.startswith("U") else "ALU"


def find_access(instruction: Instruction, *, same_address: bool) -> Access:
    """Return what an instruction moves, as if every lane took part; lanes of one address read or write one sector."""
    name, *modifiers = instruction.opcode.split(".")
    if name in (*_GLOBAL_LOADS, *_GLOBAL_STORES, *_ATOMICS):
        lanes_nbytes = WARP * _width(modifiers)
        nbytes = SECTOR_NBYTES if same_address else lanes_nbytes
        loads, stores = name not in _GLOBAL_STORES, name in (*_GLOBAL_STORES, *_ATOMICS)
        return Access(nbytes * loads, nbytes * stores, 1 if same_address else -(-lanes_nbytes // _WAVEFRONT_NBYTES))
    if name == "ld" or name == "st" or name in ("atom", "red"):
        if "global" not in modifiers:
            return Access()
        nbytes = WARP * _ptx_width(modifiers)
        return Access(nbytes * (name in ("ld", "atom")), nbytes * (name != "ld"))
    if name in ("LDS", "STS", "LDSM", "LDL", "STL"):
        return Access(wavefronts=1 if same_address else -(-WARP * _width(modifiers) // _WAVEFRONT_NBYTES))
    return Access(wavefronts=int(name in _OTHER_LSU))


def _width(modifiers: Sequence[str]) -> int:
    widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
    return next((widths[one] for one in modifiers if one in widths), 4)


def _ptx_width(modifiers: Sequence[str]) -> int:
    count = next((int(one[1:]) for one in modifiers if re.fullmatch(r"v\d", one)), 1)
    return count * int(re.sub(r"\D", "", modifiers[-1]) or 32) // 8


_ADDRESS = re.compile(r"\[(U?R\d+)?(\.64)?[^\]]*\](?!\[)")
_TOKEN = re.compile(r"\bU?[RP]\d+\b")


def find_same_addresses(blocks: Sequence[BasicBlock]) -> set[int]:
    """Return the instructions, by ``id``, that access one address by all lanes.

    Registers are followed in the order of addresses: what is made of a lane's number, or read from where it points to,
    differs between lanes. A branch that only some lanes take is not followed, so this is a close estimate.
    """
    differing, same = set[str](), set[int]()
    for instruction in (one for block in blocks for one in block.instructions):
        name = instruction.opcode.split(".")[0]
        # Constants have brackets, too: c[0x0][0x28].
        address = _ADDRESS.search(instruction.text) if name in _MEMORY else None
        address_differs = (
            address is not None
            and address[1] is not None
            and (address[1] in differing or (address[2] is not None and _after(address[1], 1) in differing))
        )
        if address is not None and not address_differs:
            same.add(id(instruction))
        destinations, sources, guarded = _split_operands(instruction, name)
        if name in ("VOTE", "VOTEU", "REDUX", "CREDUX", "S2UR", "R2UR"):
            differs = False
        elif name == "S2R":
            differs = "SR_TID" in instruction.text or "SR_LANEID" in instruction.text
        elif address is not None:
            differs = address_differs
        else:
            differs = name == "SHFL" or not differing.isdisjoint(sources)
        if differs:
            differing.update(destinations)
        elif not guarded:
            differing.difference_update(destinations)
    return same


def _split_operands(instruction: Instruction, name: str) -> tuple[list[str], list[str], bool]:
    """Return the registers an instruction writes and reads, and whether it has a guard."""
    guard, _, rest = instruction.text.partition(instruction.opcode)
    operands = [one.strip() for one in rest.split(",")]
    destinations, count = list[str](), 0
    if name.endswith(("SETP", "PLOP3")):
        destinations = [token for operand in operands[:2] for token in _TOKEN.findall(operand)]
    elif name not in _NO_DESTINATION:
        for operand in operands:
            predicate = re.fullmatch(r"!?U?P(\d|T)", operand) is not None
            if count and not predicate:
                # The first register is written, and predicates before and behind it.
                break
            count += not predicate
            destinations += _TOKEN.findall(operand)[:1]
    wide = 3 if ".128" in instruction.opcode else int(".64" in instruction.opcode or ".WIDE" in instruction.opcode)
    register = next((one for one in destinations if "R" in one), None)
    destinations += [_after(register, i + 1) for i in range(wide)] if register else []
    written = len(destinations) - wide if register else len(destinations)
    sources = _TOKEN.findall(guard) + _TOKEN.findall(rest)[written:]
    return destinations, sources, bool(guard.strip())


def _after(register: str, count: int) -> str:
    letters = register.rstrip("0123456789")
    return f"{letters}{int(register[len(letters) :]) + count}"
