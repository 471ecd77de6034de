"""``python -m bench gpu count``: what each case costs a chunk of 64 x 64, for each architecture."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.cases import CASES, Case, Measured, run_case
from bench.gpu.compile import Compiled, compile_text
from bench.gpu.count import Count, count_kernel
from bench.gpu.cuda_on_host import CountingLauncher, compile_for_host
from bench.gpu.devices import DRAM_EFFICIENCY, GPUS, PIPES, SOURCES, Resources, count_blocks, estimate_bandwidth
from bench.gpu.machine_code import BasicBlock, disassemble, find_nvdisasm, parse_ptx, parse_sass
from bench.gpu.regions import Region, find_all_regions
from bench.tables import print_table
from flexcomm.kernels.gpu import OPTIONS, kernel_text

CAPABILITIES = ("80", "90", "100")
_SASS = ("SASS instructions; LSU: wavefronts of 128 bytes, without bank conflicts.",)
_PTX = (
    "PTX instructions, not SASS: no pipes and no estimates, and every access as if no two lanes had one address.",
    "For SASS: pip install nvidia-cuda-nvdisasm",
)
_METHOD = (
    "Times how often warps pass each COUNT(name), measured by running the kernels on the host.",
    "Per chunk of the case, all launches of a verb together.",
    "bytes/element: all accesses to device memory, as if every lane took part and no cache kept anything;",
    "needed: gradient, state and parameter once each way, and payloads.",
    f"of HBM: the needed bytes over the longest and the shortest time: the memory's / {DRAM_EFFICIENCY} (assumed) and",
    "then the busiest pipe's, or both at once. Not in it: latency, too few blocks, the instruction cache.",
    *SOURCES.splitlines(),
)
COLUMNS = (
    *("case", "verb", "launches", "warp instr./chunk", "FP32", "ALU", "LSU", "XU", "barriers", "bytes/element"),
    *("needed", "registers", "spilled bytes", "shared bytes", "blocks/SM", "of HBM, est.", "limit"),
)


@dataclass(frozen=True)
class Row:
    """One verb of one case on one architecture, per chunk; of several kernels, the resources are of the busiest."""

    capability: str
    case: str
    verb: str
    launches: int
    instructions: float
    pipes: Mapping[str, float]
    barriers: float
    bytes_per_element: float
    needed_bytes_per_element: float
    resources: Resources
    blocks_per_sm: int | None
    least_share: float | None
    most_share: float | None
    limit: str


class KernelText:
    """The library's kernels: their text, its regions, and what each architecture makes of it."""

    def __init__(self, name: str, text: str, options: Sequence[str]) -> None:
        self.name, self.text, self._options = name, text, options
        self.regions: list[Region] = find_all_regions(name, text)
        self.nvdisasm = find_nvdisasm()
        self._compiled: dict[str, tuple[Compiled, str]] = {}
        self._blocks: dict[tuple[str, str], list[BasicBlock]] = {}

    def resources(self, kernel: str, capability: str) -> Resources:
        """Return what ptxas says of a kernel."""
        return self._compile(capability)[0].resources[kernel]

    def blocks(self, kernel: str, capability: str) -> list[BasicBlock]:
        """Return a kernel's basic blocks, of SASS where it can be disassembled."""
        if (kernel, capability) not in self._blocks:
            compiled, sass = self._compile(capability)
            parsed = parse_sass(sass, kernel) if sass else parse_ptx(compiled.ptx, kernel)
            self._blocks[kernel, capability] = parsed
        return self._blocks[kernel, capability]

    def _compile(self, capability: str) -> tuple[Compiled, str]:
        if capability not in self._compiled:
            compiled = compile_text(self.name, self.text, capability, self._options)
            sass = disassemble(self.nvdisasm, compiled.cubin) if self.nvdisasm else ""
            self._compiled[capability] = compiled, sass
        return self._compiled[capability]


def count_cases(cases: Sequence[Case] = CASES, capabilities: Sequence[str] = CAPABILITIES) -> tuple[list[Row], str]:
    """Return the rows, and what has to be said of them."""
    text = KernelText("flexcomm.cu", kernel_text(), OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        launcher = CountingLauncher(compile_for_host(Path(folder)))
        measured = {case: run_case(case, launcher) for case in cases}
    rows, notes = list[Row](), dict[str, None]()
    for capability in capabilities:
        for case, one in measured.items():
            for verb in case.verbs:
                row, said = count_verb(text, capability, case.name, verb, one)
                rows.append(row)
                notes |= dict.fromkeys(f"sm_{capability}, {note}" for note in said)
    return rows, describe(text, list(notes))


def count_verb(text: KernelText, capability: str, case: str, verb: str, measured: Measured) -> tuple[Row, list[str]]:
    """Count all launches of a verb."""
    launches = measured.launches[verb]
    counts = [count_kernel(text.blocks(one.kernel, capability), text.regions, one) for one in launches]
    total = _add(counts)
    busiest = launches[max(range(len(counts)), key=lambda i: counts[i].issued)]
    needed = text.resources(busiest.kernel, capability)
    needed = needed._replace(shared_nbytes=needed.shared_nbytes + busiest.shared_nbytes)
    pipes = {pipe: number / measured.chunks for pipe, number in total.pipes.items()}
    nbytes = (total.loaded_nbytes + total.stored_nbytes) / measured.chunks
    gpu = next((one for one in GPUS if one.capability == capability and text.nvdisasm), None)
    share = estimate_bandwidth(gpu, measured.needed_nbytes[verb] / measured.chunks, nbytes, pipes) if gpu else None
    row = Row(
        capability,
        case,
        verb,
        len(launches),
        total.issued / measured.chunks,
        pipes,
        total.barriers / measured.chunks,
        nbytes * measured.chunks / measured.numel,
        measured.needed_nbytes[verb] / measured.numel,
        needed,
        count_blocks(gpu, needed, busiest.warps_per_block) if gpu else None,
        share.least if share else None,
        share.most if share else None,
        share.pipe if share else "",
    )
    return row, [f"{one.kernel}: {note}" for one, count in zip(launches, counts, strict=True) for note in count.notes]


def _add(counts: Sequence[Count]) -> Count:
    total = Count()
    for one in counts:
        total.issued += one.issued
        for pipe, number in one.pipes.items():
            total.pipes[pipe] += number
        total.barriers += one.barriers
        total.loaded_nbytes += one.loaded_nbytes
        total.stored_nbytes += one.stored_nbytes
    return total


def describe(text: KernelText, notes: Sequence[str]) -> str:
    """Return how the numbers were found, and what they assume."""
    lines = [*(_SASS if text.nvdisasm else _PTX), *_METHOD]
    if not text.regions:
        lines.append(f"{text.name} marks no regions: loops count as one round, and branches as taken.")
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def print_rows(rows: Sequence[Row], said: str) -> None:
    """Print a table for each architecture, and what has to be said of them."""
    for capability in dict.fromkeys(row.capability for row in rows):
        gpu = next((f", {one.name}" for one in GPUS if one.capability == capability), "")
        cells = [format_row(row) for row in rows if row.capability == capability]
        print_table(f"sm_{capability}{gpu}", COLUMNS, cells, sys.stdout)
    print(said)


def format_row(row: Row) -> tuple[str, ...]:
    """Return the cells of a line."""
    share = "-" if row.least_share is None else f"{row.least_share:.0%} to {row.most_share:.0%}"
    return (
        row.case,
        row.verb,
        str(row.launches),
        f"{row.instructions:,.0f}",
        *(f"{row.pipes[pipe]:,.0f}" if pipe in row.pipes else "-" for pipe in PIPES),
        f"{row.barriers:.1f}",
        f"{row.bytes_per_element:.1f}",
        f"{row.needed_bytes_per_element:.1f}",
        str(row.resources.registers),
        str(row.resources.spill_nbytes),
        str(row.resources.shared_nbytes),
        "-" if row.blocks_per_sm is None else str(row.blocks_per_sm),
        share,
        row.limit,
    )
