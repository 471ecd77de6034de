"""``python -m bench gpu``: what the first machine with GPUs runs; ``gpu count``: kernels counted without one."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.errors import UsageError
from bench.gpu.machine import find_machine
from bench.gpu.report import exit_code, write_report
from bench.gpu.results import run_section
from bench.gpu.sections import plan_sections

_COUNTED = frozenset(
    f"{verb}_{figure}" for verb in ("encode", "decode") for figure in ("instructions", "barriers", "spilled_bytes")
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
    report = Report("gpu", _MEASURED, figures, [asdict(one) for one in outcomes], settings, unmeasured)
    concluded = conclude(report, json_file=json_file, check=check)
    return code or concluded


def _count(json_file: JsonOption, *, quick: bool, check: bool) -> int:
    from bench.gpu.cases import CASES
    from bench.gpu.count_table import CAPABILITIES, count_cases, print_rows

    cases, capabilities = (CASES[:1], CAPABILITIES[:1]) if quick else (CASES, CAPABILITIES)
    rows, said = count_cases(cases, capabilities)
    print_rows(rows, said)
    figures = {}
    for row in reversed(rows):
        if row.case == CASES[0].name and f"{row.verb}_instructions" in _COUNTED:
            figures[f"{row.verb}_instructions"] = row.instructions
            figures[f"{row.verb}_barriers"] = row.barriers
            figures[f"{row.verb}_spilled_bytes"] = row.resources.spill_nbytes
    report = Report("gpu-count", _COUNTED, figures, [asdict(row) for row in rows])
    return conclude(report, json_file=json_file, check=check)
