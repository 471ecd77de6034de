"""The report: a page of Markdown that can be pasted into an issue."""

from __future__ import annotations

from collections.abc import Sequence

from bench.gpu.machine import Machine
from bench.gpu.results import Outcome

OK_CODE, FAILED_CODE, MISSING_CODE = 0, 1, 2


def exit_code(machine: Machine, outcomes: Sequence[Outcome]) -> int:
    """Return 1 if a section failed, else 2 if the machine lacks something, else 0."""
    if any(one.state == "failed" for one in outcomes):
        return FAILED_CODE
    return MISSING_CODE if machine.missing else OK_CODE


def write_report(machine: Machine, outcomes: Sequence[Outcome]) -> str:
    """Return the report."""
    failed = [one for one in outcomes if one.state == "failed"]
    lines = [f"# flexcomm on GPUs: {_verdict(machine, outcomes)}", ""]
    lines += [f"- {count} x {name}" for name, count in _count_devices(machine).items()]
    if machine.versions:
        lines.append("- " + ", ".join(f"{name} {number}" for name, number in machine.versions.items()))
    lines += [f"- {line}" for line in machine.missing]
    if outcomes:
        lines += ["", "| section | outcome | seconds | |", "|---|---|---:|---|"]
        lines += [f"| {one.section} | {one.state} | {one.seconds:.0f} | {_cell(one.said)} |" for one in outcomes]
    lines += _compare_speed(outcomes)
    for one in failed:
        lines += ["", f"## {one.section}", "", "```", one.output.replace("```", "'''"), "```"]
    return "\n".join(lines)


def _verdict(machine: Machine, outcomes: Sequence[Outcome]) -> str:
    counts = {state: sum(one.state == state for one in outcomes) for state in ("failed", "skipped", "ok")}
    if not outcomes:
        return f"nothing was run, {len(machine.missing)} things are missing"
    said = [f"{counts['failed']} of {len(outcomes)} sections failed"] if counts["failed"] else ["every law holds"]
    if counts["skipped"]:
        said.append(f"{counts['skipped']} were skipped")
    if machine.missing:
        said.append(f"{len(machine.missing)} things are missing")
    return ", ".join(said)


def _count_devices(machine: Machine) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in machine.devices:
        name = f"{one.name}, sm_{one.capability}, {one.nbytes / 2**30:.0f} GiB"
        counts[name] = counts.get(name, 0) + 1
    return counts


def _compare_speed(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the measured shares of the memory's bandwidth beside those that were estimated."""
    said = {one.name: one.said for outcome in outcomes for one in outcome.results}
    rows = [
        f"| {said[f'{verb}_share']} | {said.get(f'{verb}_estimate', 'not estimated')} |"
        for verb in ("encode", "verify", "decode")
        if f"{verb}_share" in said
    ]
    return ["", "| measured | estimated by counting |", "|---|---|", *rows] if rows else []


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:400]
