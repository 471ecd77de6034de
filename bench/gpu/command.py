"""``python -m bench gpu``: what the first machine with GPUs runs; ``gpu count``: kernels counted without one."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.errors import UsageError
from bench.gpu.machine import find_machine
from bench.gpu.report import exit_code, write_report
from bench.gpu.results import run_section
from bench.gpu.sections import plan_sections

if TYPE_CHECKING:
    from bench.gpu.count_table import Row

_COUNTED = frozenset(
    {"instructions", "worst_encode_instructions", "barriers", "bytes_per_element", "registers", "spilled_bytes"}
    | {"least_share"}
)
_MEASURED = frozenset({"encode_share", "decode_share", "host_reads", "overlap"})


def gpu(
    what: Annotated[str, typer.Argument(help="report, or count.")] = "report",
    json_file: JsonOption = None,
    quick: QuickOption = False,
    check: CheckOption = False,
) -> None:
    """Run everything that a machine with GPUs can show and print a report, or count instructions without a GPU."""
    if what == "count":
        raise typer.Exit(_count(json_file, quick=quick, check=check))
    if what != "report":
        raise UsageError(f"got {what!r}, needed report or count: `python -m bench gpu count`.")
    raise typer.Exit(_report(json_file, quick=quick, check=check))


def _report(json_file: Path | None, *, quick: bool, check: bool) -> int:
    machine = find_machine()
    # Without a device no section could show anything.
    sections = plan_sections(machine, quick=quick) if machine.devices else []
    outcomes = []
    for section in sections:
        outcomes.append(run_section(section))
        print(f"{section.name}: {outcomes[-1].state}", file=sys.stderr, flush=True)
    print(write_report(machine, outcomes))
    code = exit_code(machine, outcomes)
    measured = {one.name: one.value for outcome in outcomes for one in outcome.results if one.value is not None}
    figures = {name: value for name, value in measured.items() if name in _MEASURED}
    reason = "its section did not run to its end" if outcomes else "it takes a CUDA device"
    unmeasured = dict.fromkeys(sorted(_MEASURED - figures.keys()), reason)
    settings = {"devices": [asdict(one) for one in machine.devices], "missing": machine.missing}
    unmeasured |= dict.fromkeys(sorted(_COUNTED), "`python -m bench gpu count` counts it")
    report = Report("gpu", _COUNTED | _MEASURED, figures, [asdict(one) for one in outcomes], settings, unmeasured)
    concluded = conclude(report, json_file=json_file, check=check)
    return code or concluded


def _count(json_file: JsonOption, *, quick: bool, check: bool) -> int:
    from bench.gpu.cases import CASES, FLAT_CASES
    from bench.gpu.count_table import CAPABILITIES, count_cases, print_rows

    cases, capabilities = (CASES[:1], CAPABILITIES[:1]) if quick else ((*CASES, *FLAT_CASES), CAPABILITIES)
    rows, said = count_cases(cases, capabilities)
    print_rows(rows, said)
    unmeasured = dict.fromkeys(sorted(_MEASURED), "it takes a CUDA device: `python -m bench gpu`")
    squares = {case.name for case in CASES}
    figures = find_figures([row for row in rows if row.case in squares], CASES[0].name)
    unmeasured |= dict.fromkeys(sorted(_COUNTED - figures.keys()), "nvdisasm is not installed, so PTX was counted")
    report = Report("gpu", _COUNTED | _MEASURED, figures, [asdict(row) for row in rows], unmeasured=unmeasured)
    return conclude(report, json_file=json_file, check=check)


def find_figures(rows: "Sequence[Row]", usual: str) -> dict[str, float]:
    """Return what encode and decode of the usual case come to together, on the architecture where it is most."""
    by_capability: dict[str, list[Row]] = {}
    for row in rows:
        if row.case == usual and row.verb != "verify":
            by_capability.setdefault(row.capability, []).append(row)
    both = list(by_capability.values())
    figures: dict[str, float] = {
        "registers": max(row.resources.registers for pair in both for row in pair),
        "spilled_bytes": max(row.resources.spill_nbytes for row in rows),
    }
    shares = [row.least_share for pair in both for row in pair if row.least_share is not None]
    if not shares:
        return figures
    return figures | {
        "instructions": max(sum(row.instructions for row in pair) for pair in both),
        "worst_encode_instructions": max(row.instructions for row in rows if row.verb == "encode"),
        "barriers": max(sum(row.barriers for row in pair) for pair in both),
        "bytes_per_element": max(sum(row.bytes_per_element for row in pair) for pair in both),
        "least_share": min(shares),
    }
