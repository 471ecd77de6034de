"""Targets of the figures, read from ``targets.toml``, and the comparison of a run with them."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.errors import UsageError

TARGETS_FILE = Path(__file__).with_name("targets.toml")
_KEYS = {"at_most", "at_least", "why"}


@dataclass(frozen=True)
class Target:
    """Bounds on one figure, and the reason for them."""

    at_most: float | None
    at_least: float | None
    why: str

    def is_kept_by(self, value: float) -> bool:
        """Return whether ``value`` lies within the bounds; NaN never does."""
        above = self.at_least is None or value >= self.at_least
        below = self.at_most is None or value <= self.at_most
        return above and below

    def __str__(self) -> str:
        bounds = {"at least": self.at_least, "at most": self.at_most}
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)


@dataclass(frozen=True)
class Miss:
    """A target that a run did not keep; ``measured`` is None if the run has no such figure."""

    figure: str
    measured: float | None
    target: Target

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else f"measured {self.measured:.4g}"
        return f"{self.figure}: {measured}, required {self.target} ({self.target.why})"


def load_targets(subcommand: str, known_figures: frozenset[str], file: Path = TARGETS_FILE) -> dict[str, Target]:
    """Return the targets of ``subcommand`` by figure; each is a figure it knows, with at least one bound."""
    tables = tomllib.loads(file.read_text()).get(subcommand, {})
    unknown = sorted(set(tables) - known_figures)
    if unknown:
        raise UsageError(
            f"{file.name} sets targets for {', '.join(unknown)}, but `bench {subcommand}` knows only "
            f"{', '.join(sorted(known_figures))}. Correct the names in [{subcommand}.NAME]."
        )
    return {figure: _parse_target(f"{subcommand}.{figure}", table, file) for figure, table in tables.items()}


def find_misses(
    targets: Mapping[str, Target], figures: Mapping[str, float], unmeasured: Mapping[str, str]
) -> Iterator[Miss]:
    """Yield the targets that ``figures`` miss; a figure without a value is a miss unless ``unmeasured`` says why."""
    for figure, target in targets.items():
        if figure in figures:
            if not target.is_kept_by(figures[figure]):
                yield Miss(figure, figures[figure], target)
        elif figure not in unmeasured:
            yield Miss(figure, None, target)


def _parse_target(name: str, table: object, file: Path) -> Target:
    if not isinstance(table, dict) or not set(table) <= _KEYS or not {"at_most", "at_least"} & set(table):
        raise UsageError(
            f"{file.name} has {table!r} for [{name}], needed a table with at_most or at_least (numbers) and why (a "
            f"sentence), and nothing else."
        )
    bounds = {key: table.get(key) for key in ("at_most", "at_least")}
    if not all(bound is None or isinstance(bound, int | float) for bound in bounds.values()):
        raise UsageError(f"{file.name} has {bounds} for [{name}]: bounds are numbers, without quotes.")
    return Target(bounds["at_most"], bounds["at_least"], str(table.get("why", "no reason given")))
