"""A launcher that runs kernels as they were compiled, instruction by instruction on the host, and counts.

Machine code where ``nvdisasm`` is installed, else PTX. Nothing is estimated here: every branch is taken as the data has
it, and every address is the one that a lane asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bench.gpu.compile import Compiled, compile_text
from bench.gpu.emulator.ptx import PtxKernel
from bench.gpu.emulator.sass.code import disassemble, find_nvdisasm
from bench.gpu.emulator.sass.kernel import SassKernel
from bench.gpu.emulator.warps import LANES, Work
from bench.gpu.pipes import find_pipe
from flexcomm.kernels.gpu import OPTIONS, GpuKernels, kernel_text

if TYPE_CHECKING:
    import torch

    from flexcomm.kernels.gpu.tables import Record


class Kernel(Protocol):
    """A kernel that the host runs."""

    @property
    def opcodes(self) -> Sequence[str]: ...

    def run(self, grid: int, threads: int, shared_nbytes: int, argument: bytes) -> Work: ...


class Launch(NamedTuple):
    """A kernel that ran: its blocks, and what their warps did."""

    kernel: str
    blocks: int
    threads: int
    shared_nbytes: int
    opcodes: Sequence[str]
    work: Work

    @property
    def warps_per_block(self) -> int:
        """Return how many warps a block has."""
        return -(-self.threads // LANES)


class Count(NamedTuple):
    """What launches cost. Of ``pipes``, LSU counts wavefronts; ``barriers`` are those that a block passes."""

    issued: int
    pipes: Counter[str]
    barriers: int
    loaded_nbytes: int
    stored_nbytes: int


def count(launches: Sequence[Launch]) -> Count:
    """Return what launches cost together."""
    pipes = Counter[str]()
    for launch in launches:
        for opcode, executed in zip(launch.opcodes, launch.work.executed, strict=True):
            pipes[find_pipe(opcode)] += executed
    pipes["LSU"] = sum(launch.work.wavefronts for launch in launches)
    return Count(
        sum(sum(launch.work.executed) for launch in launches),
        pipes,
        sum(launch.work.barriers for launch in launches),
        sum(launch.work.loaded_nbytes for launch in launches),
        sum(launch.work.stored_nbytes for launch in launches),
    )


class CountingLauncher:
    """A launcher whose device is this machine's memory; ``launches`` are those since it was emptied.

    Args:
        compiled: the kernels, for some architecture.
        is_sass: run machine code, where it can be disassembled; else PTX.
        shared_limit: in bytes, what a block may have.

    """

    def __init__(self, compiled: Compiled, *, is_sass: bool = True, shared_limit: int = 96 << 10) -> None:
        self._compiled, self._shared_limit = compiled, shared_limit
        nvdisasm = find_nvdisasm() if is_sass else None
        self._sass = disassemble(nvdisasm, compiled.cubin) if nvdisasm else ""
        self.is_sass = nvdisasm is not None
        self._kernels: dict[str, Kernel] = {}
        self.launches: list[Launch] = []

    def shared_nbytes(self, device: torch.device) -> int:  # noqa: ARG002  (there is one)
        """Return how much shared memory a block may have."""
        return self._shared_limit

    def launch(self, name: str, device: torch.device, grid: int, threads: int, shared_nbytes: int, job: Record) -> None:  # noqa: ARG002
        """Run a kernel, block by block."""
        kernel = self._kernels.get(name)
        if kernel is None:
            kernel = self._kernels[name] = self._load(name)
        work = kernel.run(grid, threads, shared_nbytes, job.tobytes())
        self.launches.append(Launch(name, grid, threads, shared_nbytes, kernel.opcodes, work))

    def _load(self, name: str) -> Kernel:
        if self.is_sass:
            return SassKernel(self._sass, name, self._compiled.cubin)
        return PtxKernel(self._compiled.ptx, name)


@cache
def compile_kernels(capability: str) -> Compiled:
    """Return the library's kernels."""
    return compile_text("flexcomm.cu", kernel_text(), capability, OPTIONS)


def emulated_kernels(capability: str, *, is_sass: bool = True) -> GpuKernels:
    """Return the library's kernels as they are run here, on the host's tensors."""
    return GpuKernels(CountingLauncher(compile_kernels(capability), is_sass=is_sass))
