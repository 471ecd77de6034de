"""Learning rates: the losses of sweeps for every method, saved with the settings of the sweep."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path

from bench.errors import UsageError
from bench.train.methods import ALL_METHODS
from bench.train.plan import Settings

RATES_FILE = Path(__file__).with_name("learning_rates.json")
_DEFAULTS = {one.name: one.default for one in fields(Settings) if one.default is not MISSING}


@dataclass(frozen=True)
class Swept:
    """The validation loss of one method at each learning rate that was tried; None where it diverged."""

    losses: Mapping[float, float | None]
    settings: Mapping[str, object] = field(default_factory=dict)
    date: str = ""

    @property
    def best(self) -> float | None:
        """The learning rate of the least loss; None if all diverged."""
        finished = {lr: loss for lr, loss in self.losses.items() if loss is not None}
        return min(finished, key=lambda lr: finished[lr]) if finished else None

    @property
    def is_at_edge(self) -> bool:
        """True if the best is the least or largest that was tried, so that a better one may lie beyond."""
        return self.best in (min(self.losses), max(self.losses))


@dataclass(frozen=True)
class Choice:
    """A learning rate, and where it comes from."""

    lr: float
    source: str


def load_rates(file: Path = RATES_FILE) -> dict[str, dict[str, Swept]]:
    """Return all saved sweeps, by size and method; empty if there is no file."""
    if not file.exists():
        return {}
    try:
        said = json.loads(file.read_text())
        return {size: {name: _parse(entry) for name, entry in entries.items()} for size, entries in said.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{file.name} is not what a sweep writes ({error!r}): remove it, and sweep again, with --sweep."
        ) from error


def _parse(entry: Mapping[str, Mapping[str, float | None]]) -> Swept:
    losses = {float(lr): loss for lr, loss in entry["losses"].items()}
    return Swept(losses, dict(entry["settings"]), str(entry["date"]))


def save_sweep(
    settings: Settings, found: Mapping[str, Mapping[float, float | None]], file: Path = RATES_FILE
) -> dict[str, Swept]:
    """Save the losses of a sweep; those of other methods, sizes and learning rates are kept.

    Returns all saved losses of the methods in ``found``.
    """
    rates = load_rates(file)
    entries = rates.setdefault(settings.size, {})
    today = datetime.now(UTC).date().isoformat()
    for name, losses in found.items():
        before = entries.get(name)
        known = before.losses if before is not None and _are_settings_of(before.settings, settings) else {}
        entries[name] = Swept(dict(sorted({**known, **losses}.items())), asdict(settings), today)
    said = {size: {name: asdict(swept) for name, swept in methods.items()} for size, methods in rates.items()}
    file.write_text(json.dumps(said, indent=2) + "\n")
    return {name: entries[name] for name in found}


def _are_settings_of(said: Mapping[str, object], settings: Settings) -> bool:
    """Return whether a sweep was made with these settings; settings it does not name had their defaults."""
    return {**_DEFAULTS, **said} == asdict(settings)


def choose_rates(size: str, methods: Iterable[str], told: float | None, file: Path = RATES_FILE) -> dict[str, Choice]:
    """Return the learning rate of each method: ``told``, else the best of a sweep, else the middle of its grid."""
    if told is not None:
        return {name: Choice(told, "--lr") for name in methods}
    swept = load_rates(file).get(size, {})
    return {name: _choose(name, swept.get(name)) for name in methods}


def _choose(name: str, swept: Swept | None) -> Choice:
    if swept is None or swept.best is None:
        return Choice(ALL_METHODS[name].middle, "the middle of its grid: not swept")
    return Choice(swept.best, f"swept {swept.date}")
