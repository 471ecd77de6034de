"""``python -m bench gpu``: what the first machine with GPUs runs; ``gpu count``: kernels counted without one."""

from dataclasses import asdict
from typing import Annotated

import typer

from bench.common_options import CheckOption, JsonOption, QuickOption, Report, conclude
from bench.errors import UsageError

_FIGURES = frozenset(
    f"{verb}_{figure}" for verb in ("encode", "decode") for figure in ("instructions", "barriers", "spilled_bytes")
)


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


def _count(json_file: JsonOption, *, quick: bool, check: bool) -> int:
    from bench.gpu.cases import CASES
    from bench.gpu.count_table import CAPABILITIES, count_cases, print_rows

    cases, capabilities = (CASES[:1], CAPABILITIES[:1]) if quick else (CASES, CAPABILITIES)
    rows, said = count_cases(cases, capabilities)
    print_rows(rows, said)
    figures = {}
    for row in reversed(rows):
        if row.case == CASES[0].name and f"{row.verb}_instructions" in _FIGURES:
            figures[f"{row.verb}_instructions"] = row.instructions
            figures[f"{row.verb}_barriers"] = row.barriers
            figures[f"{row.verb}_spilled_bytes"] = row.resources.spill_nbytes
    report = Report("gpu", _FIGURES, figures, [asdict(row) for row in rows])
    return conclude(report, json_file=json_file, check=check)
