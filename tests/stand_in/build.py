"""Compiles the stand-in for the torch at hand, once."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu.cuda_on_host import SHIM, compile_for_host
from flexcomm.kernels.gpu import kernel_text

if TYPE_CHECKING:
    from types import ModuleType

HERE = Path(__file__).parent
SOURCES = ("order.cpp", "device.cpp", "module.cpp")
_NAME = "stand_in_native"


def compile_command(source: Path, made: Path) -> list[str]:
    torch_folder = Path(torch.__file__).parent
    includes = (
        torch_folder / "include",
        torch_folder / "include/torch/csrc/api/include",
        Path(sysconfig.get_paths()["include"]),
    )
    return [
        "g++",
        *("-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"),
        *(f"-DTORCH_EXTENSION_NAME={_NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
        *(word for folder in includes for word in ("-isystem", str(folder))),
        *("-c", str(source), "-o", str(made)),
    ]


def build_device() -> Path:
    """Return the compiled device; half a minute on two cores, if these sources meet this torch for the first time."""
    texts = [path.read_bytes() for path in sorted(HERE.iterdir()) if path.suffix in (".cpp", ".h")]
    library = _place_of(f"{_NAME}.so", torch.__version__.encode(), *texts)
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [Path(folder) / f"{name}.o" for name in SOURCES]
        started: list[subprocess.Popen[Any]] = [
            subprocess.Popen(compile_command(HERE / name, made)) for name, made in zip(SOURCES, objects, strict=True)
        ]
        codes = [one.wait(timeout=300) for one in started]
        if any(codes):
            raise RuntimeError("g++ could not compile the stand-in; its messages are above.")
        made, lib = Path(folder) / library.name, Path(torch.__file__).parent / "lib"
        linked = ["-L", str(lib), "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        subprocess.run(["g++", "-shared", "-o", str(made), *map(str, objects), *linked], check=True, timeout=300)
        made.replace(library)
    return library


def build_kernels() -> Path:
    """Return the GPU's kernels, compiled for the host."""
    library = _place_of("kernels_on_host.so", kernel_text().encode(), SHIM.read_bytes())
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            compile_for_host(Path(folder)).replace(library)
    return library


def _place_of(name: str, *made_of: bytes) -> Path:
    """Return where a library is kept for as long as what it is made of stays the same."""
    key = hashlib.blake2b(b"".join(made_of), digest_size=8).hexdigest()
    folder = HERE.parent.parent / "build" / "stand_in" / key
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def load(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
