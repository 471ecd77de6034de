"""How the CPU's loops are compiled, and what their arguments are called.

fastmath stays off: it would let the compiler reorder or fuse operations, and bits would differ from the reference.
The one exception are sums of which nobody asks for the last bit, see :func:`summing`.
Integers are int64 throughout, because numba turns int64 with uint64 into a float.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numpy.typing import NDArray

from flexcomm.kernels.cpu.cache import cache_folders, folder_of, is_compiled_elsewhere, share

# Any: what numba computes with is neither Python's int and float nor numpy's scalars to a type checker.
Int = Any
Float = Any
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
FullWords = NDArray[np.uint32]
Halves = NDArray[np.uint16]
Bytes = NDArray[np.int8]
Doubles = NDArray[np.float64]
Integers = NDArray[Any]  # of any width

Function = TypeVar("Function", bound="Callable[..., Any]")


def list_sources() -> list[Path]:
    """Return the files that are compiled into kernels, constants included."""
    folder = Path(__file__).parent
    own = (
        "bits",
        "checks",
        "codelets",
        "compiler",
        "indices",
        "instructions",
        "mixing",
        "selection",
        "tables",
        "transform",
        "values",
    )
    shared = ("base", "butterflies", "layout", "plan")
    return [folder / f"{name}.py" for name in own] + [folder.parent / f"{name}.py" for name in shared]


_SOURCES = hashlib.blake2b(b"".join(source.read_bytes() for source in list_sources()), digest_size=6).hexdigest()


class _PartLibrary(JITCodeLibrary):
    """The code of a part, as it is before LLVM sees it: that of a loop holds all its parts, and is optimised whole.

    numba would also optimise each part alone, for nothing: a sixth of the time.
    """

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout  # noqa: SLF001

    def _optimize_final_module(self) -> None:
        pass


class _PartCompiler(Compiler):
    def define_pipelines(self) -> Any:
        self.state.library = _PartLibrary(self.state.targetctx.codegen(), "part")  # type: ignore[no-untyped-call]
        self.state.library.enable_object_caching()
        return super().define_pipelines()  # type: ignore[no-untyped-call]


_OVERRIDDEN = [name for name in vars(_PartLibrary) if not name.startswith("__")]
_PART: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    # A numba that works otherwise compiles parts its own way.
    "pipeline_class": _PartCompiler if all(hasattr(JITCodeLibrary, name) for name in _OVERRIDDEN) else Compiler,
    # A part is called by compiled code alone: entries for Python and C would take a tenth of the time to compile.
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


def compiled(function: Function) -> Function:
    """Compile a part of a loop, together with the loop that uses it."""
    return cast("Function", numba.njit(**_PART)(function))


def summing(function: Function) -> Function:
    """Compile a part of a loop whose own sums may be added in any order, so that they fit into vectors.

    Only what is written in the function itself: what it calls keeps its order and its bits. Nothing is ever fused.
    """
    return cast("Function", numba.njit(**_PART, fastmath={"reassoc"})(function))


def cached_kernel(function: Function) -> Function:
    """Compile a loop that Python calls, once per machine: see :mod:`flexcomm.kernels.cpu.cache`."""
    dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
    share(dispatcher, _SOURCES)
    return cast("Function", dispatcher)


_NUMBERS = types.CPointer(types.int64)  # type: ignore[no-untyped-call]
LOOP = types.int64(_NUMBERS, _NUMBERS)
"""The signature of a loop: it is given the numbers of a tensor and of a job, and returns a problem, or 0."""


@cache
def address_of(loop: Any) -> int:
    """Return the address of a loop's machine code, compiled or loaded now."""
    result = loop.get_compile_result(LOOP)
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name))


def compile_loops(loops: Sequence[Any]) -> None:
    """Compile or load loops; first those that no other process compiles, so that those of a host share the work."""
    for loop in loops:
        if not is_compiled_elsewhere(loop, LOOP):
            address_of(loop)
    for loop in loops:
        address_of(loop)


def kernel_folders() -> list[Path]:
    """Return where compiled kernels are looked for; see :func:`flexcomm.kernels.cpu.cache.cache_folders`."""
    return [folder / folder_of(_SOURCES) for folder in cache_folders()]
