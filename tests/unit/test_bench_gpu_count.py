"""Counting kernels: what an emulator makes of machine code and of PTX, and what kernels cost that one counts by hand.

PTX is run always, SASS where nvdisasm is installed.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from bench.gpu.cases import CASES, Measured, run_case
from bench.gpu.command import find_figures
from bench.gpu.compile import Compiled, compile_by_nvcc, compile_text, read_log
from bench.gpu.count import CountingLauncher, Launch, compile_kernels, count, emulated_kernels
from bench.gpu.count_table import COLUMNS, Row, count_cases, count_verb, describe, format_row
from bench.gpu.cuda_on_host import HostLauncher, compile_for_host
from bench.gpu.devices import A100, H100, Resources, count_blocks, estimate_bandwidth
from bench.gpu.emulator.numbers import fused, round_f64, to_integer
from bench.gpu.emulator.sass.code import Instruction, find_nvdisasm, parse_sass
from bench.gpu.emulator.sass.control import CONTROL
from bench.gpu.emulator.sass.operands import SassWarp
from bench.gpu.emulator.warps import LANES, Block, NotConvergedError, Work
from bench.gpu.pipes import find_pipe
from flexcomm.testing import KERNEL_LAWS
from tests.slow import slow_but

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from flexcomm.kernels import Kernels

CAPABILITIES = ["80", "90", "100"]
TEXT = """\
struct Job { const float* x; float* y; unsigned rounds; unsigned limit; };
extern __shared__ unsigned shared_words[];

__device__ float twice(const float* x, unsigned rounds) {
    float sum = 0.0f;
    #pragma unroll 1
    for (unsigned i = 0; i < rounds; i++) {
        sum += x[i * 64u];
        __syncthreads();
    }
    return sum;
}

extern "C" __global__ void add(const Job job) {
    float sum = 0.0f;
    unsigned at = blockIdx.x * 64u + threadIdx.x;
    if (blockIdx.x < job.limit) {
        sum = twice(job.x + threadIdx.x, job.rounds);
    } else {
        sum = twice(job.x + threadIdx.x, 2u * job.rounds);
        __syncthreads();
    }
    job.y[at] = sum;
}

extern "C" __global__ void divide(const Job job) {
    job.y[threadIdx.x] = job.x[2u * threadIdx.x] / job.x[2u * threadIdx.x + 1u];
}

extern "C" __global__ void part(const Job job) {
    unsigned lane = threadIdx.x % 32u, trips = 0u;
    #pragma unroll 1
    while (__float_as_uint(job.x[trips]) != lane) trips++;
    shared_words[threadIdx.x] = trips;
    __syncwarp();
    unsigned other = __shfl_down_sync(~0u, shared_words[threadIdx.x ^ 1u], 2);
    if (lane & 1u) atomicAdd((unsigned*)job.y + 64, other);
    job.y[threadIdx.x] = (float)__popc(__ballot_sync(~0u, trips > 3u)) + other;
}

extern "C" __global__ void meet(const Job job) {
    if (threadIdx.x < job.limit) __syncwarp();
    __syncthreads();
    job.y[threadIdx.x] = 0.0f;
}

extern "C" __global__ void conflicts(const Job job) {
    shared_words[threadIdx.x * job.rounds] = threadIdx.x;
    __syncthreads();
    job.y[threadIdx.x] = (float)shared_words[(threadIdx.x ^ 1u) * job.rounds];
}
"""
JOB = np.dtype([("x", np.uint64), ("y", np.uint64), ("rounds", np.uint32), ("limit", np.uint32)])
BLOCKS, LIMIT, ROUNDS = 8, 2, 5
IEEE = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true")

needs_nvdisasm = pytest.mark.skipif(
    find_nvdisasm() is None, reason="nvdisasm is not installed: pip install nvidia-cuda-nvdisasm"
)
KINDS = ["ptx", pytest.param("sass", marks=needs_nvdisasm)]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    return {capability: compile_text("small.cu", TEXT, capability, IEEE) for capability in CAPABILITIES}


def launch(
    compiled: Compiled, kind: str, name: str, x: torch.Tensor, y: torch.Tensor, rounds: int = 0, limit: int = 0,
    blocks: int = 1, shared_nbytes: int = 0,
) -> Launch:  # fmt: skip
    launcher = CountingLauncher(compiled, is_sass=kind == "sass")
    job = np.array([(x.data_ptr(), y.data_ptr(), rounds, limit)], JOB)
    launcher.launch(name, torch.device("cpu"), blocks, 64, shared_nbytes, job)
    return launcher.launches[0]


# --- an emulator ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_small_kernel_costs_what_one_counts_by_hand(
    capability: str, kind: str, compiled: dict[str, Compiled]
) -> None:
    x, y = torch.ones(64 * 2 * ROUNDS), torch.zeros(BLOCKS, 64)
    one = launch(compiled[capability], kind, "add", x, y, ROUNDS, LIMIT, BLOCKS)
    assert y[:, 0].tolist() == [ROUNDS] * LIMIT + [2 * ROUNDS] * (BLOCKS - LIMIT)
    rounds = ROUNDS * LIMIT + 2 * ROUNDS * (BLOCKS - LIMIT)
    total = count([one])
    assert (total.loaded_nbytes, total.stored_nbytes) == (rounds * 64 * 4, BLOCKS * 64 * 4)
    assert total.barriers == rounds + BLOCKS - LIMIT
    opcode = "LDG" if kind == "sass" else "ld.global.f32"
    executed = sum(n for name, n in zip(one.opcodes, one.work.executed, strict=True) if name.startswith(opcode))
    assert executed == 2 * rounds
    assert total.issued == sum(one.work.executed)
    assert (total.pipes["FP32"] > 2 * rounds) == (kind == "sass")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_quotients_are_ieees(capability: str, kind: str, compiled: dict[str, Compiled]) -> None:
    """Machine code divides by a score of instructions, and by a subroutine where numbers are extreme."""
    bits = torch.randint(-(1 << 31), 1 << 31, (128,), generator=torch.Generator().manual_seed(3))
    x, y = bits.to(torch.int32).view(torch.float32), torch.zeros(64)
    x[:8] = torch.tensor([0.0, 3.0, 1.0, 0.0, torch.inf, 2.0, 2.0**-140, 3.0])
    launch(compiled[capability], kind, "divide", x, y)
    expected = x[::2] / x[1::2]
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(0.0).view(torch.int32), expected.nan_to_num(0.0).view(torch.int32))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_lanes_part_and_meet_again(capability: str, kind: str, compiled: dict[str, Compiled]) -> None:
    x, y = torch.arange(32, dtype=torch.int32).flip(0).contiguous().view(torch.float32), torch.zeros(65)
    launch(compiled[capability], kind, "part", x, y, shared_nbytes=256)
    trips = [31 - lane for lane in range(32)]
    beside = [trips[lane ^ 1] for lane in range(32)]
    others = [beside[lane + 2] if lane < 30 else beside[lane] for lane in range(32)]
    assert y[:32].tolist() == [28.0 + other for other in others]
    assert y[32:64].tolist() == y[:32].tolist()
    assert int(y[64:].view(torch.int32)) == 2 * sum(others[1::2])


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_that_wait_for_one_another_for_ever_are_an_error(kind: str, compiled: dict[str, Compiled]) -> None:
    launch(compiled["80"], kind, "meet", torch.zeros(1), torch.zeros(64), limit=64)
    with pytest.raises(NotConvergedError, match=r"for ever|elsewhere"):
        launch(compiled["80"], kind, "meet", torch.zeros(1), torch.zeros(64), limit=16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stride", "wavefronts"), [(1, 1), (2, 2), (32, 32), (33, 1)])
def test_words_of_one_bank_take_turns(kind: str, stride: int, wavefronts: int, compiled: dict[str, Compiled]) -> None:
    y = torch.zeros(64 + 32)
    y = y[-y.data_ptr() // 4 % 32 :][:64]
    one = launch(compiled["90"], kind, "conflicts", y, y, stride, shared_nbytes=64 * 33 * 4)
    assert y.tolist() == [lane ^ 1 for lane in range(64)]
    # Each of two warps writes and reads shared memory, and then writes a line of memory.
    assert one.work.wavefronts == 2 * (2 * wavefronts + 1)


def test_shared_memory_ends_where_a_launch_says(compiled: dict[str, Compiled]) -> None:
    with pytest.raises(IndexError, match="shared memory ends"):
        launch(compiled["90"], "ptx", "conflicts", torch.zeros(1), torch.zeros(64), 32, shared_nbytes=64)


def test_fused_products_are_rounded_once() -> None:
    draw = np.random.default_rng(1)
    a, b = (draw.standard_normal(2000).astype(np.float32) for _ in range(2))
    c = (-a * b * (1 + draw.integers(-2, 3, 2000) * 2.0**-24)).astype(np.float32)
    for rounding in ("", "RZ", "RM", "RP"):
        for got, *numbers in zip(fused(a, b, c, rounding), a, b, c, strict=True):
            exact = Fraction(float(numbers[0])) * Fraction(float(numbers[1])) + Fraction(float(numbers[2]))
            below, above = (np.nextafter(got, np.float32(way)) for way in (-np.inf, np.inf))
            error, others = abs(Fraction(float(got)) - exact), [Fraction(float(one)) for one in (below, above)]
            if rounding == "":
                assert error <= min(abs(other - exact) for other in others)
            else:
                towards = {"RZ": -1 if exact > 0 else 1, "RM": -1, "RP": 1}[rounding]
                assert (Fraction(float(got)) - exact) * towards >= 0
                assert (others[towards < 0] - exact) * towards < 0


def test_floats_become_integers_without_wrapping() -> None:
    x = np.array([-1.5, 2.5, 3e9, 5e9, np.nan, -np.inf], np.float32)
    assert to_integer(x, np.uint32, truncates=False).tolist() == [0, 2, 3000000000, 2**32 - 1, 0, 0]
    assert to_integer(x, np.int32, truncates=True).tolist() == [-1, 2, 2**31 - 1, 2**31 - 1, 0, -(2**31)]
    assert to_integer(np.array([1e30], np.float32), np.uint64, truncates=True).tolist() == [2**64 - 1]
    assert round_f64(np.array([1 + 2.0**-30]), "RP").tolist() == [1 + 2.0**-23]


def test_sass_is_read_with_its_labels_and_guards() -> None:
    text = (
        ".text.other:\n        /*0000*/                   EXIT ;\n"
        '\t.section\t.text.k,"ax",@progbits\n.text.k:\n'
        "        /*0000*/                   S2R R0, SR_TID.X ;\n"
        "        /*0010*/               @!P0 BRA `(.L_x_1) ;\n"
        "        /*0020*/                   FADD R1, R2.reuse, |R3| ;\n"
        ".L_x_1:\n"
        '        /*0030*/                   BRX R4 -0x40    (*"BRANCH_TARGETS .L_x_1"*);\n'
    )
    code = parse_sass(text, "k")
    assert code.labels == {".text.k": 0, ".L_x_1": 3}
    assert code.instructions[1] == Instruction("!P0", "BRA", ("`(.L_x_1)",), 16)
    assert code.instructions[2].operands == ("R1", "R2", "|R3|")
    assert code.instructions[3].operands == ("R4 -0x40",)


def test_lanes_leave_of_which_all_predicates_are_true() -> None:
    warp = SassWarp(Block([], Work([]), 0, 1, LANES, 0), 0, [])
    warp.predicates[1] = warp.threads < 4
    CONTROL["EXIT"](Instruction("P0", "EXIT", ("P1",), 0))(warp, warp.threads < 6)
    assert warp.alive.tolist() == [False] * 4 + [True] * (LANES - 4)


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        *(("FADD", "FP32"), ("IMAD.WIDE", "FP32"), ("FMNMX", "ALU"), ("LDG.E.128", "LSU"), ("STS.128", "LSU")),
        *(("POPC", "XU"), ("BRA", "other"), ("UIADD3", "other"), ("ld.global.f32", "other")),
    ],
)
def test_instructions_have_pipes(opcode: str, pipe: str) -> None:
    assert find_pipe(opcode) == pipe


def test_nvcc_gives_the_same_code_as_nvrtc() -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed: it comes with NVIDIA's CUDA toolkit")
    made = [compile_by_nvcc(nvcc, "small.cu", TEXT, "90", IEEE), compile_text("small.cu", TEXT, "90", IEEE)]
    x, y = torch.ones(64 * 2 * ROUNDS), torch.zeros(BLOCKS, 64)
    by_nvcc, by_nvrtc = (launch(one, "ptx", "add", x, y, ROUNDS, LIMIT, BLOCKS) for one in made)
    assert by_nvcc.work == by_nvrtc.work
    assert made[0].resources["add"] == made[1].resources["add"]


# --- the library's kernels --------------------------------------------------------------------------------------------


def test_the_librarys_kernels_are_counted_case_by_case() -> None:
    """Six seconds: the kernels are compiled. They have the reference's bits, or an error is raised."""
    case = replace(CASES[0], shape=(64, 128))
    rows, said = count_cases([case], ["90"])
    assert [(row.capability, row.verb) for row in rows] == [("90", verb) for verb in case.verbs]
    for row in rows:
        assert row.instructions > 0
        assert row.resources.registers > 0
        assert len(format_row(row)) == len(COLUMNS)
    assert ("SASS" if find_nvdisasm() else "PTX") in said


def test_what_computes_something_else_is_not_counted() -> None:
    compiled = compile_kernels("90")
    wrong = compiled._replace(ptx=compiled.ptx.replace("sub.rn.f32", "add.rn.f32"))
    with pytest.raises(AssertionError, match="encode of white noise, 2 nodes, sign step differs from the reference"):
        run_case(replace(CASES[0], shape=(64, 64)), CountingLauncher(wrong, is_sass=False))


LAWS = [law for law in KERNEL_LAWS if law.__name__.startswith(("encode_fills", "outputs_step", "rollback_restores"))]


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@needs_nvdisasm
def test_machine_code_keeps_laws_of_kernels(law: Callable[[Kernels, str], None], capability: str) -> None:
    """Up to a minute each: the emulator is a thousand times slower than the host."""
    law(emulated_kernels(capability), "cpu")


@pytest.mark.parametrize("law", slow_but(KERNEL_LAWS[1:2], [*KERNEL_LAWS[1:2], *LAWS]), ids=lambda law: law.__name__)
def test_ptx_keeps_laws_of_kernels(law: Callable[[Kernels, str], None]) -> None:
    law(emulated_kernels("90", is_sass=False), "cpu")


def test_figures_are_those_of_the_costliest_architecture() -> None:
    def row(capability: str, verb: str, instructions: float, share: float | None, case: str = "usual") -> Row:
        needs = Resources(90 + len(verb), 0, 17408)
        return Row(capability, case, verb, 1, instructions, {}, 4.0, 10.0, 9.0, needs, 9, share, share, "FP32")

    rows = [
        row("80", "encode", 6000.0, 0.63),
        row("80", "verify", 900.0, 0.1),
        row("80", "decode", 4600.0, 0.54),
        row("100", "encode", 5900.0, None),
        row("100", "decode", 4800.0, None),
        row("80", "encode", 9000.0, 0.5, "zeros"),
    ]
    assert find_figures(rows, "usual") == {
        "instructions": 10700.0,
        "worst_encode_instructions": 9000.0,
        "barriers": 8.0,
        "bytes_per_element": 20.0,
        "registers": 96,
        "spilled_bytes": 0,
        "least_share": 0.54,
    }
    by_ptx = [one for one in rows if one.least_share is None]
    assert find_figures(by_ptx, "usual") == {"registers": 96, "spilled_bytes": 0}


def test_only_sass_has_pipes_and_an_estimate(compiled: dict[str, Compiled]) -> None:
    ran = Launch("add", 8, 64, 0, ["ld.global.f32"], Work([7]))
    measured = Measured({"encode": [ran]}, {"encode": 1000}, chunks=8, numel=512)
    row = count_verb(compiled["90"], "90", "small", "encode", measured, is_sass=False)
    assert (row.least_share, row.blocks_per_sm) == (None, None)
    assert format_row(row)[4:8] == ("-",) * 4
    assert "pip install nvidia-cuda-nvdisasm" in describe(is_sass=False)


def test_ptxas_says_what_a_kernel_needs() -> None:
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90'\n"
        "ptxas         .     0 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
        "ptxas info    : Used 96 registers, used 1 barriers, 17408 bytes smem\n"
    )
    assert read_log(log) == {"k": Resources(96, 40, 17408)}


@pytest.mark.parametrize(
    ("gpu", "registers", "blocks"), [(A100, 96, 9), (H100, 96, 10), (H100, 80, 12), (A100, 128, 8)]
)
def test_blocks_fit_by_registers_and_shared_memory(gpu: object, registers: int, blocks: int) -> None:
    assert gpu in (A100, H100)
    assert count_blocks(A100 if gpu is A100 else H100, Resources(registers, 0, 17408), warps=2) == blocks


def test_the_estimate_lies_between_no_overlap_and_all_of_it() -> None:
    """The prototype's numbers: 3,743 cycles of memory, and 1,675 of the FP32 pipe."""
    nbytes = 3743 * A100.bytes_per_s / A100.sms / A100.clock_hz
    share = estimate_bandwidth(A100, nbytes, nbytes, {"issued": 5964, "FP32": 3350, "ALU": 1671, "LSU": 820})
    assert share.pipe == "FP32"
    assert share.least == pytest.approx(3743 / (3743 / 0.88 + 1675))
    assert share.most == pytest.approx(0.88)


# --- the host's compiler ----------------------------------------------------------------------------------------------

LOCK_STEP = """
struct Job { unsigned* out; };
extern "C" __global__ void lanes(const Job job) {
    unsigned lane = threadIdx.x % 32u;
    job.out[threadIdx.x] = __ballot_sync(~0u, lane & 1u);
    job.out[32 + threadIdx.x] = __shfl_sync(~0u, lane, 31 - (int)lane) + 100u * __shfl_up_sync(~0u, lane, 1);
    job.out[64 + threadIdx.x] = add_lanes(lane);
    __syncwarp();
    if (lane >= 16u) return;
    __syncthreads();
}
"""


def test_warps_run_in_lock_step_on_the_host(tmp_path: Path) -> None:
    launcher = HostLauncher(compile_for_host(tmp_path, text=LOCK_STEP))
    out = torch.zeros(96, dtype=torch.int32)
    job = np.array([(out.data_ptr(),)], [("out", np.uint64)])
    launcher.launch("lanes", torch.device("cpu"), 1, 32, 0, job)
    assert out[:32].tolist() == [0xAAAAAAAA - (1 << 32)] * 32
    assert out[32:64].tolist() == [31 - lane + 100 * max(lane - 1, 0) for lane in range(32)]
    assert out[64:96].tolist() == [sum(range(32))] * 32
