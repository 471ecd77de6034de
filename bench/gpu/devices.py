"""GPUs as their makers describe them: how many blocks of a kernel fit, and how long its instructions take at least."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PIPES = ("FP32", "ALU", "LSU", "XU")


class Gpu(NamedTuple):
    """A GPU.

    Args:
        name: what it is called.
        capability: its compute capability, as ``sm_`` numbers it.
        sms: multiprocessors, each of four partitions, which issue one warp instruction a cycle each.
        clock_hz: at which they run.
        bytes_per_s: of its memory.
        shared_nbytes: shared memory of a multiprocessor.
        pipe_lanes: lanes of a multiprocessor that take an instruction of the pipe, each cycle.

    """

    name: str
    capability: str
    sms: int
    clock_hz: float
    bytes_per_s: float
    shared_nbytes: int
    pipe_lanes: Mapping[str, int]


A100 = Gpu("A100", "80", 108, 1.41e9, 2.039e12, 164 << 10, {"FP32": 64, "ALU": 64, "LSU": 32, "XU": 16})
H100 = Gpu("H100", "90", 132, 1.755e9, 3.352e12, 228 << 10, {"FP32": 128, "ALU": 64, "LSU": 32, "XU": 16})
GPUS = (A100, H100)
SOURCES = """\
Multiprocessors, clocks and memory: NVIDIA's datasheet of the A100 80GB SXM, and of the H100 SXM5 with the lower boost
clock of the PCIe card (an SXM5 may reach 1.98 GHz). Lanes: "Throughput of Native Arithmetic Instructions" of the CUDA
C++ Programming Guide; of LSU, 128 bytes a cycle. Shared memory and registers: its table of compute capabilities."""

DRAM_EFFICIENCY = 0.88
"""Of a memory's rate, what streams of reads and writes reach: assumed."""
_PARTITIONS = 4
WARP = 32
_REGISTERS_OF_PARTITION = 16384
_REGISTER_UNIT = 256
_RESERVED_SHARED_NBYTES = 1024
_SHARED_UNIT = 128
_MOST_BLOCKS = 32
_MOST_WARPS_OF_PARTITION = 16


class Resources(NamedTuple):
    """What a kernel needs, by ptxas."""

    registers: int
    spill_nbytes: int
    shared_nbytes: int


def count_blocks(gpu: Gpu, resources: Resources, warps: int) -> int:
    """Return how many blocks of ``warps`` warps fit a multiprocessor."""
    of_a_warp = -(-resources.registers * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    fitting_warps = min(_REGISTERS_OF_PARTITION // max(of_a_warp, 1), _MOST_WARPS_OF_PARTITION) * _PARTITIONS
    shared = -(-resources.shared_nbytes // _SHARED_UNIT) * _SHARED_UNIT + _RESERVED_SHARED_NBYTES
    return min(fitting_warps // warps, gpu.shared_nbytes // shared, _MOST_BLOCKS)


class Bandwidth(NamedTuple):
    """The share of the memory's rate that a kernel makes use of: without any overlap, with all of it; and the limit."""

    least: float
    most: float
    pipe: str


def estimate_bandwidth(gpu: Gpu, needed_nbytes: float, moved_nbytes: float, pipes: Mapping[str, float]) -> Bandwidth:
    """Estimate from what a chunk must move, what it does move, and what it issues.

    At least: the memory's time and then the busiest pipe's. At most: whichever is longer.

    Args:
        gpu: the device.
        needed_nbytes: bytes that no kernel could do without.
        moved_nbytes: bytes that the kernel loads and stores.
        pipes: warp instructions of each pipe, of LSU wavefronts of 128 bytes, and of all as ``"issued"``.

    """
    nbytes_per_cycle = gpu.bytes_per_s / gpu.sms / gpu.clock_hz
    cycles = {pipe: pipes.get(pipe, 0.0) * WARP / lanes for pipe, lanes in gpu.pipe_lanes.items()}
    cycles["issue"] = pipes["issued"] / _PARTITIONS
    pipe = max(cycles, key=lambda one: cycles[one])
    needed, moving = needed_nbytes / nbytes_per_cycle, moved_nbytes / nbytes_per_cycle / DRAM_EFFICIENCY
    return Bandwidth(needed / (moving + cycles[pipe]), needed / max(moving, cycles[pipe]), pipe)
