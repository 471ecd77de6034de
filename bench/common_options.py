"""Options, results and command-line parsing that the subcommands share: ``--json``, ``--quick`` and ``--check``.

A subcommand takes the three options, returns a ``Report``, and hands it to ``conclude``.
"""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from bench.errors import UsageError
from bench.targets import TARGETS_FILE, find_misses, load_targets

JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the results and the environment to FILE.")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Measure less, in under a minute.")]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Compare with bench/targets.toml; exit with 1 and name the figures that miss.")
]

LinkOption = Annotated[
    str | None,
    typer.Option(metavar="RATE", help="Rate of a node's link, such as 1gbit; that of an emulated link is known."),
]

_PACKAGES = ("flexcomm", "torch", "numpy", "numba", "mpi4py")
_MISSED_EXIT_CODE = 1


@dataclass(frozen=True)
class Report:
    """Results of one run of a subcommand.

    ``figures`` are the numbers that targets can bound; ``known_figures`` names all the subcommand can measure, and
    ``unmeasured`` says why this run did not measure some. ``rows`` are the details, ``settings`` the options.
    """

    name: str
    known_figures: frozenset[str]
    figures: Mapping[str, float]
    rows: Sequence[Mapping[str, object]] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    unmeasured: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        strange = {*self.figures, *self.unmeasured} - self.known_figures
        if strange:
            raise ValueError(f"{self.name} reports {sorted(strange)}: add the names to known_figures.")


def conclude(report: Report, *, json_file: Path | None, check: bool, targets_file: Path = TARGETS_FILE) -> int:
    """Write the report, check its targets, and return the exit code: 1 if a target was missed, else 0."""
    if json_file is not None:
        write_json(report, json_file)
    for figure, reason in report.unmeasured.items():
        _say(f"not measured: {figure}: {reason}")
    return check_targets(report, targets_file) if check else 0


def write_json(report: Report, file: Path) -> None:
    """Write the report and the environment it was made in."""
    document = {**asdict(report), "environment": describe_environment()}
    document["known_figures"] = sorted(report.known_figures)
    try:
        file.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write the results to {file}: {error.strerror}. Give --json another file.") from error


def check_targets(report: Report, targets_file: Path = TARGETS_FILE) -> int:
    """Say which targets the report keeps or misses; return 1 if it misses any, else 0."""
    targets = load_targets(report.name, report.known_figures, targets_file)
    misses = list(find_misses(targets, report.figures, report.unmeasured))
    for miss in misses:
        _say(f"missed: {miss}")
    if not misses:
        kept = [figure for figure in targets if figure in report.figures]
        _say(f"targets kept: {', '.join(kept) or 'none to keep'}")
    return _MISSED_EXIT_CODE if misses else 0


def describe_environment() -> dict[str, object]:
    """Return the versions and hardware that two results are compared by; nothing that names the machine."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": {package: _version_or_none(package) for package in _PACKAGES},
    }


def _version_or_none(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _say(line: str) -> None:
    # Standard error: a subcommand's output may be piped into a file.
    print(line, file=sys.stderr)


def split_words(option: str, text: str) -> list[str]:
    """Return the words of a list; an empty one is an error."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UsageError(f"got {option} {text!r}, needed at least one word, with commas between.")
    return words


def parse_counts(option: str, text: str) -> list[int]:
    """Return the whole numbers of a list."""
    words = split_words(option, text)
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"got {option} {text!r}, needed whole numbers, with commas between.")
    return [int(word) for word in words]


def check_count(option: str, number: int, least: int) -> None:
    """Raise unless ``number`` is a count the option can have."""
    if number < least:
        raise UsageError(f"got {option} {number}, needed {least} or more.")
