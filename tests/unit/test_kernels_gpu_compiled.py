"""``flexcomm/kernels/gpu/codec.cu`` compiled for real devices, by NVRTC and with the options a launch would use.

NVRTC needs no device. Where it cannot be loaded these tests fail, and the error says which extra to install.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from flexcomm.errors import FlexcommError
from flexcomm.kernels.gpu import OPTIONS, SOURCE, GpuKernels, compile_cubin, launcher
from flexcomm.testing import check_kernels
from tests.slow import slow_but

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("capability", slow_but(["90"], ["80", "90", "100"]))
def test_nvrtc_compiles_the_kernels(capability: str) -> None:
    assert compile_cubin(capability)[:4] == b"\x7fELF"


def test_compiled_arithmetic_is_ieees() -> None:
    nvrtc = launcher.load_nvrtc()
    program = nvrtc.createProgram(SOURCE.read_text(), SOURCE.name, (), ())
    nvrtc.compileProgram(program, ("--gpu-architecture=compute_80", *OPTIONS))
    text = bytes(nvrtc.getPTX(program)).decode()
    nvrtc.destroyProgram(program)
    assert "div.rn.f32" in text
    assert not [word for word in (".ftz", "fma.", ".approx", "div.full") if word in text]


def test_compiled_kernels_are_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(launcher, "compile_cubin", str.encode)
    path = launcher.find_cubin("90")
    assert path.read_bytes() == b"90"
    monkeypatch.setattr(launcher, "compile_cubin", lambda _: pytest.fail("compiled again"))
    assert launcher.find_cubin("90") == path
    assert list((tmp_path / "cache").iterdir()) == [path]


def test_a_device_nvrtc_does_not_know_is_an_error_that_says_so() -> None:
    with pytest.raises(FlexcommError, match="compute capability 11"):
        compile_cubin("11")


def no_library() -> None:
    raise RuntimeError("no such file: libnvrtc")


@pytest.mark.parametrize(
    "cupy",
    [None, SimpleNamespace(cuda=SimpleNamespace(nvrtc=SimpleNamespace(getVersion=no_library)))],
    ids=["without CuPy", "without NVRTC"],
)
def test_without_nvrtc_the_error_says_what_to_install(
    cupy: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(FlexcommError, match=r"flexcomm\[cuda13\]"):
        compile_cubin("90")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_real_device_keeps_every_law_of_kernels() -> None:
    check_kernels(GpuKernels(), "cuda")
