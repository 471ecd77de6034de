"""The pipe of a multiprocessor that takes an instruction of SASS, as the tables of Nsight Compute name them."""

from __future__ import annotations

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
_LSU = (
    *("LDG", "LD", "LDGSTS", "STG", "ST", "RED", "REDG", "ATOM", "ATOMG"),
    *("LDS", "STS", "ATOMS", "SHFL", "LDSM", "LDL", "STL", "CCTL", "MATCH"),
)
_XU = ("POPC", "FLO", "BREV", "MUFU", "I2F", "F2I", "I2FP", "F2F", "REDUX", "CREDUX")
_OTHERS = (
    *("BRA", "EXIT", "BSSY", "BSYNC", "BAR", "WARPSYNC", "CALL", "RET", "NOP", "BRX", "JMP", "YIELD", "BREAK", "BMOV"),
    *("ELECT", "NANOSLEEP", "LDC", "S2R", "S2UR", "CS2R", "ULDC", "LDCU", "R2UR"),
)


def find_pipe(opcode: str) -> str:
    """Return the pipe of an instruction; PTX does not say."""
    name = opcode.split(".")[0]
    if name.islower() or name in _OTHERS or name.startswith("U"):
        return "other"
    return next((pipe for pipe, names in (("FP32", _FP32), ("LSU", _LSU), ("XU", _XU)) if name in names), "ALU")
