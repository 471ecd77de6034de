"""The text of the GPU's kernels: the files of this folder one behind the other, and transforms as statements."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from flexcomm.kernels.butterflies import BUTTERFLY, ROTATE, SCALE, Program, plan_dct, plan_inverse_dct

SIDE = 64
"""Rows and columns of the chunks that are transformed in registers; as ``tiles.cuh`` says."""
_FOLDER = Path(__file__).parent
_BEFORE = ("warp.cuh", "bits.cuh", "bucket.cuh", "blocks.cuh")
_BEHIND = ("tiles.cuh", "verify.cuh", "variable.cuh", "mixing.cuh", "codec.cu")


@cache
def kernel_text() -> str:
    """Return the whole text, which is compiled for a device or, by the tests, for the host."""
    return "".join((*map(_file, _BEFORE), '#line 1 "butterflies"\n', _butterflies(), *map(_file, _BEHIND)))


def _file(name: str) -> str:
    return f'#line 1 "{name}"\n{(_FOLDER / name).read_text()}'


def _butterflies() -> str:
    forward, inverse = plan_dct(SIDE), plan_inverse_dct(SIDE)
    outputs = ", ".join(map(str, forward.outputs.tolist()))
    return (
        f"__device__ constexpr u32 OUT[{SIDE}] = {{{outputs}}};\n"
        f"{_function('dct64', forward)}{_function('idct64', inverse)}"
    )


def _function(name: str, program: Program) -> str:
    lines = [
        _statement(code, i, j, factors)
        for (code, i, j), factors in zip(program.steps.tolist(), program.factors.tolist(), strict=True)
    ]
    return f"__device__ void {name}(float (&v)[{SIDE}]) {{\n" + "".join(lines) + "}\n"


def _statement(code: int, i: int, j: int, factors: list[float]) -> str:
    if code == BUTTERFLY:
        return f"{{ float a = v[{i}], b = v[{j}]; v[{i}] = a + b; v[{j}] = a - b; }}\n"
    c0, c1 = (f"{factor.hex()}f" for factor in factors)
    if code == SCALE:
        return f"v[{i}] = {c0} * v[{i}];\n"
    shear = f"v[{i}] = fmaf({c0}, v[{j}], v[{i}]);"
    return f"{shear} v[{j}] = fmaf({c1}, v[{i}], v[{j}]); {shear}\n" if code == ROTATE else f"{shear}\n"
