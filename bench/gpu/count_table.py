"""``python -m bench gpu count``: what each case costs a chunk of 64 x 64, for each architecture."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.gpu.cases import CASES, Case, Measured, run_case
from bench.gpu.compile import Compiled
from bench.gpu.count import CountingLauncher, compile_kernels, count
from bench.gpu.devices import DRAM_EFFICIENCY, GPUS, PIPES, SOURCES, Resources, count_blocks, estimate_bandwidth
from bench.tables import print_table

CAPABILITIES = ("80", "90", "100")
_SASS = "SASS instructions."
_PTX = "PTX instructions, not SASS: no pipes and no estimates. For SASS: pip install nvidia-cuda-nvdisasm"
_METHOD = (
    "The compiled kernels run on the host, instruction by instruction, with the case's data: nothing is left out.",
    "Per 4,096 elements of whole chunks, all launches of a verb together. LSU: wavefronts, with conflicts of banks.",
    "bytes/element: sectors of device memory that blocks read and write, of a block each once, tables too;",
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


def count_cases(cases: Sequence[Case] = CASES, capabilities: Sequence[str] = CAPABILITIES) -> tuple[list[Row], str]:
    """Return the rows, and what has to be said of them."""
    rows, is_sass = list[Row](), False
    for capability in capabilities:
        compiled = compile_kernels(capability)
        launcher = CountingLauncher(compiled)
        is_sass = launcher.is_sass
        for case in cases:
            measured = run_case(case, launcher)
            rows += [
                count_verb(compiled, capability, case.name, verb, measured, is_sass=is_sass) for verb in case.verbs
            ]
    return rows, describe(is_sass=is_sass)


def count_verb(compiled: Compiled, capability: str, case: str, verb: str, measured: Measured, *, is_sass: bool) -> Row:
    """Count all launches of a verb."""
    launches = measured.launches[verb]
    total = count(launches)
    busiest = max(launches, key=lambda one: sum(one.work.executed))
    needed = compiled.resources[busiest.kernel]
    needed = needed._replace(shared_nbytes=needed.shared_nbytes + busiest.shared_nbytes)
    pipes = {pipe: number / measured.chunks for pipe, number in total.pipes.items()} if is_sass else {}
    instructions = total.issued / measured.chunks
    nbytes = (total.loaded_nbytes + total.stored_nbytes) / measured.chunks
    gpu = next((one for one in GPUS if one.capability == capability and is_sass), None)
    share = (
        estimate_bandwidth(
            gpu, measured.needed_nbytes[verb] / measured.chunks, nbytes, pipes | {"issued": instructions}
        )
        if gpu
        else None
    )
    return Row(
        capability,
        case,
        verb,
        len(launches),
        instructions,
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


def describe(*, is_sass: bool) -> str:
    """Return how the numbers were found, and what they assume."""
    return "\n".join((_SASS if is_sass else _PTX, *_METHOD))


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
