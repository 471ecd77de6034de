"""Counting kernels: regions of a text, blocks of machine code, how often they execute, and what a small kernel costs.

The small kernel is run on the host and compiled by NVRTC, as PTX always, as SASS where nvdisasm is installed.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from bench.errors import UsageError
from bench.gpu.accesses import Access, find_access, find_pipe, find_same_addresses
from bench.gpu.cases import CASES, VERBS, Measured
from bench.gpu.command import find_figures
from bench.gpu.compile import compile_by_nvcc, compile_text, read_log
from bench.gpu.count import Launch, count_kernel
from bench.gpu.count_table import COLUMNS, KernelText, Row, count_cases, count_verb, describe, format_row
from bench.gpu.cuda_on_host import CountingLauncher, compile_for_host, take_passes
from bench.gpu.devices import A100, H100, Resources, count_blocks, estimate_bandwidth
from bench.gpu.flow import find_executions
from bench.gpu.machine_code import (
    BasicBlock,
    Instruction,
    disassemble,
    find_loops,
    find_nvdisasm,
    find_reached,
    parse_ptx,
    parse_sass,
)
from bench.gpu.regions import Region, find_regions

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """\
#ifndef COUNT
#define COUNT(name)
#define ROLLED _Pragma("unroll 1")
#endif
struct Job { const float* x; float* y; unsigned rounds; unsigned limit; };

__device__ float twice(const float* x, unsigned rounds) {
    COUNT(call);
    float sum = 0.0f;
    ROLLED for (unsigned i = 0; i < rounds; i++) {
        COUNT(round);
        sum += x[i * 64u];
        __syncthreads();
    }
    return sum;
}

extern "C" __global__ void add(const Job job) {
    float sum = 0.0f;
    unsigned at = blockIdx.x * 64u + threadIdx.x;
    if (blockIdx.x < job.limit) {
        COUNT(few);
        sum = twice(job.x + threadIdx.x, job.rounds);
    } else {
        COUNT(others);
        sum = twice(job.x + threadIdx.x, 2u * job.rounds);
        __syncthreads();
    }
    job.y[at] = sum;
}
"""
JOB = np.dtype([("x", np.uint64), ("y", np.uint64), ("rounds", np.uint32), ("limit", np.uint32)])


BLOCKS, LIMIT, ROUNDS = 8, 2, 5


def launch_on_host(folder: Path) -> Launch:
    launcher = CountingLauncher(compile_for_host(folder, text=TEXT))
    x, y = torch.ones(64 * 2 * ROUNDS), torch.zeros(BLOCKS, 64)
    job = np.array([(x.data_ptr(), y.data_ptr(), ROUNDS, LIMIT)], JOB)
    launcher.launch("add", torch.device("cpu"), BLOCKS, 64, 0, job)
    assert y[:, 0].tolist() == [ROUNDS] * LIMIT + [2 * ROUNDS] * (BLOCKS - LIMIT)
    return launcher.counted[0]


def test_the_host_counts_how_many_warps_pass(tmp_path: Path) -> None:
    few, others = 2 * LIMIT, 2 * (BLOCKS - LIMIT)
    assert launch_on_host(tmp_path).passes == {
        "call": few + others,
        "round": ROUNDS * few + 2 * ROUNDS * others,
        "few": few,
        "others": others,
    }


@pytest.mark.parametrize("capability", ["80", "90", "100"])
@pytest.mark.parametrize("kind", ["ptx", "sass"])
def test_a_small_kernel_costs_what_one_counts_by_hand(capability: str, kind: str, tmp_path: Path) -> None:
    """Rounds of a loop that two callers share are shared out by how often these are passed; their sum is exact."""
    compiled = compile_text("small.cu", TEXT, capability, ("--std=c++17",))
    nvdisasm = find_nvdisasm()
    if kind == "sass" and nvdisasm is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    launch = launch_on_host(tmp_path)
    blocks = parse_ptx(compiled.ptx, "add") if nvdisasm is None or kind == "ptx" else None
    if blocks is None:
        assert nvdisasm is not None
        blocks = parse_sass(disassemble(nvdisasm, compiled.cubin), "add")
    count = count_kernel(blocks, find_regions("small.cu", TEXT), launch)
    rounds = 2 * (ROUNDS * LIMIT + 2 * ROUNDS * (BLOCKS - LIMIT))
    assert count.loaded_nbytes == rounds * 32 * 4
    assert count.stored_nbytes == 2 * BLOCKS * 32 * 4
    assert count.barriers == (rounds + 2 * (BLOCKS - LIMIT)) / 2
    assert count.notes == []
    assert compiled.resources["add"].spill_nbytes == 0


def test_regions_are_the_blocks_around_their_marks() -> None:
    regions = {one.name: one for one in find_regions("small.cu", TEXT)}
    assert regions["call"] == Region("call", "small.cu", 8, 16, loop=False)
    assert regions["round"] == Region("round", "small.cu", 10, 14, loop=True)
    assert regions["few"][2:] == (22, 24, False)


def test_a_loops_condition_is_part_of_it_and_that_of_a_branch_is_not() -> None:
    text = "void f() {\n  while (a\n      && b) {\n    COUNT(one); // }\n  }\n"
    text += '  if (c) {\n    COUNT(two); s = "}";\n  }\n}\n'
    assert [(one.first, one.last, one.loop) for one in find_regions("f.cu", text)] == [(2, 5, True), (7, 8, False)]


@pytest.mark.parametrize(("text", "said"), [("COUNT(a)", "outside"), ("{ COUNT(a); COUNT(b); }", "mark the same")])
def test_marks_that_say_nothing_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_regions("f.cu", text)


SASS = """\
.text.other:
        /*0000*/                   EXIT ;
	.section	.text.k,"ax",@progbits
.text.k:
	//## File "/tmp/k.h", line 3 inlined at "/tmp/k.cu", line 9
	//## File "/tmp/k.cu", line 9
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/               @P0 BRA `(.L_x_1) ;
	//## File "/tmp/k.cu", line 10
        /*0020*/                   BRA.DIV UR4, `(.L_x_2) ;
        /*0030*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_u64) ;
.L_x_1:
        /*0040*/                   BRA.CONV ~URZ, `(.L_x_3) ;
        /*0050*/                   NOP ;
.L_x_3:
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/                   BRA `(.L_x_1) ;
        .weak           $__internal_0_$__cuda_sm20_div_u64
$__internal_0_$__cuda_sm20_div_u64:
        /*0080*/                   IMAD R1, R1, R1, RZ ;
        /*0090*/                   RET.REL.NODEC R2 `(k) ;
.L_x_9:
        /*00a0*/                   BRA `(.L_x_9);
"""


def test_sass_falls_into_blocks_with_lines_and_successors() -> None:
    blocks = parse_sass(SASS, "k")
    assert [len(one.instructions) for one in blocks] == [2, 1, 1, 1, 1, 1, 1, 2, 1]
    first, after = blocks[0].instructions[0], blocks[1].instructions[0]
    assert (first.opcode, first.frames) == ("S2R", (("k.h", 3), ("k.cu", 9)))
    assert after.frames == (("k.cu", 10),)
    assert [one.successors for one in blocks[:4]] == [{1, 3}, {2}, {3}, {5}]
    assert blocks[2].calls == "$__internal_0_$__cuda_sm20_div_u64"


def test_what_diverged_warps_do_is_not_counted_and_subroutines_are() -> None:
    blocks = parse_sass(SASS, "k")
    assert find_reached(blocks) == {0, 1, 2, 3, 5}
    regions = [Region("all", "k.cu", 9, 9, loop=False), Region("rare", "k.cu", 10, 10, loop=False)]
    # Line 10 is also that of the blocks behind, which every warp passes.
    count = count_kernel(blocks, regions, Launch("k", 1, 1, {"all": 1, "rare": 1}))
    assert count.issued == 2 + 1 + 1 + 1 + 1 + 2


def test_loops_are_found_with_those_inside_them() -> None:
    edges = {0: {1}, 1: {2}, 2: {2, 3}, 3: {1, 4}, 4: set[int]()}
    blocks = [BasicBlock(successors=edges[number]) for number in range(5)]
    assert list(find_loops(blocks, range(5))) == [(1, {1, 2, 3}), (2, {2})]


def test_executions_keep_the_flow_where_lines_do_not() -> None:
    """Both sides of a branch are said to execute never: the shorter one is what was merged under a wrong line."""
    votes = {0: {24.0: 10}, 1: {0.0: 300}, 2: {0.0: 190}, 3: {24.0: 50}}
    times = find_executions({0: {1, 2}, 1: {3}, 2: {3}, 3: set()}, {3}, votes, 24.0)
    assert times == {0: 24.0, 1: 0.0, 2: 24.0, 3: 24.0}


def test_code_moved_out_of_a_loop_executes_once() -> None:
    votes = {0: {1.0: 5, 9.0: 7}, 1: {9.0: 20}, 2: {1.0: 3}}
    assert find_executions({0: {1}, 1: {1, 2}, 2: set()}, {2}, votes, 1.0) == {0: 1.0, 1: 9.0, 2: 1.0}


def test_a_block_of_many_lines_executes_as_most_of_them() -> None:
    votes = {0: {1.0: 5, 0.0: 4}, 1: {0.5: 3, 1.0: 2}, 2: {1.0: 1}}
    assert find_executions({0: {1, 2}, 1: {2}, 2: set()}, {2}, votes, 1.0) == {0: 1.0, 1: 0.5, 2: 1.0}


def instruction(text: str) -> Instruction:
    words = text.split()
    return Instruction(words[1] if words[0].startswith("@") else words[0], text, ())


@pytest.mark.parametrize(
    ("text", "pipe", "access"),
    [
        ("FADD R0, R1, R2", "FP32", Access()),
        ("IMAD.WIDE R0, R1, R2, R4", "FP32", Access()),
        ("FMNMX R0, R1, R2, PT", "ALU", Access()),
        ("LDG.E.128 R0, [R4.64]", "LSU", Access(512, 0, 4)),
        ("LDG.E.U16 R0, [R4.64]", "LSU", Access(64, 0, 1)),
        ("STG.E.64 [R4.64], R2", "LSU", Access(0, 256, 2)),
        ("RED.E.ADD.STRONG.GPU [R4.64], R2", "LSU", Access(0, 128, 1)),
        ("STS.128 [R4], R8", "LSU", Access(0, 0, 4)),
        ("POPC R0, R1", "XU", Access()),
        ("BRA `(.L_x_1)", "other", Access()),
    ],
)
def test_instructions_have_pipes_and_bytes(text: str, pipe: str, access: Access) -> None:
    one = instruction(text)
    assert find_pipe(one) == pipe
    assert find_access(one, same_address=False) == access


def test_an_address_that_all_lanes_share_is_one_sector() -> None:
    lines = (
        "S2R R0, SR_TID.X",
        "MOV R8, c[0x0][0x160]",
        "MOV R9, c[0x0][0x164]",
        "LDG.E.64 R2, [R8.64+0x8]",
        "IMAD.WIDE R4, R0, 0x4, R2",
        "LDG.E R6, [R4.64]",
        "ISETP.GE.AND P1, PT, R2, 0x20, PT",
        "LDG.E R7, [R2.64]",
        "MOV R4, R2",
        "MOV R5, R3",
        "@P1 STG.E [R4.64], R6",
    )
    code = [instruction(line) for line in lines]
    same = find_same_addresses([BasicBlock(instructions=code)])
    assert [one.text for one in code if id(one) in same] == [lines[3], lines[7], lines[10]]
    assert find_access(code[3], same_address=True).loaded_nbytes == 32


def test_nvcc_gives_the_same_code_as_nvrtc() -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed: it comes with NVIDIA's CUDA toolkit")
    by_nvcc = compile_by_nvcc(nvcc, "small.cu", TEXT, "90", ("--std=c++17", "--ftz=false", "--prec-div=true"))
    by_nvrtc = compile_text("small.cu", TEXT, "90", ("--std=c++17", "--ftz=false", "--prec-div=true"))
    assert by_nvcc.resources["add"].shared_nbytes == by_nvrtc.resources["add"].shared_nbytes == 0
    loops = [
        sum(one.opcode == "ld.global.f32" for block in parse_ptx(made.ptx, "add") for one in block.instructions)
        for made in (by_nvcc, by_nvrtc)
    ]
    assert loops == [2, 2]


def test_the_librarys_kernels_are_counted_case_by_case() -> None:
    """Five seconds: the kernels are compiled for the host and for a device."""
    rows, said = count_cases(CASES[:1], ["90"])
    assert [(row.capability, row.verb) for row in rows] == [("90", verb) for verb in VERBS]
    for row in rows:
        assert row.instructions > 0
        assert row.resources.registers > 0
        assert len(format_row(row)) == len(COLUMNS)
    assert ("SASS" if find_nvdisasm() else "PTX") in said


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


def test_only_sass_has_pipes_and_an_estimate(tmp_path: Path) -> None:
    measured = Measured({"encode": [launch_on_host(tmp_path)]}, {"encode": 1000}, chunks=8, numel=512)
    text = KernelText("small.cu", TEXT, ("--std=c++17",))
    text.nvdisasm = None
    row, _ = count_verb(text, "90", "small", "encode", measured)
    assert (row.least_share, row.blocks_per_sm) == (None, None)
    assert format_row(row)[4:8] == ("-",) * 4
    assert "pip install nvidia-cuda-nvdisasm" in describe(text, [])


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


LOCK_STEP = """
struct Job { unsigned* out; };
extern "C" __global__ void lanes(const Job job) {
    unsigned lane = threadIdx.x % 32u;
    job.out[threadIdx.x] = __ballot_sync(~0u, lane & 1u);
    job.out[32 + threadIdx.x] = __shfl_sync(~0u, lane, 31 - (int)lane) + 100u * __shfl_up_sync(~0u, lane, 1);
    job.out[64 + threadIdx.x] = add_lanes(lane);
    for (unsigned i = 0; i < lane; i++) {
        COUNT(longest);
    }
    for (unsigned i = lane; i < 32u; i++) {
        COUNT(longest_of_a_meeting);
    }
    __syncwarp();
    for (unsigned i = 0; i < lane; i++) {
        COUNT(longest_of_a_meeting);
    }
    __syncwarp();
    if (lane == 3u) {
        COUNT(one_lane);
    }
    if (lane >= 16u) return;
    __syncthreads();
}
"""


def test_warps_run_in_lock_step_and_are_counted_once(tmp_path: Path) -> None:
    launcher = CountingLauncher(compile_for_host(tmp_path, text=LOCK_STEP))
    out = torch.zeros(96, dtype=torch.int32)
    job = np.array([(out.data_ptr(),)], [("out", np.uint64)])
    launcher.launch("lanes", torch.device("cpu"), 1, 32, 0, job)
    assert out[:32].tolist() == [0xAAAAAAAA - (1 << 32)] * 32
    assert out[32:64].tolist() == [31 - lane + 100 * max(lane - 1, 0) for lane in range(32)]
    assert out[64:96].tolist() == [sum(range(32))] * 32
    assert launcher.counted[0].passes == {"longest": 31, "longest_of_a_meeting": 32 + 31, "one_lane": 1}
    assert set(take_passes(launcher.library).values()) == {0}
