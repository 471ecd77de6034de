"""The GPU's kernel set: the loops of ``codec.cu``, compiled by NVRTC and launched by CuPy on torch's own stream.

Tensors are passed by address, and temporaries come from torch's allocator: nothing is copied, and one pool of memory
serves both. What is launched, and how, does not depend on CuPy: a ``Launcher`` is asked, and the tests' one runs the
same text on the host.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import math
import os
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from flexcomm.errors import FlexcommError
from flexcomm.kernels.butterflies import ADD_SCALED, SCALE, Program, plan_dct, plan_inverse_dct
from flexcomm.kernels.plan import NO_DRAW
from flexcomm.kernels.protocol import LARGEST_MAGNITUDE, Average, Fault, Momentum, Payload, Survey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from flexcomm.kernels.plan import Draw, Layout, TensorPlan

__all__ = ["OPTIONS", "SOURCE", "CupyLauncher", "GpuKernels", "Job", "Launcher", "compile_cubin"]

SOURCE = Path(__file__).with_name("codec.cu")
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Arithmetic as IEEE has it: whatever is fused, flushed or approximated would differ from the other kernel sets."""

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_EXPONENT = int(math.log2(LARGEST_MAGNITUDE))
_UNFIT_BITS = {
    torch.float32: (127 + _EXPONENT) << 23,
    torch.bfloat16: (127 + _EXPONENT) << 7,
    torch.float16: 0x7C00,
    torch.float64: (1023 + _EXPONENT) << 52,
}
"""The least magnitude that is unfit, as bits. All finite numbers of float16 are fit."""

_BINS = 1 << 15
_NO_FAULT = (1 << 63) - 1
_LOW32 = (1 << 32) - 1
_SUM_LANES = 32
_WORD_NBYTES = 4

_SHORT = 128
"""Elements of a one-row chunk up to which a single thread does its selection, and a block does many side by side."""
_WIDEST_GROUP = 64
_ELEMENTS_PER_THREAD = 8
_ITEM_BLOCKS = 1024
_USUAL_SHARED_NBYTES = 48 << 10
"""What a block may have without asking for more; small groups fit several blocks on a multiprocessor."""
_LARGEST_GRID = (1 << 31) - 1
_WORKSPACE_BLOCKS = 256
_WORKSPACE_WORDS = 1 << 26
"""Chunks too large for shared memory are worked on in global memory, so many at a time."""


class _Transform(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("height", "levels", "inputs", "outputs", "bounds", "steps")]


class _Section(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("indices", "scales", "values", "code", "low_bits", "entry_bits", "chunk_bits", "before")
    ]


class Job(ctypes.Structure):
    """What every kernel is given, by value: ``struct Job`` of ``codec.cu``, field by field. Addresses are integers."""

    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in (
                "rows", "cols", "chunk_rows", "chunk_cols", "grid_cols", "chunk_numel", "chunks",
                "transformed", "selection", "keep", "tau_bits", "values", "value_bits", "scales", "count_bits",
                "key", "start", "element", "numel", "first", "senders", "by_contributors",
                "group", "solo", "pitch", "pitch_down", "pitch_along", "turned_at", "marks_at", "ranks_at",
                "block_words",
            )
        ],
        ("decay", ctypes.c_float),
        ("factor", ctypes.c_float),
        ("down", _Transform),
        ("along", _Transform),
        ("own", _Section),
        *[
            (name, ctypes.c_int64)
            for name in ("sections", "memory", "state", "next_state", "words", "counts", "answer", "workspace")
        ],
    ]  # fmt: skip

    def __init__(self, **fields: int | float) -> None:
        super().__init__(**fields)
        self._kept: list[Tensor] = []

    def point(self, **tensors: Tensor | None) -> None:
        """Set addresses, and keep what they lead to for as long as this job.

        Memory given back before the launch could be given out again for another part of the same launch.
        """
        for field, tensor in tensors.items():
            if tensor is not None:
                setattr(self, field, tensor.data_ptr())
                self._kept.append(tensor)


class Launcher(Protocol):
    """Runs a kernel of ``codec.cu`` by name, behind everything torch was told before, on one device."""

    def shared_nbytes(self, device: torch.device) -> int:
        """Return how much shared memory a block may have at most."""
        ...

    def launch(self, name: str, grid: int, threads: int, shared_nbytes: int, job: Job, device: torch.device) -> None:
        """Start ``grid`` blocks of so many threads."""
        ...


class GpuKernels:
    """Kernels compiled by NVRTC. ``threads`` is the most of a block, 256 or fewer; the bits do not depend on it."""

    name = "gpu"

    def __init__(self, launcher: Launcher | None = None, threads: int = 256) -> None:
        self._launcher = CupyLauncher() if launcher is None else launcher
        self._threads = threads

    def is_fit(self, x: Tensor) -> bool:
        job = Job(element=_ELEMENTS[x.dtype], numel=x.numel(), first=_UNFIT_BITS[x.dtype])
        job.point(memory=x.detach().contiguous())
        return self._ask("find_unfit", x.numel(), job, x.device) == 0

    def survey(self, x: Tensor, plan: TensorPlan, momentum: Momentum) -> Survey:
        job = _coefficients_job(x, plan, NO_DRAW, momentum)
        counts = torch.zeros(plan.chunks, dtype=torch.int64, device=x.device)
        tau_bits = int(np.float32(plan.tau).view(np.int32))
        self._count(job, plan, tau_bits, counts)
        if int(counts.sum()) > plan.keep:
            bins, job.first = torch.zeros(_BINS, dtype=torch.int64, device=x.device), (tau_bits >> 16) + 1
            job.point(counts=bins)
            self._launch_chunks("histogram_of_chunks", plan, job, x.device)
            tau_bits = _raised_threshold(bins, job.first, plan.keep)
            self._count(job, plan, tau_bits, counts)
        return Survey(counts, tau_bits)

    def encode_(
        self,
        x: Tensor,
        words: Tensor,
        plan: TensorPlan,
        layout: Layout,
        draw: Draw,
        momentum: Momentum,
        survey: Survey | None = None,
    ) -> bool:
        words.zero_()
        answer, job = _answer(x.device), _coefficients_job(x, plan, draw, momentum)
        job.point(words=words, answer=answer)
        if survey is None:
            job.own = _section(0, layout, None)
        else:
            before, job.tau_bits = _before(survey.counts), survey.tau_bits
            job.own = _section(0, layout, before)
            job.first = layout.counts
            job.point(counts=survey.counts)
            self._launch_items("write_counts", plan.chunks, job, x.device)
        rest = None if momentum.next_state is None else _dense(momentum.next_state)
        job.point(next_state=rest)
        self._launch_chunks("encode_chunks", plan, job, x.device)
        _give(rest, momentum.next_state)
        return int(answer) == 0

    def read_counts(self, words: Tensor, plan: TensorPlan, start: int) -> Tensor | None:
        counts, job = torch.empty(plan.chunks, dtype=torch.int64, device=words.device), _job(plan)
        job.first = start
        job.point(words=words, counts=counts)
        return counts if self._ask("read_counts", plan.chunks, job, words.device) == 0 else None

    def find_fault(self, words: Tensor, payload: Payload, plan: TensorPlan) -> Fault:
        answer, job, before = _answer(words.device, _NO_FAULT), _job(plan), _before(payload.counts)
        job.own = _section(payload.start, payload.layout, before)
        job.point(words=words, answer=answer)
        self._launch_chunks("find_faults", plan, job, words.device)
        found = int(answer)
        return Fault.NONE if found == _NO_FAULT else Fault(found & 3)

    def decode_(
        self,
        words: Tensor,
        payloads: Sequence[Payload],
        plan: TensorPlan,
        draw: Draw,
        average: Average,
        out: Tensor,
    ) -> None:
        dense, job, befores = _dense(out), _job(plan, draw), [_before(payload.counts) for payload in payloads]
        sections = [
            _section(payload.start, payload.layout, before) for payload, before in zip(payloads, befores, strict=True)
        ]
        _add_transforms(job, plan, out.device, inverse=True)
        job.factor, job.element, job.senders = _factor(plan, 1.0), _ELEMENTS[out.dtype], len(payloads)
        job.by_contributors = int(average == "contributors")
        job.point(memory=dense, words=words, sections=_on_device(_numbers(sections), out.device))
        self._launch_chunks("decode_chunks", plan, job, out.device)
        _give(dense, out)

    def checksum(self, words: Tensor, first: int) -> int:
        job = Job(numel=words.numel(), first=first)
        job.point(words=words)
        return self._ask("add_checksum", words.numel(), job, words.device) & _LOW32

    def _count(self, job: Job, plan: TensorPlan, tau_bits: int, counts: Tensor) -> None:
        job.tau_bits = tau_bits
        job.point(counts=counts)
        self._launch_chunks("survey_chunks", plan, job, counts.device)

    def _ask(self, kernel: str, items: int, job: Job, device: torch.device) -> int:
        """Return what a kernel leaves in its answer, which is zero before; the host waits for it."""
        answer = _answer(device)
        job.point(answer=answer)
        self._launch_items(kernel, items, job, device)
        return int(answer)

    def _launch_items(self, kernel: str, items: int, job: Job, device: torch.device) -> None:
        if items:
            grid = min(-(-items // (self._threads * _ELEMENTS_PER_THREAD)), _ITEM_BLOCKS)
            self._launcher.launch(kernel, grid, self._threads, _WORD_NBYTES, job, device)

    def _launch_chunks(self, kernel: str, plan: TensorPlan, job: Job, device: torch.device) -> None:
        if not plan.chunks:
            return
        share = _plan_share(plan, self._threads, self._launcher.shared_nbytes(device))
        for field, value in share.fields.items():
            setattr(job, field, value)
        if share.workspace_words:
            job.point(workspace=torch.empty(share.workspace_words, dtype=torch.int32, device=device))
        self._launcher.launch(kernel, share.grid, share.threads, share.shared_nbytes, job, device)


class _Share(NamedTuple):
    """How chunks are shared out among blocks, and where a block keeps what it works on."""

    grid: int
    threads: int
    shared_nbytes: int
    workspace_words: int
    fields: dict[str, int]


@lru_cache(maxsize=256)
def _plan_share(plan: TensorPlan, most_threads: int, most_shared_nbytes: int) -> _Share:
    group = _plan_group(plan, most_threads)
    fields = _plan_areas(plan, group)
    # One thread may do a whole chunk, so there are at least as many threads as chunks side by side.
    wanted = max(32, group, -(-group * plan.chunk_numel // (32 * _ELEMENTS_PER_THREAD)) * 32)
    threads = min(most_threads, wanted)
    grid = min(-(-plan.chunks // group), _LARGEST_GRID)
    counters, words = 3 + 2 * threads, fields["block_words"]
    if (words + counters) * _WORD_NBYTES <= most_shared_nbytes:
        return _Share(grid, threads, (words + counters) * _WORD_NBYTES, 0, fields)
    grid = min(grid, _WORKSPACE_BLOCKS, max(1, _WORKSPACE_WORDS // words))
    return _Share(grid, threads, counters * _WORD_NBYTES, grid * words, fields)


def _plan_group(plan: TensorPlan, most_threads: int) -> int:
    """Return how many chunks a block works on side by side: of short ones of one row, as many as fit the usual memory.

    Alone, such a chunk would leave most threads of a block waiting for each other.
    """
    group = min(_WIDEST_GROUP, most_threads)
    if plan.chunk_rows > 1 or plan.chunk_numel > _SHORT:
        return 1
    while group > 1 and _plan_areas(plan, group)["block_words"] * _WORD_NBYTES > _USUAL_SHARED_NBYTES * 3 // 4:
        group //= 2
    return group


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
        "solo": int(group > 1),
        "pitch": pitch,
        "pitch_down": pitch_down,
        "pitch_along": pitch_along,
        "turned_at": row,
        "marks_at": row + turned,
        "ranks_at": row + turned + marks,
        "block_words": row + turned + 2 * marks,
    }


def _add_transforms(job: Job, plan: TensorPlan, device: torch.device, *, inverse: bool) -> None:
    lengths = (plan.chunk_rows, plan.chunk_cols) if plan.transformed else (1, 1)
    down, along = (_load_program(length, inverse, device) for length in lengths)
    job.down, job.along = down.addresses, along.addresses


class _Loaded(NamedTuple):
    """A program on a device: where its lists are, and the tensor that keeps them there."""

    addresses: _Transform
    memory: Tensor


@cache
def _load_program(length: int, inverse: bool, device: torch.device) -> _Loaded:
    """Put a program's lists into a device's memory, for good: a kernel may be reading them on any stream."""
    program = plan_inverse_dct(length) if inverse else plan_dct(length)
    order, bounds = _plan_levels(program)
    steps = np.zeros((len(order), 8), np.int32)
    steps[:, :3] = program.steps[order]
    steps[:, 4:] = program.factors[order].view(np.int32)
    lists = [steps.reshape(-1), program.inputs, program.outputs, bounds]
    memory = torch.from_numpy(np.concatenate(lists)).to(device)
    begins = np.cumsum([0, *(part.size for part in lists)]) * _WORD_NBYTES + memory.data_ptr()
    at_steps, at_inputs, at_outputs, at_bounds = begins[:-1].tolist()
    return _Loaded(_Transform(program.height, len(bounds) - 1, at_inputs, at_outputs, at_bounds, at_steps), memory)


def _plan_levels(program: Program) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the order of steps by level, and where in it each level begins and the last one ends.

    No step of a level writes what another of them reads or writes, so all can be done at once, with the same bits.
    A transform of 64 rows has 270 steps but 9 levels.
    """
    last_write, last_use = [0] * program.height, [0] * program.height
    levels = []
    for code, i, j in program.steps.tolist():
        written, read = _rows_of_step(code, i, j)
        level = 1 + max([last_use[row] for row in written] + [last_write[row] for row in read])
        for row in written:
            last_write[row] = last_use[row] = level
        for row in read:
            last_use[row] = max(last_use[row], level)
        levels.append(level)
    order = np.argsort(levels, kind="stable").astype(np.int64)
    bounds = np.searchsorted(np.sort(levels), np.arange(1, max(levels, default=0) + 2))
    return order, bounds.astype(np.int32)


def _rows_of_step(code: int, i: int, j: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which rows a step writes, and which it only reads."""
    if code == SCALE:
        return (i,), ()
    return ((i,), (j,)) if code == ADD_SCALED else ((i, j), ())


def _job(plan: TensorPlan, draw: Draw = NO_DRAW) -> Job:
    return Job(
        rows=plan.rows,
        cols=plan.cols,
        chunk_rows=plan.chunk_rows,
        chunk_cols=plan.chunk_cols,
        grid_cols=plan.grid_cols,
        chunk_numel=plan.chunk_numel,
        chunks=plan.chunks,
        transformed=int(plan.transformed),
        selection=int(plan.selection),
        keep=plan.keep,
        values=int(plan.values),
        value_bits=plan.values.bits,
        scales=plan.values.scales,
        count_bits=plan.chunk_numel.bit_length(),
        key=draw.key & _LOW32,
        start=draw.start,
    )


def _coefficients_job(x: Tensor, plan: TensorPlan, draw: Draw, momentum: Momentum) -> Job:
    """Return a job that can compute ``decay * state + gain * coefficients`` of ``x``."""
    job = _job(plan, draw)
    job.element, job.decay, job.factor = _ELEMENTS[x.dtype], momentum.decay, _factor(plan, momentum.gain)
    job.point(memory=x.detach().contiguous(), state=None if momentum.state is None else momentum.state.contiguous())
    _add_transforms(job, plan, x.device, inverse=False)
    return job


def _section(start: int, layout: Layout, before: Tensor | None) -> _Section:
    return _Section(
        indices=start + layout.indices,
        scales=start + layout.scales,
        values=start + layout.values,
        code=int(layout.code),
        low_bits=layout.low_bits,
        entry_bits=layout.entry_bits,
        chunk_bits=layout.chunk_bits,
        before=0 if before is None else before.data_ptr(),
    )


def _numbers(sections: Sequence[_Section]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(map(bytes, sections))), dtype=torch.int64)


def _on_device(host: Tensor, device: torch.device) -> Tensor:
    # From pinned memory the copy is queued; from any other, the host would wait for all that is queued before it.
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def _before(counts: Tensor | None) -> Tensor | None:
    """Return how many entries precede each chunk, and how many there are; torch's scan is a tuned one, and exact."""
    return None if counts is None else torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _answer(device: torch.device, start: int = 0) -> Tensor:
    return torch.full((), start, dtype=torch.int64, device=device)


def _dense(target: Tensor) -> Tensor:
    """Return the target if kernels can fill it, else memory that they can."""
    return target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype, device=target.device)


def _give(filled: Tensor | None, target: Tensor | None) -> None:
    if filled is not None and target is not None and filled is not target:
        target.copy_(filled)


def _factor(plan: TensorPlan, gain: float) -> float:
    return gain / math.sqrt(plan.chunk_numel) if plan.transformed else gain


def _raised_threshold(bins: Tensor, first: int, keep: int) -> int:
    """Return the lowest edge of a bin, from the first on, that at most ``keep`` magnitudes reach."""
    reaching = bins.flip(0).cumsum(0).flip(0)
    return (first + int((reaching[first:] <= keep).nonzero()[0])) << 16


# --- a real device ----------------------------------------------------------------------------------------------------


class CupyLauncher:
    """Launches on a CUDA device, on torch's current stream; compiles for it first, once a machine."""

    def __init__(self) -> None:
        self._cupy: Any = importlib.import_module("cupy")  # it has no types
        self._kernels: dict[tuple[str, int], Any] = {}

    def shared_nbytes(self, device: torch.device) -> int:
        return int(self._cupy.cuda.Device(device.index).attributes["MaxSharedMemoryPerBlockOptin"])

    def launch(self, name: str, grid: int, threads: int, shared_nbytes: int, job: Job, device: torch.device) -> None:
        cuda = self._cupy.cuda
        # A numpy array of one item is passed by value, whatever the item is.
        argument = np.frombuffer(bytes(job), np.dtype((np.void, ctypes.sizeof(job))))
        with cuda.Device(device.index), cuda.Stream.from_external(torch.cuda.current_stream(device)):
            self._kernel(name, device)((grid,), (threads,), (argument,), shared_mem=shared_nbytes)

    def _kernel(self, name: str, device: torch.device) -> Any:  # a function of CuPy's, which has no types
        key = name, device.index
        if key not in self._kernels:
            path = _find_cubin(self._cupy.cuda.Device(device.index).compute_capability)
            kernel = self._cupy.RawModule(path=str(path)).get_function(name)
            kernel.max_dynamic_shared_size_bytes = self.shared_nbytes(device)
            self._kernels[key] = kernel
        return self._kernels[key]


def _find_cubin(capability: str) -> Path:
    """Return where the compiled kernels are, among CuPy's own; compile them if they are not there yet."""
    version = importlib.import_module("cupy").cuda.nvrtc.getVersion()
    made_of = repr((SOURCE.read_text(), OPTIONS, capability, version))
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
    nvrtc: Any = importlib.import_module("cupy").cuda.nvrtc  # it has no types
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
