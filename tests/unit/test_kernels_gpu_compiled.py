"""The GPU's kernels compiled for real devices, by NVRTC and with the options a launch would use.

NVRTC needs no device. Where it cannot be loaded these tests fail, and the error says which extra to install.
"""

from __future__ import annotations

import re
import struct
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, get_args

import numpy as np
import pytest
import torch

import flexcomm
from bench.gpu.compile import compile_text
from bench.gpu.devices import A100, H100, WARP, count_blocks
from flexcomm import TensorSpec
from flexcomm.codec import plan_buffer
from flexcomm.errors import FlexcommError
from flexcomm.kernels import Epilogue, EpilogueKind, Region, StateUpdate
from flexcomm.kernels.butterflies import plan_dct, plan_inverse_dct, plan_levels, rows_of_step
from flexcomm.kernels.gpu import OPTIONS, CupyLauncher, GpuKernels, compile_cubin, kernel_text, launcher
from flexcomm.kernels.gpu import compile as compiling
from flexcomm.testing import check_kernels
from tests.slow import slow_but

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.gpu.devices import Gpu
    from flexcomm.kernels.gpu.tables import Record

WITHOUT_BYTES = 8  # the kind of an ELF section that has no bytes in the file
ARCHITECTURES = ["80", "90", "100", "120", "121"]
B100 = H100._replace(name="B100", capability="100")
"""In all that says how many blocks fit; of the rest nothing is used here."""
RESERVED_NBYTES = 1024
"""Of each block's shared memory, for the system."""


@pytest.mark.parametrize("capability", slow_but(["90"], ARCHITECTURES))
def test_nvrtc_compiles_the_kernels(capability: str) -> None:
    """And hand over all of them, to the last byte: the sections of the file end where it does."""
    cubin = compile_cubin(capability)
    assert cubin[:4] == b"\x7fELF"
    sections_at, (size, count) = struct.unpack_from("<Q", cubin, 0x28)[0], struct.unpack_from("<HH", cubin, 0x3A)
    ends = [sections_at + size * count]
    for section in range(sections_at, ends[0], size):
        kind, begin, nbytes = struct.unpack_from("<4xI16xQQ", cubin, section)
        ends += [begin + nbytes] if kind != WITHOUT_BYTES else []
    programs_at, (size, count) = struct.unpack_from("<Q", cubin, 0x20)[0], struct.unpack_from("<HH", cubin, 0x36)
    assert max(*ends, programs_at + size * count) == len(cubin)


def test_the_newest_architecture_is_among_those_compiled() -> None:
    """CuPy names the newest that the NVRTC beside it knows."""
    assert max(compiling.load_nvrtc().getSupportedArchs()) <= max(map(int, ARCHITECTURES))


def ptx_of(text: str) -> str:
    nvrtc = compiling.load_nvrtc()
    program = nvrtc.createProgram(text, "flexcomm.cu", (), ())
    nvrtc.compileProgram(program, ("--gpu-architecture=compute_80", *OPTIONS))
    ptx = bytes(nvrtc.getPTX(program)).decode()
    nvrtc.destroyProgram(program)
    return ptx


def test_compiled_arithmetic_is_ieees() -> None:
    ptx = ptx_of(kernel_text())
    assert "div.rn.f32" in ptx
    assert not [word for word in (".ftz", ".approx", "div.full") if word in ptx]
    assert set(re.findall(r"\bfma\.\S+", ptx)) == {"fma.rn.f32"}


def test_nothing_is_fused_but_what_is_written_so() -> None:
    in_two_steps = "__device__ float in_two_steps(float x, float y, float z) { return x * y + z; }\n"
    assert "fma" not in ptx_of(in_two_steps + re.sub(r"\bfmaf\(", "in_two_steps(", kernel_text()))


class Noting:
    """A launcher that runs nothing, and notes what a block of each kernel gets: warps, and bytes of shared memory."""

    def __init__(self, gpu: Gpu) -> None:
        self.got: dict[str, tuple[int, int]] = {}
        self._most = gpu.shared_nbytes - RESERVED_NBYTES

    def shared_nbytes(self, device: torch.device) -> int:  # noqa: ARG002  (there is one)
        return self._most

    def launch(self, name: str, device: torch.device, grid: int, threads: int, shared_nbytes: int, job: Record) -> None:
        del device, grid, job
        self.got[name] = threads // WARP, shared_nbytes


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("gpu", [A100, H100, B100], ids=lambda gpu: gpu.name)
def test_nothing_is_spilled_and_nine_blocks_fit_a_multiprocessor(gpu: Gpu) -> None:
    """Of the kernels of a step with demo(), by registers, warps and shared memory. Compiles for seconds."""
    resources = compile_text("flexcomm.cu", kernel_text(), gpu.capability, OPTIONS).resources
    assert {name: one.spill_nbytes for name, one in resources.items() if one.spill_nbytes} == {}
    noting, xs = Noting(gpu), [torch.ones(shape) for shape in ((256, 192), (300,), (64,), (7, 5))]
    specs = [TensorSpec(str(number), tuple(x.shape), x.dtype) for number, x in enumerate(xs)]
    plan, kernels = plan_buffer(specs, flexcomm.demo(k=32)), GpuKernels(noting)
    words = torch.zeros(plan.nwords, dtype=torch.int32)
    kernels.encoder(plan, words).encode_(xs, None, None, StateUpdate(), step=0, sequence=0)
    decoder = kernels.decoder(plan, words, [Region("sender", 0, plan.nwords)])
    decoder.verify(step=0, sequence=0)
    for kind in get_args(EpilogueKind):
        decoder.decode_(xs, step=0, average="nodes", epilogue=Epilogue(kind))
    blocks = {
        name: count_blocks(gpu, resources[name]._replace(shared_nbytes=shared_nbytes), warps)
        for name, (warps, shared_nbytes) in noting.got.items()
    }
    assert blocks.keys() == {"encode", "verify", "decode_store", "decode_sign_step", "decode_plain_step"}
    assert {name: fitting for name, fitting in blocks.items() if fitting < 9} == {}


def test_compiled_kernels_are_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "compile_cubin", str.encode)
    path = compiling.find_cubin("90")
    assert path.read_bytes() == b"90"
    monkeypatch.setattr(compiling, "compile_cubin", lambda _: pytest.fail("compiled again"))
    assert compiling.find_cubin("90") == path
    assert list((tmp_path / "cache").iterdir()) == [path]


def test_where_no_folder_can_be_written_kernels_are_kept_elsewhere_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(compiling, "compile_cubin", str.encode)
    monkeypatch.setattr(compiling.tempfile, "gettempdir", lambda: str(tmp_path))
    assert compiling.find_cubin("90").parent.parent == tmp_path
    # A folder that others may write could hold any cubin.
    compiling.find_cubin("90").parent.chmod(0o777)
    with pytest.raises(FlexcommError, match="CUPY_CACHE_DIR"):
        compiling.find_cubin("90")


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


class Told(SimpleNamespace):
    """Something to enter, which is written down."""

    def __enter__(self) -> None:
        self.told.append(self.what)

    def __exit__(self, *_: object) -> None: ...


class OneDevice:
    """As much of CuPy as launches ask for: it writes down what it was told."""

    def __init__(self) -> None:
        told = self.told = list[object]()
        attributes = {"MaxSharedMemoryPerBlockOptin": 166912}
        stream = SimpleNamespace(from_external=lambda stream: Told(told=told, what=("stream", stream)))

        def device(index: int) -> Told:
            return Told(told=told, what=("device", index), attributes=attributes, compute_capability="80")

        self.cuda = SimpleNamespace(Device=device, Stream=stream)

    def RawModule(self, *, path: str) -> SimpleNamespace:  # noqa: N802  (CuPy's name)
        self.told.append(("module", path))

        def get_function(name: str) -> Callable[..., None]:
            return lambda *launch, **options: self.told.append((name, *launch, options))

        return SimpleNamespace(get_function=get_function)


def test_launches_go_to_torchs_stream_with_their_argument_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy passes an array of one item by value, whatever the item is. All kernels are loaded once a device."""
    cupy = OneDevice()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(launcher, "find_cubin", lambda capability: f"kernels for {capability}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    own, device, job = CupyLauncher(), torch.device("cuda", 1), np.array([(7, 0.5)], [("a", "u4"), ("b", "f4")])
    assert own.shared_nbytes(device) == 166912
    for kernel in ("encode", "encode", "verify"):
        own.launch(kernel, device, 30, 64, 17408, job)
    entered = [("device", 1), ("stream", "stream of cuda:1")]
    loaded, launched = cupy.told[2], cupy.told[3]
    assert isinstance(launched, tuple)
    name, grid, threads, (argument,), options = launched
    assert cupy.told[:2] == cupy.told[4:6] == entered
    assert loaded == ("module", "kernels for 80")
    assert (name, grid, threads, options) == ("encode", (30,), (64,), {"shared_mem": 17408})
    assert (argument.shape, argument.dtype.kind, argument.tobytes()) == ((1,), "V", job.tobytes())
    assert [told[0] for told in cupy.told[6:] if isinstance(told, tuple)] == ["encode", "device", "stream", "verify"]


@pytest.mark.parametrize("length", [1, 2, 7, 12, 20, 64, 140])
def test_steps_of_one_level_can_be_done_in_any_order(length: int) -> None:
    for program in (plan_dct(length), plan_inverse_dct(length)):
        order, bounds = plan_levels(program)
        assert sorted(order.tolist()) == list(range(len(program.steps)))
        for first, last in pairwise(bounds.tolist()):
            rows = [rows_of_step(*program.steps[number].tolist()) for number in order[first:last]]
            written = [row for rows_written, _ in rows for row in rows_written]
            assert len(written) == len(set(written))
            assert not set(written) & {row for _, rows_read in rows for row in rows_read}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_real_device_keeps_every_law_of_kernels() -> None:
    check_kernels(GpuKernels(), "cuda")
