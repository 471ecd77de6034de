"""A launch of a kernel of ``codec.cu``: blocks and threads, what it is given, and how NVRTC compiles it for CuPy."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcomm.errors import FlexcommError
from flexcomm.kernels.butterflies import ADD_SCALED, SCALE, Program, plan_dct, plan_inverse_dct
from flexcomm.kernels.layout import WORD_NBYTES
from flexcomm.kernels.plan import TensorPlan

SOURCE = Path(__file__).with_name("codec.cu")
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Arithmetic as IEEE has it: whatever is fused, flushed or approximated would differ from the other kernel sets."""
_SHORT = 128
"""Elements of a one-row chunk up to which a single thread does its selection, and a block does many side by side."""
_WIDEST_GROUP = 64
_ELEMENTS_PER_THREAD = 8
_ITEM_BLOCKS = 1024
_SUM_LANES = 32
_USUAL_SHARED_NBYTES = 48 << 10
"""What a block may have without asking for more; small groups fit several blocks on a multiprocessor."""
_LARGEST_GRID = (1 << 31) - 1
_WORKSPACE_BLOCKS = 256
_WORKSPACE_WORDS = 1 << 26
"""Chunks too large for shared memory are worked on in global memory, so many at a time."""


def _int64s(names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names.split()]


# The structures of codec.cu, field by field. Addresses are integers.
class Transform(ctypes.Structure):
    """A transform's program, in the memory of a device, which it holds."""

    _fields_ = _int64s("height levels inputs outputs bounds steps")
    memory: Tensor


class Section(ctypes.Structure):
    """Where one sender's sections begin, how its indices are written, and where its entries before each chunk are."""

    _fields_ = _int64s("indices scales values code low_bits entry_bits chunk_bits value_padding before")


class Term(ctypes.Structure):
    """A vector to be mixed in, and its weight."""

    _fields_ = [("memory", ctypes.c_int64), ("weight", ctypes.c_double)]


class Job(ctypes.Structure):
    """What every kernel is given, by value; and the device to run on, that of its tensors."""

    _fields_ = [
        *_int64s("rows cols chunk_rows chunk_cols grid_cols chunk_numel chunks"),
        *_int64s("transformed selection k tau_bits values value_bits scales count_bits key start"),
        *_int64s("element numel first senders divisor term_count"),
        *_int64s("group pitch pitch_down pitch_along turned_at marks_at ranks_at block_words"),
        *[(name, ctypes.c_float) for name in ("decay", "factor", "stays", "padding")],
        *[("down", Transform), ("along", Transform), ("own", Section)],
        *_int64s("sections memory state next_state words counts answer workspace terms out distances"),
    ]
    device: torch.device

    def __init__(self, **numbers: float) -> None:
        super().__init__(**numbers)
        self._held: list[Tensor] = []

    def set(self, **fields: float | Tensor | ctypes.Structure | None) -> None:
        """Set fields: to a number, a structure, or the address of a tensor."""
        for name, value in fields.items():
            setattr(self, name, self.address_of(value) if isinstance(value, Tensor) else value or 0)

    def address_of(self, x: Tensor) -> int:
        """Return the address of a tensor, which is held for as long as this job.

        Memory given back before the launch could be given out again for another part of the same launch.
        """
        self._held.append(x)
        self.device = x.device
        return x.data_ptr()


class LaunchConfig(NamedTuple):
    """How many blocks of how many threads, the memory they need, and the fields of a job that say where it is."""

    grid: int
    threads: int
    shared_nbytes: int
    workspace_words: int = 0
    fields: dict[str, int] = {}  # noqa: RUF012  (never changed)


def plan_item_launch(items: int, threads: int, shared_nbytes: int = WORD_NBYTES) -> LaunchConfig:
    """Share out items that have nothing to do with each other; by default, a block has one word to add up in."""
    return LaunchConfig(min(-(-items // (threads * _ELEMENTS_PER_THREAD)), _ITEM_BLOCKS), threads, shared_nbytes)


@lru_cache(maxsize=256)
def plan_chunk_launch(plan: TensorPlan, most_threads: int, most_shared_nbytes: int) -> LaunchConfig:
    # Of short chunks of one row, a block works on as many side by side as fit the usual memory: alone, such a chunk
    # would leave most threads of a block waiting for each other.
    group = 1 if plan.chunk_rows > 1 or plan.chunk_numel > _SHORT else min(_WIDEST_GROUP, most_threads)
    fields = _plan_areas(plan, group)
    while group > 1 and fields["block_words"] * WORD_NBYTES > _USUAL_SHARED_NBYTES * 3 // 4:
        group //= 2
        fields = _plan_areas(plan, group)
    # One thread may do a whole chunk, so there are at least as many threads as chunks side by side.
    wanted = max(32, group, -(-group * plan.chunk_numel // (32 * _ELEMENTS_PER_THREAD)) * 32)
    threads = min(most_threads, wanted)
    grid = min(-(-plan.chunks // group), _LARGEST_GRID)
    counters, words = 3 + 2 * threads, fields["block_words"]
    if (words + counters) * WORD_NBYTES <= most_shared_nbytes:
        return LaunchConfig(grid, threads, (words + counters) * WORD_NBYTES, 0, fields)
    grid = min(grid, _WORKSPACE_BLOCKS, max(1, _WORKSPACE_WORDS // words))
    return LaunchConfig(grid, threads, counters * WORD_NBYTES, grid * words, fields)


def _plan_areas(plan: TensorPlan, group: int) -> dict[str, int]:
    """Return the fields of a job that say where a block keeps what it works on.

    Rows are an odd number of words apart: then neighbouring threads, whether they go along a row or down a column, ask
    different banks of shared memory.
    """
    numel, pitch = plan.chunk_numel, group | 1
    pitch_down, pitch_along = plan.chunk_cols | 1, pitch if plan.chunk_rows == 1 else plan.chunk_rows | 1
    row, turned = numel * pitch, max(numel, _SUM_LANES) * pitch
    if plan.transformed:
        row = max(row, plan_dct(plan.chunk_rows).height * pitch_down if plan.chunk_rows > 1 else 0)
        turned = max(turned, plan_dct(plan.chunk_cols).height * pitch_along)
    # The upper bits of Elias and Fano's code are fewer than two for each element of a chunk.
    marks = -(-2 * numel // 32) * group
    return {
        "group": group,
        "pitch": pitch,
        "pitch_down": pitch_down,
        "pitch_along": pitch_along,
        "turned_at": row,
        "marks_at": row + turned,
        "ranks_at": row + turned + marks,
        "block_words": row + turned + 2 * marks,
    }


@cache
def load_transform(length: int, device: torch.device, *, inverse: bool) -> Transform:
    """Put a transform's lists into a device's memory.

    They stay there for good: a kernel may be reading them on any stream.
    """
    program = plan_inverse_dct(length) if inverse else plan_dct(length)
    order, bounds = plan_levels(program)
    steps = np.zeros((len(order), 8), np.int32)
    steps[:, :3] = program.steps[order]
    steps[:, 4:] = program.factors[order].view(np.int32)
    lists = [program.inputs, program.outputs, bounds]
    # The steps come first: the kernel reads them aligned.
    memory = torch.from_numpy(np.concatenate([steps.reshape(-1), *lists])).to(device)
    begins = np.cumsum([steps.size, *(part.size for part in lists)]) * WORD_NBYTES + memory.data_ptr()
    transform = Transform(program.height, len(bounds) - 1, *begins[:-1].tolist(), memory.data_ptr())
    transform.memory = memory
    return transform


def plan_levels(program: Program) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the order of steps by level, and where in it each level begins and the last one ends.

    No step of a level writes what another of them reads or writes, so all can be done at once, with the same bits.
    A transform of 64 rows has 270 steps but 9 levels.
    """
    last_write, last_use = [0] * program.height, [0] * program.height
    levels = []
    for code, i, j in program.steps.tolist():
        written, read = rows_of_step(code, i, j)
        level = 1 + max([last_use[row] for row in written] + [last_write[row] for row in read])
        for row in written:
            last_write[row] = last_use[row] = level
        for row in read:
            last_use[row] = max(last_use[row], level)
        levels.append(level)
    order = np.argsort(levels, kind="stable").astype(np.int64)
    bounds = np.searchsorted(np.sort(levels), np.arange(1, max(levels, default=0) + 2))
    return order, bounds.astype(np.int32)


def rows_of_step(code: int, i: int, j: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which rows a step writes, and which it only reads."""
    if code == SCALE:
        return (i,), ()
    return ((i,), (j,)) if code == ADD_SCALED else ((i, j), ())


class CupyLauncher:
    """Launches on a CUDA device, on torch's current stream; compiles for it first, once a machine."""

    def __init__(self) -> None:
        self._cupy: Any = importlib.import_module("cupy")  # it has no types
        self._kernels: dict[tuple[str, int], Any] = {}

    def shared_nbytes(self, device: torch.device) -> int:
        """Return how much shared memory a block may have at most."""
        return int(self._cupy.cuda.Device(device.index).attributes["MaxSharedMemoryPerBlockOptin"])

    def launch(self, name: str, config: LaunchConfig, job: Job) -> None:
        """Run a kernel behind everything torch was told before."""
        cuda, device = self._cupy.cuda, job.device
        # A numpy array of one item is passed by value, whatever the item is.
        argument = np.frombuffer(bytes(job), np.dtype((np.void, ctypes.sizeof(job))))
        with cuda.Device(device.index), cuda.Stream.from_external(torch.cuda.current_stream(device)):
            if (name, device.index) not in self._kernels:
                path = find_cubin(cuda.Device(device.index).compute_capability)
                kernel = self._cupy.RawModule(path=str(path)).get_function(name)
                kernel.max_dynamic_shared_size_bytes = self.shared_nbytes(device)
                self._kernels[name, device.index] = kernel
            launch = self._kernels[name, device.index]
            launch((config.grid,), (config.threads,), (argument,), shared_mem=config.shared_nbytes)


def find_cubin(capability: str) -> Path:
    """Return where the compiled kernels are, among CuPy's own; compile them if they are not there yet."""
    made_of = repr((SOURCE.read_text(), OPTIONS, capability, load_nvrtc().getVersion()))
    folder = Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()
    path = folder / f"flexcomm-{hashlib.sha256(made_of.encode()).hexdigest()}.cubin"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(compile_cubin(capability))
        # All ranks of a node may get here at once: each finds a whole file, its own or another's.
        Path(file.name).replace(path)
    return path


def compile_cubin(capability: str) -> bytes:
    """Return ``codec.cu`` compiled for a compute capability such as ``"90"``; no device is needed.

    Not by ``cupy.RawModule``, which appends ``-ftz=true`` to any options: https://github.com/cupy/cupy/issues/9576.
    """
    nvrtc = load_nvrtc()
    program = nvrtc.createProgram(SOURCE.read_text(), SOURCE.name, (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture=sm_{capability}", *OPTIONS))
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        version = ".".join(map(str, nvrtc.getVersion()))
        raise FlexcommError(
            f"NVRTC {version} cannot compile the kernels for compute capability {capability}: "
            f"{nvrtc.getProgramLog(program)} Install an nvidia-cuda-nvrtc that knows the device, or set "
            f"FLEXCOMM_KERNELS=reference."
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def load_nvrtc() -> Any:  # CuPy has no types
    """Return CuPy's interface to NVRTC, with NVRTC loaded: CuPy itself looks for it no sooner than it is asked."""
    try:
        nvrtc = importlib.import_module("cupy").cuda.nvrtc
        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        raise FlexcommError(
            f"NVRTC, which compiles the GPU kernels, cannot be loaded ({str(error).strip()}). Install the extra "
            f"that fits the driver, flexcomm[cuda13] or flexcomm[cuda12], or set FLEXCOMM_KERNELS=reference."
        ) from error
    return nvrtc
